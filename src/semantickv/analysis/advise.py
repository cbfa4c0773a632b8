"""Advice for one trace: which policy to use and how much memory it needs. Simulated.

Every policy is simulated at several cache sizes. The engine keeps the memory that it takes by itself: the GPU is paid
for. Host memory beside it is advised where the hits that it adds are worth more than it costs. Another policy than LRU
is advised only where it beats LRU by more than `NOISE`. Bounds that know the future are drawn, never advised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from semantickv.analysis.advice import (
    DEFAULT_GPU,
    ENGINES,
    GIB,
    MIN_HOURS,
    NOISE,
    Advice,
    Costs,
    Point,
    Room,
    SizeRule,
    Sureness,
    TierChoice,
    find_interval,
    resample,
)
from semantickv.analysis.latency import BOUNDS, LatencyModel
from semantickv.analysis.mrc import simulate_curve
from semantickv.analysis.tiers import DECODE_MS, Speed, count_running_tokens
from semantickv.simulator.capacity import Capacity, count_kv_bytes_per_token
from semantickv.simulator.forest import Forest, build_forest
from semantickv.simulator.policies import POLICIES
from semantickv.simulator.simulate import simulate
from semantickv.traces.trace import Trace, describe_trace
from semblend.errors import InputError
from semblend.estimate.steps import ArrangePassages
from semblend.prices import TIERS, PriceBook, load_price_book
from semblend.prompt import Namespace
from semblend.text.parts import Part

PASSAGE = "retrieved_context"


def arrange_trace(trace: Trace, cache_tokens: int) -> Trace | None:
    """Return the trace with its passages arranged beside a cache of so many tokens; None where none can move.

    A trace whose ids stand for whole prefixes has no blocks that could be put elsewhere.
    """
    if trace.chained or not trace.holds_content or PASSAGE not in trace.type_names:
        return None
    is_passage = (trace.types == trace.type_names.index(PASSAGE)).tolist()
    step = ArrangePassages(cache_tokens)
    order, moved = np.arange(trace.block_accesses), False
    names, starts = trace.ids.tolist(), trace.starts.tolist()
    for r in range(len(trace)):
        places = range(starts[r], starts[r + 1])
        groups = [list(run) for found, run in groupby(places, key=is_passage.__getitem__) if found]
        group_of = {at: str(number) for number, run in enumerate(groups) if len(run) > 1 for at in run}
        if not group_of:
            continue
        parts = tuple(_build_part(names[at], int(trace.tokens[at]), group_of.get(at)) for at in places)
        sent = step.apply(parts, Namespace(tenant=trace.tenant_names[trace.tenant[r]]))
        # Equal passages of one prompt have one text: each takes the next place that had it.
        left: dict[str, list[int]] = {}
        for at, part in zip(places, parts, strict=True):
            left.setdefault(part.text, []).append(at)
        order[starts[r] : starts[r + 1]] = [left[part.text].pop(0) for part in sent]
        moved = True
    return trace.select(order, slice(None), trace.starts) if moved else None


def _build_part(name: int, tokens: int, group: str | None) -> Part:
    length = np.zeros(tokens, np.int32)  # only its length counts: the arranger weighs passages by it
    return Part(f"{name} ", "text" if group is None else "passage", group or "", token_ids=length)


SIZES = 10
MAX_ACCESSES = 60_000_000  # accesses times sizes times policies beyond which curves come from samples: about a minute
Say = Callable[[str], None]
ChooseSize = Callable[[Sequence[Point]], int | None]


@dataclass(frozen=True, slots=True)
class Question:
    """What the advice is for: whose KV, on which GPU, in which memory, at which prices.

    ``memory``: what may be added to the GPU's own: dram, ssd, or hbm for nothing; empty for host memory, or without an
    engine for what leaves most money. ``pool_tokens``: KV that the engine holds on the GPU now, by its start lines;
    None for what the weights leave. ``hour_cost`` and ``gib_hour_cost`` replace the book's prices, ``latency`` its
    prefill rate. With an ``engine`` only its policies are advised.
    """

    model: str = "qwen2.5-7b"
    dtype: str = "bf16"
    gpu: str = DEFAULT_GPU
    memory: str = ""
    engine: str = ""
    pool_tokens: int | None = None
    hour_cost: float | None = None
    gib_hour_cost: float | None = None
    latency: LatencyModel | None = None
    book: PriceBook | None = None

    def __post_init__(self) -> None:
        if self.engine and self.engine not in ENGINES:
            raise InputError(f"unknown engine {self.engine!r}", hint="one of " + ", ".join(ENGINES))
        if self.memory and self.memory not in TIERS:
            raise InputError(f"unknown memory {self.memory!r}", hint="one of " + ", ".join(TIERS))
        if self.engine and self.memory and self.memory not in ENGINES[self.engine].memories:
            known = ", ".join(ENGINES[self.engine].memories)
            raise InputError(
                f"{self.engine} keeps no cache in {self.memory} that its flags set", hint=f"--memory {known}"
            )
        if self.pool_tokens is not None and self.pool_tokens < 1:
            raise InputError(f"an engine with {self.pool_tokens} tokens of KV", hint="--pool-tokens 1 or more")
        if self.gib_hour_cost is not None and self.tier in ("", "hbm"):
            raise InputError(
                "a price of memory, but of which kind?", hint="--memory dram|ssd; what the GPU has costs nothing"
            )

    @property
    def tier(self) -> str:
        """The kind of memory that may be added; empty for whichever leaves most money."""
        return self.memory or (ENGINES[self.engine].memories[-1] if self.engine else "")

    def find_costs(self) -> dict[str, Costs]:
        """Look up what a hit saves and memory costs, for every kind of memory."""
        book = self.book or load_price_book()
        token_bytes = count_kv_bytes_per_token(self.model, self.dtype)
        return {
            tier: Costs.find(
                book, model=self.model, gpu=self.gpu, tier=tier, token_bytes=token_bytes, hour=self.hour_cost,
                gib_hour=self.gib_hour_cost if tier == self.tier else None, latency=self.latency,
            )
            for tier in TIERS
        }  # fmt: skip


def advise(
    trace: Trace,
    question: Question | None = None,
    *,
    policies: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    progress: Say | None = None,
) -> Advice:
    """Simulate every policy at every size and choose one of each. ``sizes`` are tokens of KV (default: ten sizes)."""
    asked, say = question or Question(), progress or _ignore
    costs = asked.find_costs()  # reports an unknown model or GPU before the long work
    # A trace of lengths alone has no hits to compare policies by.
    chosen = tuple(dict.fromkeys(["lru", *((policies or POLICIES) if trace.holds_content else ())]))
    forest = build_forest(trace, "prefix")
    room = find_room(forest, costs["hbm"], asked.pool_tokens)
    steps = choose_steps(forest, room, sizes)
    rate = min(1.0, MAX_ACCESSES / max(1, trace.block_accesses * (len(chosen) + 1) * len(steps)))
    curves = {}
    for policy in chosen:
        say(f"{policy}: {len(steps)} sizes" + (f", {rate:.1%} of the blocks" if rate < 1 else ""))
        curves[policy] = simulate_sizes(forest, policy, steps, rate, seed)
    among = ENGINES[asked.engine].policies if asked.engine else None
    hours = count_hours(trace)
    by_price = hours >= MIN_HOURS
    tokens = int(trace.request_tokens.sum())
    tiers = {tier: _choose(curves, among, SizeRule(one, room, hours, by_price), tokens) for tier, one in costs.items()}
    choice = tiers[asked.tier] if asked.tier else _find_best(tiers, by_price)
    spare = None
    if not choice.adds and asked.memory != "hbm":
        spare = _choose(curves, among, SizeRule(choice.costs, room, hours, by_price=False), tokens)
    anywhere: tuple[Point, ...] = ()
    if not trace.chained:
        say(f"{choice.policy}, blocks at any position")
        anywhere = simulate_sizes(build_forest(trace, "block"), choice.policy, steps, rate, seed)
    moved = arrange_trace(trace, choice.point.tokens) if rate == 1 else None  # prompt by prompt: slow on a long trace
    return Advice(
        trace=trace,
        facts=describe_trace(trace),
        model=asked.model,
        dtype=asked.dtype,
        curves=curves,
        anywhere=anywhere,
        arranged=None
        if moved is None
        else simulate_sizes(build_forest(moved, "prefix"), choice.policy, [choice.point.tokens], 1.0, seed)[0],
        choice=choice,
        tiers=tiers,
        spare=spare if spare is not None and spare.adds else None,
        hours=hours,
        by_price=by_price,
        at_chosen=simulate(forest, choice.policy, Capacity.tokens(choice.point.tokens), seed=seed),
        ceiling=simulate_sizes(forest, "lru", [count_all_tokens(forest)], 1.0, seed)[0],
        rate=rate,
        half=_choose_by_half(trace, choice, by_price, sizes, seed),
        sureness=_find_sureness(forest, choice, by_price, steps, rate, seed),
        engine=asked.engine,
    )


def find_room(forest: Forest, costs: Costs, pool_tokens: int | None = None) -> Room:
    """Find the KV memory that the engine takes by default, and what this traffic's running requests need of it.

    Requests that all arrive at one moment do not say how many run at a time: they are taken to run one by one.
    """
    trace, line = forest.trace, costs.latency
    pool = pool_tokens or max(1, int(costs.free_gib * GIB) // costs.token_bytes)
    longest = int((trace.request_tokens + trace.output_tokens).max(initial=1))
    running = longest
    if trace.holds_content and count_hours(trace):
        running = count_running_tokens(forest, Speed(line.base_ttft_ms, line.token_latency_ms, DECODE_MS))
    return Room(pool, running, longest)


def _choose(
    curves: Mapping[str, Sequence[Point]], among: Collection[str] | None, rule: SizeRule, asked_tokens: int
) -> TierChoice:
    """Choose policy and size for one kind of memory. What the GPU has is all of it: nothing is added to that."""
    own = [point.tokens for point in curves["lru"]].index(rule.room.cache)

    def choose_size(points: Sequence[Point]) -> int | None:
        return None if rule.costs.tier.name == "hbm" else _choose_point(rule, points, asked_tokens)

    policy, at = choose_policy(curves, among, choose_size, own)
    point = curves[policy][own if at is None else at]
    return TierChoice(rule.costs, policy, at, point, curves["lru"][own], rule.room, rule.hours)


def _find_best(tiers: Mapping[str, TierChoice], by_price: bool) -> TierChoice:
    """Find the kind of memory whose addition leaves most money; without prices host memory."""
    adding = [one for one in tiers.values() if one.adds]
    if by_price and adding:
        return max(adding, key=lambda one: one.net_a_day)
    return tiers["dram"]


def _choose_point(rule: SizeRule, points: Sequence[Point], asked_tokens: float) -> int | None:
    return rule.choose([point.tokens for point in points], [point.tokens_saved for point in points], asked_tokens)


def count_hours(trace: Trace) -> float:
    """Count the hours from the first arrival to the last."""
    return float(trace.arrival_s[-1] - trace.arrival_s[0]) / 3600 if len(trace) else 0.0


def _choose_by_half(
    trace: Trace, choice: TierChoice, by_price: bool, sizes: Sequence[int] | None, seed: int
) -> int | None:
    """Return the size that the first half of the trace asks for on its own; None where it asks for no more memory."""
    half = trace.take_first(len(trace) // 2)
    if not len(half):
        return None
    forest = build_forest(half, "prefix")
    steps = choose_steps(forest, choice.room, sizes)
    rate = min(1.0, MAX_ACCESSES / max(1, half.block_accesses * len(steps)))
    points = simulate_sizes(forest, choice.policy, steps, rate, seed)
    rule = SizeRule(choice.costs, choice.room, count_hours(half), by_price)
    found = None if choice.costs.tier.name == "hbm" else _choose_point(rule, points, float(half.request_tokens.sum()))
    return None if found is None else steps[found]


def _find_sureness(
    forest: Forest, choice: TierChoice, by_price: bool, sizes: Sequence[int], rate: float, seed: int
) -> Sureness | None:
    """Draw the sessions again and choose the size anew in every draw, for the advised policy."""
    drawn = resample(forest.trace, seed)
    if drawn is None:
        return None
    here, own = choice.point.tokens, choice.room.cache
    tried = list(sizes) if rate == 1 else sorted({here, own})  # a long trace: these alone, with all of their blocks
    runs = [simulate(forest, choice.policy, Capacity.tokens(size), seed=seed) for size in tried]
    hits = np.stack([drawn.sum_units(run.hit_tokens_by_request) for run in runs], axis=1)
    asked = drawn.sum_units(forest.trace.request_tokens)
    rule = SizeRule(choice.costs, choice.room, choice.hours, by_price)
    # A draw has more or fewer requests than the trace; the money is that of as many tokens as the trace has.
    total = float(forest.trace.request_tokens.sum())
    scaled = hits * (total / np.maximum(asked, 1))[:, None]
    is_hbm = choice.costs.tier.name == "hbm"
    picked = [None if is_hbm else rule.choose(tried, list(row), total) for row in scaled]
    adding = np.array([tried[at] for at in picked if at is not None], np.float64)
    gained = scaled[:, tried.index(here)] - (scaled[:, tried.index(own)] if choice.adds else 0.0)
    earned = gained * choice.saved_gpu_ms_per_token / 3.6e6 * choice.costs.gpu.hour
    return Sureness(
        unit=drawn.unit,
        units=drawn.units,
        hit_rate=find_interval(hits[:, tried.index(here)] / np.maximum(asked, 1)),
        net_a_day=find_interval(earned * 24 / choice.hours - choice.memory_a_day) if by_price else None,
        sizes=find_interval(adding) if rate == 1 and len(adding) else None,
        share_without=1 - len(adding) / len(picked),
    )


def choose_steps(forest: Forest, room: Room, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Choose the cache sizes to try, in tokens: those that were asked for, else ten, and what the engine has."""
    found = sizes or choose_sizes(forest.trace, forest)
    if min(found) < 1:
        raise InputError("a size of the cache must be at least one token")
    return tuple(sorted({*found, room.cache}))


