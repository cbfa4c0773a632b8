"""Advice for one trace: which policy to use and how much memory it needs. Simulated.

Every policy is simulated at several cache sizes. Another policy than LRU is advised only where it beats LRU by more
than `NOISE`. The knee is the size from which more memory brings little. Bounds that know the future are drawn, never
advised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from semantickv.analysis.engines import ENGINES, GIB, KvMemory, list_engines_with
from semantickv.analysis.latency import BOUNDS, LatencyModel
from semantickv.analysis.mrc import simulate_curve
from semantickv.analysis.sizing import Prices, find_knee, find_paying_size
from semantickv.simulator.capacity import Capacity, count_kv_bytes_per_token
from semantickv.simulator.forest import Forest, build_forest
from semantickv.simulator.policies import POLICIES
from semantickv.simulator.simulate import SimulationResult, simulate
from semantickv.traces.trace import Trace, describe_trace
from semblend.errors import InputError

NOISE = 0.005
"""Hit rates that differ by less than this are called equal: half a point."""
SIZES = 10
STABLE_TIMES = 1.5
"""Two sizes that differ by no more than this are called the same: about a step between two sizes that are tried."""
MOST_ACCESSES = 60_000_000  # accesses times sizes times policies beyond which curves come from samples: about a minute


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one size."""

    tokens: int
    token_hit_rate: float
    block_hit_rate: float
    tokens_saved: int
    error: float = 0.0  # standard error of the rates where they come from samples


@dataclass(frozen=True, eq=False)
class Advice:
    """Curves of hit rate against memory, and what to do. ``capacity`` sizes are in tokens of KV."""

    trace: Trace
    facts: Mapping[str, Any]
    latency: LatencyModel
    model: str
    dtype: str
    curves: Mapping[str, tuple[Point, ...]]
    anywhere: tuple[Point, ...]  # the advised policy in block mode; empty where the trace cannot tell
    policy: str
    knee: int  # index into the sizes
    hours: float
    at_knee: SimulationResult
    ceiling: Point  # LRU with room for everything: what a prefix cache could ever give on this trace
    rate: float = 1.0  # share of the blocks that were simulated
    hour_cost: float | None = None
    prices: Prices | None = None  # without them the size is the knee
    pays: bool = True  # False: at these prices no size earns what it costs
    half: int | None = None  # tokens that the first half of the trace asks for; None where it asks for nothing
    engine: str = ""  # only its policies are advised; "": those of any

    @property
    def command(self) -> str:
        """What sets the advised policy and memory in the chosen engine; empty where none was chosen."""
        if not self.engine:
            return ""
        tokens = self.sizes[self.knee]
        return ENGINES[self.engine].write(self.policy, KvMemory(tokens, tokens * self.token_bytes))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(point.tokens for point in self.curves["lru"])

    @property
    def token_bytes(self) -> int:
        return count_kv_bytes_per_token(self.model, self.dtype)

    @property
    def is_stable(self) -> bool:
        """Whether half of the trace, on its own, asks for about as much memory: within `STABLE_TIMES`."""
        if self.half is None:
            return not self.pays
        less, more = sorted((self.half, self.sizes[self.knee]))
        return self.pays and more <= STABLE_TIMES * less

    @property
    def can_tell(self) -> bool:
        """Whether the trace says what prompts hold. One that has their lengths alone says nothing about a cache."""
        return self.trace.holds_content

    def get_point_at_knee(self, policy: str) -> Point:
        """Return the result of ``policy`` at the advised size."""
        return self.curves[policy][self.knee]

    def to_gib(self, tokens: int) -> float:
        """Convert tokens of KV to GiB for the advice's model and dtype."""
        return tokens * self.token_bytes / GIB

    @property
    def saved_hours(self) -> float:
        """Prefill time saved over the trace, in hours, by the latency line."""
        return self.get_point_at_knee(self.policy).tokens_saved * self.latency.token_latency_ms / 3.6e6

    @property
    def saved_a_day(self) -> float:
        """Prefill time saved in a day of such traffic, in hours."""
        return self.saved_hours * 24 / self.hours if self.hours else 0.0

    @property
    def ttft_cold_ms(self) -> float:
        """Estimated average time to first token without a cache, in ms."""
        return self.latency.base_ttft_ms + self.latency.token_latency_ms * self._mean_tokens

    @property
    def ttft_ms(self) -> float:
        """Estimated average time to first token with the advised policy and size, in ms."""
        return self.latency.base_ttft_ms + self.latency.token_latency_ms * self._mean_tokens * (
            1 - self.get_point_at_knee(self.policy).token_hit_rate
        )

    @property
    def _mean_tokens(self) -> float:
        """Prompt tokens of an average request."""
        return float(self.facts["prompt_tokens"]) / max(1, int(self.facts["requests"]))

    def as_json(self) -> dict[str, Any]:
        """Return the advice with all its curves, in the names of advice.json."""

        def list_points(points: Sequence[Point]) -> list[dict[str, float]]:
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

        return {
            "simulated": True,
            "trace": dict(self.facts) | {"format": self.trace.format, "skipped_lines": self.trace.skipped},
            "sampled": self.rate,
            "kv": {"model": self.model, "dtype": self.dtype, "bytes_per_token": self.token_bytes},
            "latency": self.latency.as_json(),
            "ceiling": list_points([self.ceiling])[0] if self.can_tell else None,
            "advice": None
            if not self.can_tell
            else {
                "policy": self.policy,
                "engine": self.engine or None,
                "command": self.command or None,
                "engines_that_have_it": list_engines_with(self.policy),
                "tokens": self.sizes[self.knee],
                "gib": round(self.to_gib(self.sizes[self.knee]), 4),
                "size_chosen_by": "price" if self.prices else "knee",
                "pays": self.pays,
                "gib_by_the_first_half": None if self.half is None else round(self.to_gib(self.half), 4),
                "stable": self.is_stable,
                "token_hit_rate": self.get_point_at_knee(self.policy).token_hit_rate,
                "prefill_hours_saved_a_day": self.saved_a_day,
                "avg_ttft_ms_without_a_cache": self.ttft_cold_ms,
                "avg_ttft_ms": self.ttft_ms,
            },
            "curves": {policy: list_points(points) for policy, points in self.curves.items()},
            "position_independent": list_points(self.anywhere) or None,
        }


