"""The loads of `bench/vllm_load.py`: who arrives when, who decodes meanwhile, and what is measured of both."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

TTFT_GOAL_MS, ITL_GOAL_MS = 500.0, 50.0
"""What is in time: the first token of an arrival, and the next token of a request that decodes."""
HEAD, OTHER_HEAD, QUESTION = 64, 40, 32
DOCUMENTS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """``arrivals`` prompts, one every ``every_s`` seconds (on average, if ``poisson``), while ``decoders`` decode.

    ``reusable``: a donor holds the document of each. ``rounds``: so often, and all arrivals count together.
    """

    name: str
    arrivals: int
    every_s: float
    decoders: int = 32
    poisson: bool = False
    reusable: bool = True
    rounds: int = 1

    def draw_times(self, rng: random.Random) -> list[float]:
        """When each arrives, in seconds from the beginning.

        >>> Load("four a second", 3, 0.25).draw_times(random.Random(0))
        [0.0, 0.25, 0.5]
        """
        if not self.poisson:
            return [number * self.every_s for number in range(self.arrivals)]
        return list(accumulate(rng.expovariate(1 / self.every_s) for _ in range(self.arrivals)))


LOADS = (
    Load("one a second", 16, 1.0),
    Load("four a second", 24, 0.25),
    Load("eight at once", 8, 0.0, rounds=2),
    Load("four a second at random moments", 32, 0.25, poisson=True),
    Load("four a second, 100 decode", 24, 0.25, decoders=100),
    Load("nothing reusable, one a second", 16, 1.0, reusable=False, rounds=2),
)
"""In the order of the table. Arrivals at random moments are a Poisson process."""
BY_VALUE = ("eight at once", "four a second", "nothing reusable, one a second", "one a second",
            "four a second at random moments", "four a second, 100 decode")  # fmt: skip
"""In this order they are measured: a run that ends early has the first ones."""


@dataclass(slots=True)
class Seen:
    """What was measured: gaps between tokens of those that decode, times to first token, seconds that it took."""

    gaps_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    reused: list[bool] = field(default_factory=list)
    wall_s: float = 0.0


def summarize(load: Load, seen: Seen) -> dict[str, Any]:
    """The row of a load; times in ms."""
    gaps, ttft = sorted(gap * 1e3 for gap in seen.gaps_s), sorted(seen.ttft_ms)
    in_time = sum(ms <= TTFT_GOAL_MS for ms in ttft)
    smooth = sum(ms <= ITL_GOAL_MS for ms in gaps)
    return {
        "what": "load", "name": load.name, "n": load.arrivals * load.rounds, "every": load.every_s,
        "decoders": load.decoders, "served": len(ttft), "with_reuse": sum(seen.reused), "wall_s": seen.wall_s,
        "decode_tok_s": len(gaps) / seen.wall_s, "good_tok_s": smooth / seen.wall_s,
        "good_share": in_time / (load.arrivals * load.rounds),
        **{f"itl_p{p}": _pick(gaps, p) for p in (50, 95, 99)}, "itl_max": gaps[-1] if gaps else None,
        "ttft_p50": statistics.median(ttft) if ttft else None, "ttft_p99": _pick(ttft, 99),
        "ttft_max": ttft[-1] if ttft else None,
    }  # fmt: skip


def _pick(ordered: list[float], percent: int) -> float | None:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else None


class LoadRun:
    """An engine that serves loads; ``asked`` are the options of every arrival."""

    def __init__(self, engine: Any, document_tokens: int, decode_prompt: int, longest_s: float = 60.0) -> None:
        self.engine, self.core = engine, engine.llm.llm_engine
        self._decode_prompt, self._longest_s, self._document_tokens = decode_prompt, longest_s, document_tokens
        self.documents = [engine.tokens(document_tokens) for _ in range(DOCUMENTS)]
        self._opted_out: dict[str, Any] = {} if engine.kind == "stock" else {"opt_out": True}
        self._count = 0

    def make_donors(self) -> None:
        for document in self.documents:
            self.engine.ask(self.engine.tokens(HEAD) + document + self.engine.tokens(QUESTION))

    def make_arrival(self, number: int, reusable: bool = True) -> list[int]:
        """A prompt with a document that a donor holds, or with one that nobody has seen."""
        document = self.documents[number % DOCUMENTS] if reusable else self.engine.tokens(self._document_tokens)
        return list(self.engine.tokens(OTHER_HEAD) + document + self.engine.tokens(QUESTION))

    def run(self, load: Load, asked: dict[str, Any]) -> dict[str, Any]:
        """Serve the arrivals of every round while others decode."""
        seen = Seen()
        for _ in range(load.rounds):
            arrivals = [self.make_arrival(number, load.reusable) for number in range(load.arrivals)]
            self._serve(load, arrivals, asked, seen)
        return summarize(load, seen)

    def _serve(self, load: Load, arrivals: list[list[int]], asked: dict[str, Any], seen: Seen) -> None:
        self._count += 1
        decoders = [f"decode-{self._count}-{number}" for number in range(load.decoders)]
        for name in decoders:
            ids = self.engine.tokens(self._decode_prompt)
            self.core.add_request(name, {"prompt_token_ids": ids}, self.engine.params(4000, **self._opted_out))
        last: dict[str, float] = {}
        arrived: dict[str, float] = {}
        gaps: list[float] = []

        def step() -> None:
            for output in self.core.step():
                now, name = time.perf_counter(), output.request_id
                if name in last:
                    gaps.append(now - last[name])
                if name.startswith("decode"):
                    last[name] = now
                elif name in arrived and output.outputs[0].token_ids:
                    seen.ttft_ms.append((now - arrived.pop(name)) * 1e3)
                if output.finished and not name.startswith("decode"):
                    receipt = (output.kv_transfer_params or {}).get("semblend") or {}
                    seen.reused.append(bool(receipt.get("reused_tokens")))

        for _ in range(load.decoders + 88):  # until all of them decode
            step()
        gaps.clear()
        begun, served = time.perf_counter(), len(seen.ttft_ms) + len(arrivals)
        waiting = list(enumerate(zip(load.draw_times(random.Random(self._count)), arrivals, strict=True)))
        while len(seen.ttft_ms) < served and time.perf_counter() - begun < self._longest_s:
            while waiting and time.perf_counter() - begun >= waiting[0][1][0]:
                number, (_, ids) = waiting.pop(0)
                name = f"arrival-{self._count}-{number}"
                arrived[name] = time.perf_counter()
                self.core.add_request(name, {"prompt_token_ids": ids}, self.engine.params(2, **asked))
            step()
        seen.wall_s += time.perf_counter() - begun
        seen.gaps_s += gaps
        self.core.abort_request(decoders)
        while self.core.has_unfinished_requests():
            step()
