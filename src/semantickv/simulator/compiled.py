"""Runs the compiled policies: builds their arrays, calls them, returns counts. Imports numba when called."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Counts
from semantickv.simulator.policies.adaptive import build_plan, number_sessions
from semantickv.simulator.policies.aged import LHD_CLASSES, TURNS, build_edges
from semantickv.simulator.policies.registry import Policy
from semantickv.simulator.policies.serving import count_tokens_to_end


def run_compiled(forest: Forest, policy: Policy, capacity: Capacity, warm_up: int, options: dict[str, Any]) -> Counts:
    """Run the compiled version of a policy over a forest and return its counts."""
    trace = forest.trace
    counts = Counts.create(len(trace), len(trace.type_names))
    tally = np.zeros((len(trace), 3), np.int32)
    fact = np.column_stack(
        (forest.parent, forest.get_sizes(capacity.unit), forest.tokens, forest.types.astype(np.int32))
    )
    meta = _build_meta(forest, capacity, warm_up, options)
    from semantickv.simulator import kernels

    tape = (trace.starts, forest.node, trace.tokens)
    family, _, kind = (policy.kernel or "").partition(":")
    if family == "priority":
        from semantickv.simulator import kernels_priority as priority

        few = forest.nodes if kind in ("TINY", "LFU_ALL", "LRU2", "TLRU") else 0
        weights = np.array([*(options["type_weights"].get(name, 1.0) for name in trace.type_names), 0.0])
        next_use = forest.next_use if policy.offline else np.zeros(0, np.int32)
        if kind == "TLRU":
            next_use, weights[-1] = count_tokens_to_end(forest), float(options["tail_tokens"])
        chosen = getattr(priority, kind), policy.bypass
        asked = np.zeros((few, 2), np.int64)
        priority.run_priority(
            *chosen, *tape, next_use, fact, meta, weights, asked, tally, counts.used_share, counts.evicted
        )
        if kind == "STATIC":
            counts.weights = dict(options["type_weights"])
    elif family == "queues":
        from semantickv.simulator import kernels_queues as queues

        queues.run_queues(getattr(queues, kind), *tape, fact, meta, tally, counts.used_share, counts.evicted)
    elif family == "aged":
        _run_aged(kind, forest, capacity, fact, meta, tally, counts)
    else:
        _run_adaptive(forest, capacity, fact, meta, tally, counts, options)
    counts.refused = int(meta[kernels.REFUSED])
    counts.hit_blocks, counts.hit_tokens, counts.regret = tally[:, 0], tally[:, 1], tally[:, 2]
    return counts


def _build_meta(forest: Forest, capacity: Capacity, warm_up: int, options: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Build the array of run-wide numbers that the kernels share."""
    from semantickv.simulator import kernels

    meta = np.zeros(16, np.int64)
    meta[kernels.CAPACITY], meta[kernels.WARM_UP] = capacity.size, warm_up
    meta[kernels.PREFIX] = forest.mode == "prefix"
    meta[kernels.HAND] = -1
    meta[kernels.WINDOW] = int(options["window"])
    return meta


def _run_aged(kind: str, forest: Forest, capacity: Capacity, fact: Any, meta: Any, tally: Any, counts: Counts) -> None:
    """Run the compiled `lhd` or `workload_aware` and fill ``counts`` and ``tally``."""
    from semantickv.simulator import kernels_aged as aged

    trace = forest.trace
    edges = np.array(build_edges(capacity.size))
    classes = len(trace.type_names) * (LHD_CLASSES if kind == "LHD" else TURNS)
    table = np.tile(1.0 / (1.0 + edges[:-1]), (classes, 1))
    evidence = np.zeros((*table.shape, 2))
    tape = trace.starts, forest.node, trace.tokens, fact, meta
    aged.run_aged(getattr(aged, kind), *tape, edges, table, evidence, tally, counts.used_share, counts.evicted)


def _run_adaptive(
    forest: Forest, capacity: Capacity, fact: Any, meta: Any, tally: Any, counts: Counts, options: dict[str, Any]
) -> None:
    """Run the compiled `adaptive_semantic` and fill ``counts`` and ``tally``."""
    from semantickv.simulator import kernels_adaptive as adaptive
    from semblend.eviction.adaptive import AdaptiveState

    trace = forest.trace
    plan = build_plan(capacity.size, forest, options)
    present = np.union1d(forest.types, [0]).astype(np.int64)  # types that never occur would cost time at each lesson
    types = np.searchsorted(present, forest.types)
    longest = int(np.diff(trace.starts).max(initial=1))
    state = AdaptiveState(plan, types=len(present), chained=forest.mode == "prefix", longest=longest)
    tape = trace.starts, forest.node, trace.tokens, types, number_sessions(forest)
    arrays = (
        *(state.rows, state.heads, state.ring, state.ledger, state.index, state.edges),
        *(state.behind, state.priors, state.groups, state.numbers, state.meta),
    )
    adaptive.run_adaptive(*tape, fact, meta, *arrays, tally, counts.used_share, counts.evicted)
    learned = plan.compute_returns(state.ledger, len(present))
    found = zip(present, learned, strict=True)
    counts.weights = {trace.type_names[kind]: value for kind, value in found if not np.isnan(value)}
