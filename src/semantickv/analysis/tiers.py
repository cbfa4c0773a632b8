"""A prefix cache in several tiers, with requests that run: hits by tier, waits for memory, TTFT. Simulated.

::

    arrive ─▶ wait for device memory ─▶ load hits of host or disk ─▶ compute the rest ─▶ first token ─▶ decode ─▶ end

- The device holds the blocks of running requests and of their answers; those of ended ones stay until their room is
  needed, the longest unused first. A request that finds no room waits, and those behind it wait too.
- A computed block is also written to every lower tier, which keeps what was used last: so do LMCache and vLLM's
  offload.
- A block hits in the fastest tier that has it; behind the first block that no tier has, everything is computed.

There is no queue for the GPU and no batch: times are those of a request that computes alone.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.simulator.forest import Forest
from semblend.errors import InputError

DECODE_MS = 20.0
"""Of a token of the answer, where nobody says otherwise: an assumption. 50 tokens a second are easy to read."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier: room in tokens of KV, and the time that a token takes from it to the device (0 for the device)."""

    name: str
    tokens: int
    load_ms_per_token: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.load_ms_per_token < math.inf:
            raise InputError(f"a tier {self.name} of {self.tokens} tokens", hint="room for one token at least")


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of the engine, in ms: before the first token, of a computed prompt token, of a token of the answer."""

    base_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, eq=False)
class TieredRun:
    """What one replay gave. Arrays are by request; a request that never fits has no times (NaN) and no hits."""

    tiers: tuple[Tier, ...]
    hit_tokens: npt.NDArray[np.int64]  # requests x tiers
    prompt_tokens: npt.NDArray[np.int64]
    wait_ms: Floats
    ttft_ms: Floats
    too_large: int
    most_held_tokens: int  # the most that running requests held at a time

    @property
    def hit_rates(self) -> dict[str, float]:
        """Share of the prompt tokens that came from each tier."""
        total = max(1, int(self.prompt_tokens.sum()))
        return {tier.name: int(self.hit_tokens[:, at].sum()) / total for at, tier in enumerate(self.tiers)}

    def as_json(self) -> dict[str, Any]:
        """Return rates and times."""
        served = self.ttft_ms[~np.isnan(self.ttft_ms)]
        p50, p95 = (float(np.percentile(served, q)) for q in (50, 95)) if len(served) else (0.0, 0.0)
        return {
            "simulated": True,
            "tiers": {
                tier.name: {"tokens": tier.tokens, "load_ms_per_token": tier.load_ms_per_token} for tier in self.tiers
            },
            "token_hit_rate": sum(self.hit_rates.values()),
            "token_hit_rate_by_tier": self.hit_rates,
            "avg_ttft_ms": float(served.mean()) if len(served) else 0.0,
            "p50_ttft_ms": p50,
            "p95_ttft_ms": p95,
            "requests_that_waited_for_memory": int((self.wait_ms > 0).sum()),
            "too_large": self.too_large,
            "most_tokens_of_running_requests": self.most_held_tokens,
        }  # fmt: skip


def replay_tiers(forest: Forest, tiers: Sequence[Tier], speed: Speed) -> TieredRun:
    """Replay a trace (a forest in prefix mode) through tiers, the device first."""
    if not tiers or forest.mode != "prefix":
        raise InputError("tiers need a device and prefixes", hint="build_forest(trace, 'prefix')")
    trace, device = forest.trace, _Device(forest.tokens.tolist(), tiers[0].tokens)
    lower = [_LowerTier(device.sizes, tier.tokens) for tier in tiers[1:]]
    hits = np.zeros((len(trace), len(tiers)), np.int64)
    wait, ttft = np.zeros(len(trace)), np.full(len(trace), np.nan)
    node, starts = forest.node.tolist(), trace.starts.tolist()
    arrivals, answers = (trace.arrival_s * 1000).tolist(), trace.output_tokens.tolist()
    now, too_large = 0.0, 0
    for r in range(len(trace)):
        chain = node[starts[r] : starts[r + 1]]
        begin = device.wait_for_room(chain, answers[r], max(now, arrivals[r]))
        if begin is None:
            too_large += 1
            continue
        now = begin  # first come, first served
        at = _look_up(chain, device, lower)
        for tier, count in at.items():
            hits[r, tier] = count
        load = sum(tiers[tier].load_ms_per_token * count for tier, count in at.items())
        computed = sum(device.sizes[one] for one in chain) - sum(at.values())
        wait[r] = begin - arrivals[r]
        ttft[r] = wait[r] + speed.base_ms + load + speed.prefill_ms * computed
        device.hold(chain, answers[r], arrivals[r] + ttft[r] + speed.decode_ms * answers[r])
        for one in lower:
            one.write(chain)
    return TieredRun(tuple(tiers), hits, trace.request_tokens, wait, ttft, too_large, device.most_held)


def count_running_tokens(forest: Forest, speed: Speed) -> int:
    """Count the most tokens of KV that requests hold while they run, where memory is never short.

    A block that several of them share is counted once.
    """
    trace = forest.trace
    room = int(forest.tokens.sum(dtype=np.int64)) + int(trace.output_tokens.sum(dtype=np.int64))
    return replay_tiers(forest, [Tier("device", max(1, room))], speed).most_held_tokens


def _look_up(chain: Sequence[int], device: _Device, lower: Sequence[_LowerTier]) -> dict[int, int]:
    """Count the hit tokens by tier, up to the first block that no tier has."""
    found: dict[int, int] = {}
    for one in chain:
        at = 0 if one in device else next((n for n, tier in enumerate(lower, 1) if one in tier), None)
        if at is None:
            break
        found[at] = found.get(at, 0) + device.sizes[one]
    return found


class _Device:
    """Blocks of running requests, which stay, and blocks that may go, the longest unused first."""

    def __init__(self, sizes: list[int], tokens: int) -> None:
        self.sizes, self.tokens, self.most_held = sizes, tokens, 0
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._running: list[tuple[float, int, list[int], int]] = []
        self._used = self._held = self._number = 0

    def __contains__(self, block: int) -> bool:
        return block in self._holders or block in self._idle

    def wait_for_room(self, chain: list[int], answer: int, now: float) -> float | None:
        """Return when the running requests leave room for this one, from ``now`` on; None if they never do."""
        if sum(self.sizes[one] for one in chain) + answer > self.tokens:
            return None
        self._end_until(now)
        while self._count_needed(chain) + answer > self.tokens - self._held:
            now = max(now, self._running[0][0])
            self._end_until(now)
        return now

    def _count_needed(self, chain: list[int]) -> int:
        return sum(self.sizes[one] for one in chain if one not in self._holders)

    def hold(self, chain: list[int], answer: int, until: float) -> None:
        """Hold the blocks of a request and room for its answer until it ends."""
        for one in chain:
            if one not in self:
                self._used += self.sizes[one]
            self._idle.pop(one, None)
            if one not in self._holders:
                self._held += self.sizes[one]
            self._holders[one] = self._holders.get(one, 0) + 1
        self._used += answer
        self._held += answer
        self.most_held = max(self.most_held, self._held)
        while self._used > self.tokens:
            self._used -= self.sizes[self._idle.popitem(last=False)[0]]
        self._number += 1
        heapq.heappush(self._running, (until, self._number, chain, answer))

    def _end_until(self, now: float) -> None:
        while self._running and self._running[0][0] <= now:
            _, _, chain, answer = heapq.heappop(self._running)
            self._used -= answer
            self._held -= answer
            for one in reversed(chain):  # the last block goes first: a block is of no use without those before it
                self._holders[one] -= 1
                if not self._holders[one]:
                    del self._holders[one]
                    self._held -= self.sizes[one]
                    self._idle[one] = None


class _LowerTier:
    """Copies of what was computed, the longest unused goes first."""

    def __init__(self, sizes: list[int], tokens: int) -> None:
        self._sizes, self._tokens, self._used = sizes, tokens, 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def write(self, chain: Sequence[int]) -> None:
        """Write or touch the blocks of a prompt; its first block counts as used last."""
        for one in reversed(chain):
            if one in self._blocks:
                self._blocks.move_to_end(one)
            else:
                self._blocks[one] = None
                self._used += self._sizes[one]
        while self._used > self._tokens:
            self._used -= self._sizes[self._blocks.popitem(last=False)[0]]
