"""The advice for one trace as a value: curves, the chosen policy and size, what it saves, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from semantickv.analysis.engines import ENGINES, KvMemory, list_engines_with
from semantickv.analysis.intervals import Interval
from semantickv.analysis.latency import LatencyModel
from semantickv.analysis.sizing import NOISE, Costs, Room
from semantickv.simulator.simulate import SimulationResult
from semantickv.traces.trace import Trace

MUCH = 0.05
"""Of the prompt tokens: so much more is worth a headline before its size is known."""
STABLE_TIMES = 1.5
"""Two sizes that differ by no more than this are called the same: about a step between two sizes that are tried."""


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one size."""

    tokens: int
    token_hit_rate: float
    block_hit_rate: float
    tokens_saved: int
    error: float = 0.0  # standard error of the rates where they come from samples


@dataclass(frozen=True, slots=True)
class TierChoice:
    """How much memory of this kind to add to what the engine has. ``at`` is the index of the size; None: add nothing.

    ``own`` is what the engine gives as it is (LRU, its own memory), ``point`` what it would give with the advice.
    """

    costs: Costs
    policy: str
    at: int | None
    point: Point
    own: Point
    room: Room
    hours: float

    @property
    def adds(self) -> bool:
        return self.at is not None

    @property
    def added_tokens(self) -> int:
        """Tokens of KV that the added memory holds: the cache, the running requests and one of full length."""
        return self.room.add_requests(self.point.tokens) if self.adds else 0

    @property
    def gpu_hours_a_day(self) -> float:
        """GPU hours that a day of this traffic saves: by the added memory, or without one by the engine's own."""
        hits = self.point.tokens_saved - (self.own.tokens_saved if self.adds else 0)
        return hits * self.saved_gpu_ms_per_token / 3.6e6 * 24 / self.hours

    @property
    def saved_gpu_ms_per_token(self) -> float:
        """GPU time that a hit saves: of the added memory its prefill less its load; on the GPU nothing is loaded."""
        return self.costs.saved_gpu_ms_per_token if self.adds else self.costs.rate.gpu_ms_per_token

    @property
    def saved_a_day(self) -> float:
        """What those GPU hours cost."""
        return self.gpu_hours_a_day * self.costs.gpu.hour

    @property
    def memory_a_day(self) -> float:
        """What the added memory costs in a day."""
        return self.costs.compute_gib(self.added_tokens) * self.costs.tier.gib_hour * 24

    @property
    def net_a_day(self) -> float:
        return self.saved_a_day - self.memory_a_day

    def as_json(self, by_price: bool) -> dict[str, Any]:
        """Return the choice in the names of advice.json; money only where the trace is long enough."""
        return {
            "adds_memory": self.adds,
            "policy": self.policy,
            "tokens": self.point.tokens,
            "gib": round(self.costs.compute_gib(self.point.tokens), 4),
            "gib_to_add": round(self.costs.compute_gib(self.added_tokens), 4),
            "token_hit_rate": self.point.token_hit_rate,
            "token_hit_rate_of_the_engines_own_memory": self.own.token_hit_rate,
            "gpu_hours_saved_a_day": self.gpu_hours_a_day if by_price else None,
            "saved_a_day": self.saved_a_day if by_price else None,
            "memory_cost_a_day": self.memory_a_day if by_price else None,
            "net_a_day": self.net_a_day if by_price else None,
        } | self.costs.as_json()


@dataclass(frozen=True, slots=True)
class Sureness:
    """95 % intervals by bootstrap over so many ``units``. ``sizes`` (tokens) is None where the curves are samples."""

    unit: str
    units: int
    hit_rate: Interval
    net_a_day: Interval | None  # None where the trace is too short for money
    sizes: Interval | None
    share_without: float  # of the draws in which nothing is added