def advise(
    trace: Trace,
    *,
    policies: Sequence[str] | None = None,
    latency: LatencyModel | None = None,
    model: str = "qwen2.5-7b",
    dtype: str = "bf16",
    sizes: Sequence[int] | None = None,
    hour_cost: float | None = None,
    gib_hour_cost: float | None = None,
    engine: str = "",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Simulate every policy at every size and choose one of each. ``sizes`` are tokens of KV (default: ten sizes).

    With an ``engine`` only its policies are advised; the others are simulated and drawn. With both prices
    (``hour_cost`` of prefill, ``gib_hour_cost`` of memory) the size is the one that earns most, else the knee.
    """
    if engine and engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}", hint="one of " + ", ".join(ENGINES))
    chosen = tuple(dict.fromkeys(["lru", *(policies or POLICIES)]))
    count_kv_bytes_per_token(model, dtype)  # reports an unknown model before the long work
    forest = build_forest(trace, "prefix")
    steps = tuple(sorted(set(sizes))) if sizes else choose_sizes(trace, forest)
    if not steps or steps[0] < 1:
        raise InputError("a size of the cache must be at least one token")
    rate = min(1.0, MOST_ACCESSES / max(1, trace.block_accesses * (len(chosen) + 1) * len(steps)))
    say = progress or _ignore
    curves = {}
    for policy in chosen:
        say(f"{policy}: {len(steps)} sizes" + (f", {rate:.1%} of the blocks" if rate < 1 else ""))
        curves[policy] = _simulate_sizes(forest, policy, steps, rate, seed)
    among = ENGINES[engine].policies if engine else None
    line = latency or LatencyModel()
    prices = Prices(hour_cost, gib_hour_cost) if hour_cost is not None and gib_hour_cost is not None else None
    rule = SizeRule(line, count_kv_bytes_per_token(model, dtype), prices)
    best, found = choose_policy(curves, among, partial(rule.choose, hours=_count_hours(trace)))
    knee = 0 if found is None else found
    anywhere: tuple[Point, ...] = ()
    if not trace.chained:
        say(f"{best}, blocks at any position")
        anywhere = _simulate_sizes(build_forest(trace, "block"), best, steps, rate, seed)
    return Advice(
        trace=trace,
        facts=describe_trace(trace),
        latency=line,
        model=model,
        dtype=dtype,
        curves=curves,
        anywhere=anywhere,
        policy=best,
        knee=knee,
        hours=_count_hours(trace),
        at_knee=simulate(forest, best, Capacity.tokens(steps[knee]), seed=seed),
        ceiling=_simulate_sizes(forest, "lru", [count_all_tokens(forest)], 1.0, seed)[0],
        rate=rate,
        hour_cost=hour_cost,
        prices=prices,
        pays=found is not None,
        half=_choose_by_half(trace, best, sizes, rule, seed),
        engine=engine,
    )


@dataclass(frozen=True, slots=True)
class SizeRule:
    """Chooses a size from a policy's points: by prices where there are both, else the knee."""

    latency: LatencyModel
    token_bytes: int
    prices: Prices | None

    def choose(self, points: Sequence[Point], hours: float) -> int | None:
        """Return the index of the size; None where no size pays."""
        if self.prices is None or not hours:
            return choose_knee(points)
        each = self.latency.token_latency_ms / 3.6e6 * self.prices.prefill_hour / hours
        gib = [point.tokens * self.token_bytes / GIB for point in points]
        return find_paying_size(gib, [point.tokens_saved * each for point in points], self.prices.gib_hour)


def choose_knee(points: Sequence[Point]) -> int:
    """Return the index of the size from which more memory brings little."""
    return find_knee([point.tokens for point in points], [point.token_hit_rate for point in points])


def _count_hours(trace: Trace) -> float:
    return float(trace.arrival_s[-1] - trace.arrival_s[0]) / 3600 if len(trace) else 0.0


def _choose_by_half(trace: Trace, policy: str, sizes: Sequence[int] | None, rule: SizeRule, seed: int) -> int | None:
    """Return the tokens that the first half of the trace asks for on its own; None where that is nothing."""
    half = trace.take_first(len(trace) // 2)
    if not len(half):
        return None
    forest = build_forest(half, "prefix")
    steps = tuple(sorted(set(sizes))) if sizes else choose_sizes(half, forest)
    rate = min(1.0, MOST_ACCESSES / max(1, half.block_accesses * len(steps)))
    found = rule.choose(_simulate_sizes(forest, policy, steps, rate, seed), _count_hours(half))
    return None if found is None else steps[found]


def choose_sizes(trace: Trace, forest: Forest) -> tuple[int, ...]:
    """Choose ten cache sizes in tokens: from about the longest prompt to room for everything, in equal ratios."""
    everything = count_all_tokens(forest)
    least = max(1, min(int(trace.request_tokens.max(initial=1)), everything // 2), everything // 512)
    return tuple(int(size) for size in np.unique(np.geomspace(least, everything, SIZES).astype(np.int64)))


def count_all_tokens(forest: Forest) -> int:
    """Count the tokens of a cache that holds all of the trace."""
    return max(2, int(forest.tokens.sum(dtype=np.int64)))


def choose_policy(
    curves: Mapping[str, Sequence[Point]],
    among: Collection[str] | None = None,
    choose_size: Callable[[Sequence[Point]], int | None] | None = None,
) -> tuple[str, int | None]:
    """Choose the policy to advise (``among`` these, None: all) and the index of the size (None: none pays).

    The size is found on the best points of the policies that can be chosen and do not know the future; without a rule
    it is the knee. LRU is advised unless another policy is better there by more than `NOISE`.
    """
    online = {
        policy: points for policy, points in curves.items()
        if policy not in BOUNDS and (among is None or policy in among or policy == "lru")
    }  # fmt: skip
    best_points = [
        max((points[at] for points in online.values()), key=lambda point: point.token_hit_rate)
        for at in range(len(curves["lru"]))
    ]
    found = choose_size(best_points) if choose_size else choose_knee(best_points)
    knee = 0 if found is None else found
    best = max(online, key=lambda policy: (online[policy][knee].token_hit_rate, policy == "lru"))
    gain = online[best][knee].token_hit_rate - online["lru"][knee].token_hit_rate
    return (best if gain > NOISE else "lru"), found


def _ignore(_: str) -> None:
    """Drop a progress message."""


def _simulate_sizes(forest: Forest, policy: str, sizes: Sequence[int], rate: float, seed: int) -> tuple[Point, ...]:
    """Simulate one policy at every size; ``rate`` below 1 samples the blocks of a long trace.

    A sampled curve has block hit rates only; they stand for the token hit rates as well.
    """
    if rate < 1:
        sampled = simulate_curve(forest, policy, sizes, unit="tokens", rate=rate, seed=seed)
        total = int(forest.trace.request_tokens.sum())
        return tuple(
            Point(size, float(hit), float(hit), int(hit * total), 0.0 if np.isnan(error) else float(error))
            for size, hit, error in zip(sizes, sampled.hit_rates, sampled.errors, strict=True)
        )
    runs = [simulate(forest, policy, Capacity.tokens(size), seed=seed) for size in sizes]
    return tuple(
        Point(run.capacity.size, run.token_hit_rate, run.block_hit_rate, int(run.tokens_saved)) for run in runs
    )


def count_hits_by_type(advice: Advice) -> dict[str, tuple[int, int]]:
    """Count the prompt tokens of each block type, and those that hit at the knee."""
    trace = advice.trace
    left = np.asarray(advice.at_knee.hit_tokens_by_request, dtype=np.int64)
    ends = np.cumsum(trace.tokens, dtype=np.int64)
    before = ends - trace.tokens
    offset = before - np.repeat(before[trace.starts[:-1]] if len(trace) else before, np.diff(trace.starts))
    hit = np.where(offset + trace.tokens <= left[trace.request], trace.tokens, 0)
    return {
        name: (int(trace.tokens[trace.types == n].sum(dtype=np.int64)), int(hit[trace.types == n].sum()))
        for n, name in enumerate(trace.type_names)
        if (trace.types == n).any()
    }
