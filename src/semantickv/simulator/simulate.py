"""Replay a trace against a cache of a given size: `simulate`. Nothing here is measured on an engine.

`semantickv.simulator.plain` explains the steps of one request; `semantickv.simulator.kernels` does the same, compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest, Mode, build_forest
from semantickv.simulator.plain import Counts, PlainRun
from semantickv.simulator.policies import (
    TAIL_TOKENS,
    TYPE_WEIGHTS,
    Policy,
    build_edges,
    build_plan,
    count_tokens_to_end,
    find_policy,
    number_sessions,
)
from semantickv.traces.trace import Trace
from semblend.eviction.plan import AdaptivePlan


@dataclass(frozen=True)
class SimulationResult:
    """The result of one simulated run. Rates are shares between 0 and 1."""

    policy: str
    mode: Mode
    capacity: Capacity
    requests: int
    block_accesses: int
    block_hits: int
    token_accesses: int
    token_hits: int
    requests_with_a_hit: int
    evictions: int
    refusals: int  # blocks that the policy did not keep to the end of the request that brought them
    evictions_by_type: Mapping[str, int]
    utilization: float
    regret: int  # accesses that missed a block which had been cached and evicted
    weights: Mapping[str, float] = field(default_factory=dict)
    hit_tokens_by_request: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)
    hit_blocks_by_request: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)
    cached_nodes: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_), repr=False)  # at the end
    simulated: Literal[True] = True

    @property
    def block_hit_rate(self) -> float:
        return self.block_hits / self.block_accesses if self.block_accesses else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.token_hits / self.token_accesses if self.token_accesses else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the requests that found at least one block."""
        return self.requests_with_a_hit / self.requests if self.requests else 0.0

    @property
    def tokens_saved(self) -> int:
        return self.token_hits


def simulate(
    trace: Trace | Forest,
    policy: str | Policy,
    capacity: Capacity,
    *,
    mode: Mode = "prefix",
    seed: int = 0,
    share_tenants: bool = False,
    **policy_options: Any,
) -> SimulationResult:
    """Simulate one policy over a trace. Pass a `Forest` (see `build_forest`) to prepare a trace once for many runs.

    >>> from semantickv.traces.trace import Trace, TraceRequest
    >>> asks = [TraceRequest(str(i), i, (1, 2), (16, 16), ("system", "user")) for i in range(4)]
    >>> simulate(Trace.from_requests(asks), "lru", Capacity.blocks(2)).block_hits
    6
    """
    forest = trace if isinstance(trace, Forest) else build_forest(trace, mode, share_tenants=share_tenants)
    chosen = find_policy(policy)
    options = {**build_default_options(capacity), **policy_options, "seed": seed}
    counts = (
        run_compiled(forest, chosen, capacity, options)
        if chosen.plain is None
        else PlainRun(forest, chosen.plain(), capacity, options).run()
    )
    return _build_result(forest, chosen, capacity, counts)


def build_default_options(capacity: Capacity) -> dict[str, Any]:
    """Build the options that depend on the capacity: TinyLFU forgets after ten times the capacity."""
    return {
        "window": max(10, 10 * capacity.size),
        "type_weights": TYPE_WEIGHTS,
        "unit": capacity.unit,
        "tail_tokens": TAIL_TOKENS,
    }


def _build_result(forest: Forest, chosen: Policy, capacity: Capacity, counts: Counts) -> SimulationResult:
    """Sum the counts into a result."""
    trace = forest.trace
    by_type = counts.evicted
    return SimulationResult(
        policy=chosen.name,
        mode=forest.mode,
        capacity=capacity,
        requests=len(trace),
        block_accesses=trace.block_accesses,
        block_hits=int(counts.hit_blocks.sum(dtype=np.int64)),
        token_accesses=int(trace.request_tokens.sum()),
        token_hits=int(counts.hit_tokens.sum(dtype=np.int64)),
        requests_with_a_hit=int(np.count_nonzero(counts.hit_blocks)),
        evictions=int(by_type.sum()),
        refusals=int(counts.refused),
        evictions_by_type={name: int(n) for name, n in zip(trace.type_names, by_type, strict=True) if n},
        utilization=float(counts.used_share.mean()) if len(trace) else 0.0,
        regret=int(counts.regret.sum(dtype=np.int64)),
        weights=counts.weights,
        hit_tokens_by_request=counts.hit_tokens,
        hit_blocks_by_request=counts.hit_blocks,
        cached_nodes=counts.cached,
    )