@dataclass(frozen=True, eq=False)
class Advice:
    """Curves of hit rate against memory, and what to do. Sizes are in tokens of KV."""

    trace: Trace
    facts: Mapping[str, Any]
    model: str
    dtype: str
    curves: Mapping[str, tuple[Point, ...]]
    anywhere: tuple[Point, ...]  # the advised policy in block mode; empty where the trace cannot tell
    arranged: Point | None  # the advised policy and size with passages in the order of earlier prompts; None: none move
    choice: TierChoice
    tiers: Mapping[str, TierChoice]  # the same question for every kind of memory
    spare: TierChoice | None  # memory to add if the machine has it unused, where at its price none is worth adding
    hours: float
    by_price: bool  # whether money chose the size: not on a trace under an hour
    at_chosen: SimulationResult
    ceiling: Point  # LRU with room for everything: what a prefix cache could ever give on this trace
    rate: float = 1.0  # share of the blocks that were simulated
    half: int | None = None  # the size that the first half of the trace asks for; None where it asks for no more memory
    sureness: Sureness | None = None  # None: too few sessions
    engine: str = ""  # only its policies are advised; "": those of any

    @property
    def policy(self) -> str:
        return self.choice.policy

    @property
    def chosen(self) -> int:
        """Index of the advised size; that of the engine's own memory where nothing is added."""
        return self.sizes.index(self.choice.point.tokens)

    @property
    def room(self) -> Room:
        return self.choice.room

    @property
    def helps_to_add(self) -> bool:
        """Whether unlimited memory would give more than `NOISE` above the engine's own."""
        return self.ceiling.token_hit_rate - self.choice.own.token_hit_rate > NOISE

    @property
    def surely_helps_to_add(self) -> bool:
        """Whether the whole trace, its half and the draws all ask for more memory, and it could give much (`MUCH`)."""
        found = self.sureness
        gain = self.ceiling.token_hit_rate - self.choice.own.token_hit_rate
        asked = self.choice.adds and self.half is not None and found is not None
        return asked and gain > MUCH and found is not None and found.share_without <= 0.05

    @property
    def costs(self) -> Costs:
        return self.choice.costs

    @property
    def latency(self) -> LatencyModel:
        return self.costs.latency

    @property
    def command(self) -> str:
        """What sets the advice in the chosen engine; empty where its defaults do, or the trace is too short."""
        return "" if self.is_too_short or self.ceiling.token_hit_rate < NOISE else self.write_command(self.choice)

    def write_command(self, choice: TierChoice) -> str:
        """Write what sets a choice in the chosen engine; empty where there is nothing to set.

        Never less than the engine takes by default, nor than the running requests and one of full length need.
        """
        engine = ENGINES.get(self.engine)
        if engine is None:
            return ""
        if choice.adds and engine.write_host:
            size = max(choice.added_tokens * self.token_bytes, engine.least_host_bytes)
            return engine.write_host(choice.policy, KvMemory(choice.added_tokens, size, self.costs.rate.gpus))
        tokens = self.pool_tokens
        return engine.write_own(choice.policy, KvMemory(tokens, tokens * self.token_bytes, self.costs.rate.gpus))

    @property
    def pool_tokens(self) -> int:
        """The pool of an engine that does not take all of the GPU by itself: what gives as many hits as all of it."""
        engine, least = ENGINES.get(self.engine), self.choice.own.token_hit_rate - NOISE
        useful = next(point.tokens for point in self.curves["lru"] if point.token_hit_rate >= least)
        default = engine.default_tokens or 0 if engine else 0
        return max(default, min(self.room.pool, self.room.add_requests(useful)))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(point.tokens for point in self.curves["lru"])

    @property
    def token_bytes(self) -> int:
        return self.costs.token_bytes

    @property
    def is_stable(self) -> bool:
        """Whether half of the trace, on its own, asks for about as much memory: within `STABLE_TIMES`."""
        if self.half is None:
            return not self.choice.adds
        return self.choice.adds and _are_alike(self.half, self.choice.point.tokens)

    @property
    def is_sure(self) -> bool:
        """Whether the draws of the bootstrap agree: on a size, within `STABLE_TIMES`, and on whether to add memory."""
        found = self.sureness
        if found is None:
            return False
        if not self.choice.adds:
            return found.share_without >= 0.95
        if found.share_without > 0.05:
            return False
        size = self.choice.point.tokens
        return found.sizes is None or (_are_alike(found.sizes.low, size) and _are_alike(found.sizes.high, size))

    @property
    def is_too_short(self) -> bool:
        """Whether the trace is too short for the advice: too few sessions, or its half or the draws say another size.

        Leaving the engine as it is needs no size, nor does memory that costs nothing: those need enough sessions only.
        """
        if self.sureness is None:
            return True
        free = not self.costs.tier.gib_hour
        return self.choice.adds and not free and not (self.is_stable and self.is_sure)

    @property
    def can_tell(self) -> bool:
        """Whether the trace says what prompts hold. One that has their lengths alone says nothing about a cache."""
        return self.trace.holds_content

    def get_advised_point(self, policy: str) -> Point:
        """Return the result of ``policy`` at the advised size."""
        return self.curves[policy][self.chosen]

    def to_gib(self, tokens: float) -> float:
        """Convert tokens of KV to GiB for the advice's model and dtype."""
        return self.costs.compute_gib(tokens)

    @property
    def ttft_cold_ms(self) -> float:
        """Estimated average time to first token without a cache, in ms."""
        return self.latency.base_ttft_ms + self.latency.token_latency_ms * self._mean_tokens

    @property
    def ttft_ms(self) -> float:
        """Estimated average time to first token with the advice, in ms; what the added memory gives is loaded."""
        hit = self._mean_tokens * self.choice.point.token_hit_rate
        loaded = hit - self._mean_tokens * self.choice.own.token_hit_rate if self.choice.adds else 0.0
        computed = self.latency.token_latency_ms * (self._mean_tokens - hit)
        return self.latency.base_ttft_ms + computed + self.costs.load_ms_per_token * loaded

    @property
    def _mean_tokens(self) -> float:
        """Prompt tokens of an average request."""
        return float(self.facts["prompt_tokens"]) / max(1, int(self.facts["requests"]))

    def as_json(self) -> dict[str, Any]:
        """Return the advice with all its curves, in the names of advice.json."""
        return {
            "simulated": True,
            "trace": dict(self.facts) | {"format": self.trace.format, "skipped_lines": self.trace.skipped},
            "sampled": self.rate,
            "kv": {"model": self.model, "dtype": self.dtype, "bytes_per_token": self.token_bytes},
            "latency": self.latency.as_json(),
            "ceiling": self._list_points([self.ceiling])[0] if self.can_tell else None,
            "advice": self._describe_advice() if self.can_tell else None,
            "by_memory": {name: one.as_json(self.by_price) for name, one in self.tiers.items()}
            if self.can_tell
            else None,
            "curves": {policy: self._list_points(points) for policy, points in self.curves.items()},
            "position_independent": self._list_points(self.anywhere) or None,
            "arranged": None if self.arranged is None else self._list_points([self.arranged])[0],
        }

    def _describe_advice(self) -> dict[str, Any]:
        sure = self.sureness
        return self.choice.as_json(self.by_price) | {
            "engine": self.engine or None,
            "command": self.command or None,
            "engines_that_have_it": list_engines_with(self.policy),
            "command_for_unused_memory": (self.spare and self.write_command(self.spare)) or None,
            "gib_to_add_if_unused": self.spare and round(self.to_gib(self.spare.added_tokens), 4),
            "token_hit_rate_with_unused_memory": self.spare and self.spare.point.token_hit_rate,
            "size_chosen_by": "price" if self.by_price else "knee",
            "gib_by_the_first_half": None if self.half is None else round(self.to_gib(self.half), 4),
            "stable": self.is_stable,
            "trace_too_short": self.is_too_short,
            "intervals": None if sure is None else {
                "drawn": sure.unit,
                "units": sure.units,
                "token_hit_rate": [sure.hit_rate.low, sure.hit_rate.high],
                "net_a_day": sure.net_a_day and [sure.net_a_day.low, sure.net_a_day.high],
                "gib": None if sure.sizes is None else [self.to_gib(sure.sizes.low), self.to_gib(sure.sizes.high)],
                "share_of_draws_in_which_nothing_is_added": sure.share_without,
            },
            "avg_ttft_ms_without_a_cache": self.ttft_cold_ms,
            "avg_ttft_ms": self.ttft_ms,
            "gib_of_the_engines_own_memory": self.to_gib(self.room.pool),
            "gib_of_running_requests": self.to_gib(self.room.running),
            "gib_of_the_longest_request": self.to_gib(self.room.longest),
        }  # fmt: skip

    def _list_points(self, points: Sequence[Point]) -> list[dict[str, float]]:
        return [
            {
                "tokens": point.tokens,
                "gib": round(self.to_gib(point.tokens), 4),
                "token_hit_rate": point.token_hit_rate,
                "block_hit_rate": point.block_hit_rate,
                "tokens_saved": point.tokens_saved,
                "standard_error": point.error,
            }
            for point in points
        ]


def _are_alike(one: float, other: float) -> bool:
    less, more = sorted((one, other))
    return more <= STABLE_TIMES * less


def count_hits_by_type(advice: Advice) -> dict[str, tuple[int, int]]:
    """Count the prompt tokens of each block type, and those that hit at the advised size."""
    trace = advice.trace
    left = np.asarray(advice.at_chosen.hit_tokens_by_request, dtype=np.int64)
    ends = np.cumsum(trace.tokens, dtype=np.int64)
    before = ends - trace.tokens
    offset = before - np.repeat(before[trace.starts[:-1]] if len(trace) else before, np.diff(trace.starts))
    hit = np.where(offset + trace.tokens <= left[trace.request], trace.tokens, 0)
    return {
        name: (int(trace.tokens[trace.types == n].sum(dtype=np.int64)), int(hit[trace.types == n].sum()))
        for n, name in enumerate(trace.type_names)
        if (trace.types == n).any()
    }