def choose_sizes(trace: Trace, forest: Forest) -> tuple[int, ...]:
    """Choose ten cache sizes in tokens: from about the longest prompt to room for everything, in equal ratios."""
    everything = count_all_tokens(forest)
    least = max(1, min(int(trace.request_tokens.max(initial=1)), everything // 2), everything // 512)
    return tuple(int(size) for size in np.unique(np.geomspace(least, everything, SIZES).astype(np.int64)))


def count_all_tokens(forest: Forest) -> int:
    """Count the tokens of a cache that holds all of the trace."""
    return max(2, int(forest.tokens.sum(dtype=np.int64)))


def choose_policy(
    curves: Mapping[str, Sequence[Point]], among: Collection[str] | None, choose_size: ChooseSize, own: int = 0
) -> tuple[str, int | None]:
    """Choose the policy to advise (``among`` these, None: all) and the index of the size (None: the engine's ``own``).

    The size is found on the best points of the policies that can be chosen and do not know the future. LRU is advised
    unless another policy is better there by more than `NOISE`.
    """
    online = {
        policy: points for policy, points in curves.items()
        if policy not in BOUNDS and (among is None or policy in among or policy == "lru")
    }  # fmt: skip
    best_points = [
        max((points[at] for points in online.values()), key=lambda point: point.token_hit_rate)
        for at in range(len(curves["lru"]))
    ]
    found = choose_size(best_points)
    at = own if found is None else found
    best = max(online, key=lambda policy: (online[policy][at].token_hit_rate, policy == "lru"))
    gain = online[best][at].token_hit_rate - online["lru"][at].token_hit_rate
    return (best if gain > NOISE else "lru"), found


def _ignore(_: str) -> None:
    """Drop a progress message."""


def simulate_sizes(forest: Forest, policy: str, sizes: Sequence[int], rate: float, seed: int) -> tuple[Point, ...]:
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