def run_compiled(forest: Forest, policy: Policy, capacity: Capacity, options: dict[str, Any]) -> Counts:
    """Run the compiled version of a policy over a forest and return its counts."""
    from semantickv.simulator import kernels

    trace = forest.trace
    counts = Counts.create(len(trace), len(trace.type_names))
    tally = np.zeros((len(trace), 3), np.int32)
    fact = np.column_stack(
        (forest.parent, forest.get_sizes(capacity.unit), forest.tokens, forest.types.astype(np.int32))
    )
    meta = np.zeros(16, np.int64)
    meta[kernels.CAPACITY] = capacity.size
    meta[kernels.PREFIX], meta[kernels.HAND] = forest.mode == "prefix", -1
    meta[kernels.WINDOW] = int(options["window"])
    meta[kernels.LONGEST] = int(np.diff(trace.starts).max(initial=1))
    info = np.zeros((forest.nodes, 8), np.int32)
    info[:, [kernels.MARK, kernels.AT]] = -1
    run = trace.starts, forest.node, trace.tokens, info, fact, meta, tally, counts.used_share, counts.evicted
    family, _, kind = policy.kernel.partition(":")
    if family == "priority":
        few = forest.nodes if kind in ("TINY", "LFU_ALL", "LRU2", "TLRU") else 0
        weights = np.array([*(options["type_weights"].get(name, 1.0) for name in trace.type_names), 0.0])
        next_use = forest.next_use if policy.offline else np.zeros(0, np.int32)
        if kind == "TLRU":
            next_use, weights[-1] = count_tokens_to_end(forest), float(options["tail_tokens"])
        asked = np.zeros((few, 2), np.int64)
        kernels.run_priority(getattr(kernels, kind), policy.bypass, *run, next_use, weights, asked)
        if kind == "STATIC":
            counts.weights = dict(options["type_weights"])
    elif family == "queues":
        kernels.run_queues(getattr(kernels, kind), *run)
    elif family == "aged":
        edges = np.array(build_edges(capacity.size))
        classes = len(trace.type_names) * (kernels.LHD_CLASSES if kind == "LHD" else kernels.TURNS)
        table = np.tile(1.0 / (1.0 + edges[:-1]), (classes, 1))
        kernels.run_aged(getattr(kernels, kind), *run, edges, table, np.zeros((*table.shape, 2)))
    else:
        counts.weights = _run_adaptive(forest, build_plan(capacity.size, forest, options), run)
    counts.refused = int(meta[kernels.REFUSED])
    counts.hit_blocks, counts.hit_tokens, counts.regret = tally[:, 0], tally[:, 1], tally[:, 2]
    counts.cached = info[:, kernels.RESIDENT] > 0
    return counts


def _run_adaptive(forest: Forest, plan: AdaptivePlan, run: tuple[Any, ...]) -> dict[str, float]:
    """Run the compiled `adaptive_semantic` and return what it has learned of each type."""
    from semantickv.simulator import kernels
    from semblend.eviction.adaptive import AdaptiveState

    trace = forest.trace
    present = np.union1d(forest.types, [0]).astype(np.int64)  # types that never occur would cost time at each lesson
    types = np.searchsorted(present, forest.types)
    longest = int(np.diff(trace.starts).max(initial=1))
    state = AdaptiveState(plan, types=len(present), chained=forest.mode == "prefix", longest=longest)
    arrays = (
        *(state.rows, state.heads, state.ring, state.ledger, state.index, state.edges),
        *(state.behind, state.priors, state.groups, state.numbers, state.meta),
    )
    kernels.run_adaptive(*run, types, number_sessions(forest), *arrays)
    found = zip(present, plan.compute_returns(state.ledger, len(present)), strict=True)
    return {trace.type_names[kind]: value for kind, value in found if not np.isnan(value)}
