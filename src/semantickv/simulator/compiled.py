"""Runs the compiled policies: builds their arrays, calls them, returns counts. Imports numba when called."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Counts
from semantickv.simulator.policies.adaptive import KINDS, AdaptivePlan, find_level
from semantickv.simulator.policies.registry import Policy


def run_compiled(forest: Forest, policy: Policy, capacity: Capacity, warm_up: int, options: dict[str, Any]) -> Counts:
    """Run the compiled version of a policy over a forest and return its counts."""
    trace = forest.trace
    counts = Counts.create(len(trace), len(trace.type_names))
    tally = np.zeros((len(trace), 3), np.int32)
    fact = np.column_stack(
        (forest.parent, forest.get_sizes(capacity.unit), forest.tokens, forest.types.astype(np.int32))
    )
    meta = _build_meta(forest, capacity, warm_up, options)
    tape = (trace.starts, forest.node, trace.tokens)
    family, _, kind = (policy.kernel or "").partition(":")
    if family == "priority":
        from semantickv.simulator import kernels_priority as priority

        few = forest.nodes if kind == "TINY" else 0
        weights = np.array([options["type_weights"].get(name, 1.0) for name in trace.type_names])
        next_use = forest.next_use if policy.offline else np.zeros(0, np.int32)
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
    else:
        _run_adaptive(forest, capacity, fact, meta, tally, counts, options)
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


def _run_adaptive(
    forest: Forest, capacity: Capacity, fact: Any, meta: Any, tally: Any, counts: Counts, options: dict[str, Any]
) -> None:
    """Run the compiled `adaptive_semantic` and fill ``counts`` and ``tally``."""
    from semantickv.simulator import kernels
    from semantickv.simulator import kernels_adaptive as adaptive

    trace = forest.trace
    plan = AdaptivePlan.build(forest, capacity, options)
    present = np.union1d(forest.types, [0]).astype(
        np.int64
    )  # classes of types that never occur cost time at each lesson
    fact[:, kernels.TYPE] = np.searchsorted(present, forest.types)
    index = np.tile(plan.build_first_index()[[find_level(kind) for kind in range(KINDS)]], (len(present), 1))
    ledger, evicted = np.zeros((*index.shape, 4)), np.zeros(len(present), np.int64)
    numbers = (plan.every, plan.blocks, plan.memory, plan.memory_blocks, plan.trust, plan.hope, plan.doubt)
    tape = trace.starts, forest.node, trace.tokens, forest.tail, plan.clock
    learnt = ledger, index, plan.edges, plan.priors, np.array(numbers)
    adaptive.run_adaptive(*tape, fact, meta, *learnt, tally, counts.used_share, evicted)
    counts.evicted[present] = evicted
    counts.weights = plan.compute_weights(ledger, tuple(trace.type_names[kind] for kind in present))
