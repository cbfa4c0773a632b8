"""The advice for one trace as a value: curves, the chosen policy and size, what it saves, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from semantickv.analysis.engines import ENGINES, KvMemory, list_engines_with
from semantickv.analysis.intervals import Interval
from semantickv.analysis.latency import LatencyModel
from semantickv.analysis.sizing import Costs
from semantickv.simulator.simulate import SimulationResult
from semantickv.traces.trace import Trace

NOISE = 0.005
"""Hit rates that differ by less than this are called equal: half a point."""
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
    """What would be advised if the memory were of this kind. ``at`` is the index of the size; None: no size pays."""

    costs: Costs
    policy: str
    at: int | None
    point: Point
    hours: float

    @property
    def gpu_hours_a_day(self) -> float:
        """GPU hours that a day of this traffic saves."""
        return self.costs.compute_gpu_hours(self.point.tokens_saved) * self._days_share

    @property
    def saved_a_day(self) -> float:
        """What those GPU hours cost."""
        return self.gpu_hours_a_day * self.costs.gpu.hour

    @property
    def memory_a_day(self) -> float:
        """What the memory costs in a day."""
        return self.costs.compute_gib(self.point.tokens) * self.costs.tier.gib_hour * 24

    @property
    def net_a_day(self) -> float:
        return self.saved_a_day - self.memory_a_day

    @property
    def _days_share(self) -> float:
        return 24 / self.hours if self.hours else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the choice in the names of advice.json."""
        pays = self.at is not None
        return {
            "pays": pays,
            "policy": self.policy if pays else None,
            "tokens": self.point.tokens if pays else 0,
            "gib": round(self.costs.compute_gib(self.point.tokens), 4) if pays else 0.0,
            "token_hit_rate": self.point.token_hit_rate if pays else 0.0,
            "gpu_hours_saved_a_day": self.gpu_hours_a_day if pays else 0.0,
            "saved_a_day": self.saved_a_day if pays else 0.0,
            "memory_cost_a_day": self.memory_a_day if pays else 0.0,
            "net_a_day": self.net_a_day if pays else 0.0,
        } | self.costs.as_json()


@dataclass(frozen=True, slots=True)
class Sureness:
    """95 % intervals by bootstrap over so many ``units``. ``sizes`` (tokens) is None where the curves are samples."""

    unit: str
    units: int
    hit_rate: Interval
    net_a_day: Interval
    sizes: Interval | None
    share_without: float  # of the draws in which no size pays


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
    hours: float
    at_chosen: SimulationResult
    ceiling: Point  # LRU with room for everything: what a prefix cache could ever give on this trace
    rate: float = 1.0  # share of the blocks that were simulated
    half: int | None = None  # tokens that the first half of the trace asks for; None where it asks for nothing
    sureness: Sureness | None = None  # None: too few sessions
    running: int | None = None  # the most tokens that running requests hold at a time; None where it was not counted
    engine: str = ""  # only its policies are advised; "": those of any

    @property
    def policy(self) -> str:
        return self.choice.policy

    @property
    def chosen(self) -> int:
        """Index of the advised size; the smallest where none pays."""
        return self.choice.at or 0

    @property
    def pays(self) -> bool:
        """Whether the advised size earns what it costs."""
        return self.choice.at is not None

    @property
    def costs(self) -> Costs:
        return self.choice.costs

    @property
    def latency(self) -> LatencyModel:
        return self.costs.latency

    @property
    def command(self) -> str:
        """What sets the advised policy and memory in the chosen engine; empty where none was chosen."""
        if not self.engine:
            return ""
        tokens = self.sizes[self.chosen]
        return ENGINES[self.engine].write(self.policy, KvMemory(tokens, tokens * self.token_bytes))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(point.tokens for point in self.curves["lru"])

    @property
    def token_bytes(self) -> int:
        return self.costs.token_bytes

    @property
    def is_by_price(self) -> bool:
        """Whether the size was chosen by prices; a trace without duration has its knee instead."""
        return self.hours > 0

    @property
    def is_stable(self) -> bool:
        """Whether half of the trace, on its own, asks for about as much memory: within `STABLE_TIMES`."""
        if self.half is None:
            return not self.pays
        return self.pays and _are_alike(self.half, self.sizes[self.chosen])

    @property
    def is_sure(self) -> bool:
        """Whether the draws of the bootstrap agree: on a size, within `STABLE_TIMES`, and on whether it pays."""
        found = self.sureness
        if found is None:
            return False
        if not self.pays:
            return found.share_without >= 0.95
        if found.share_without > 0.05:
            return False
        size = self.sizes[self.chosen]
        return found.sizes is None or (_are_alike(found.sizes.low, size) and _are_alike(found.sizes.high, size))

    @property
    def is_too_short(self) -> bool:
        """Whether the trace is too short to choose a size: its half or the bootstrap says something else."""
        return not (self.is_stable and self.is_sure)

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
        """Estimated average time to first token with the advised policy and size, in ms; loads are counted."""
        hit = self._mean_tokens * self.get_advised_point(self.policy).token_hit_rate
        computed = self.latency.token_latency_ms * (self._mean_tokens - hit)
        return self.latency.base_ttft_ms + computed + self.costs.load_ms_per_token * hit

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
            "by_memory": {name: one.as_json() for name, one in self.tiers.items()} if self.can_tell else None,
            "curves": {policy: self._list_points(points) for policy, points in self.curves.items()},
            "position_independent": self._list_points(self.anywhere) or None,
            "arranged": None if self.arranged is None else self._list_points([self.arranged])[0],
        }

    def _describe_advice(self) -> dict[str, Any]:
        sure = self.sureness
        return self.choice.as_json() | {
            "policy": self.policy,
            "engine": self.engine or None,
            "command": self.command or None,
            "engines_that_have_it": list_engines_with(self.policy),
            "size_chosen_by": "price" if self.is_by_price else "knee",
            "gib_by_the_first_half": None if self.half is None else round(self.to_gib(self.half), 4),
            "stable": self.is_stable,
            "trace_too_short": self.is_too_short,
            "intervals": None if sure is None else {
                "drawn": sure.unit,
                "units": sure.units,
                "token_hit_rate": [sure.hit_rate.low, sure.hit_rate.high],
                "net_a_day": [sure.net_a_day.low, sure.net_a_day.high],
                "gib": None if sure.sizes is None else [self.to_gib(sure.sizes.low), self.to_gib(sure.sizes.high)],
                "share_of_draws_in_which_nothing_pays": sure.share_without,
            },
            "avg_ttft_ms_without_a_cache": self.ttft_cold_ms,
            "avg_ttft_ms": self.ttft_ms,
            "gib_of_running_requests": None if self.running is None else self.to_gib(self.running),
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
