"""The compiled loop of `lhd` and `workload_aware`; `policies.aged` explains them and is its twin.

Importing this module imports numba.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from semantickv.simulator.kernels import (
    AT,
    BORN,
    CAPACITY,
    FIRST,
    KIDS,
    MARK,
    MEMBERS,
    PARENT,
    RESIDENT,
    SIZE,
    STAMP,
    TYPE,
    USED,
    drop_from_heap,
    look_up,
    push_to_heap,
    restore_heap_order,
)
from semantickv.simulator.kernels_priority import evict_smallest
from semantickv.simulator.policies.aged import EXPLORED_PART, EXPLORER_EVERY, FADE, LHD_CLASSES, TURNS
from semblend.fingerprint.kernels import njit

LHD, WORKLOAD_AWARE = range(2)
# Columns of ``seen`` (int64), by node: class (-1 if never used), clock of the last use, turn, whether it explores.
KIND, LAST, TURN, EXPLORES = range(4)


@njit(inline="always")
def _find_age(seen: Any, edges: Any, now: int, x: int) -> Any:
    waited, age, ages = now - seen[x, LAST], 0, len(edges) - 1
    while age < ages - 1 and waited >= edges[age + 1]:
        age += 1
    return age


@njit(inline="always")
def _price(seen: Any, edges: Any, table: Any, fact: Any, now: int, x: int) -> Any:
    age = _find_age(seen, edges, now, x)
    more = 1.0 if seen[x, EXPLORES] and age < len(edges) - 2 else 0.0
    return table[seen[x, KIND], age] / fact[x, SIZE] + more


@njit(inline="always")
def _end_exploring(seen: Any, fact: Any, budget: Any, x: int) -> None:
    if seen[x, EXPLORES]:
        seen[x, EXPLORES] = 0
        budget[0] += fact[x, SIZE]


@njit(nogil=True)
def _file_lhd(starts: Any, node: Any, info: Any, fact: Any, seen: Any, evidence: Any, edges: Any, budget: Any,
              now: int, r: int) -> None:  # fmt: skip
    """Count the hits of cached blocks by class and age, and give every block its new class."""
    for i in range(starts[r + 1] - 1, starts[r] - 1, -1):
        x, kind = node[i], 0
        if info[x, RESIDENT]:
            age = _find_age(seen, edges, now, x)
            evidence[seen[x, KIND], age, 0] += 1.0
            kind = 1 + age // 2
        _end_exploring(seen, fact, budget, x)
        if kind == 0 and x % EXPLORER_EVERY == 0 and budget[0] >= fact[x, SIZE]:
            seen[x, EXPLORES] = 1
            budget[0] -= fact[x, SIZE]
        seen[x, KIND], seen[x, LAST] = fact[x, TYPE] * LHD_CLASSES + kind, now


@njit(nogil=True)
def _file_by_workload(starts: Any, node: Any, fact: Any, seen: Any, evidence: Any, now: int, r: int) -> None:
    """Count returns and gaps by category, and give every block its new category."""
    turn = np.int64(1)
    for i in range(starts[r], starts[r + 1]):
        if seen[node[i], TURN] == 0:
            break
        turn = seen[node[i], TURN] + 1
    for i in range(starts[r + 1] - 1, starts[r] - 1, -1):
        x = node[i]
        if seen[x, KIND] >= 0:
            evidence[seen[x, KIND], 0, 0] += 1.0
            evidence[seen[x, KIND], 0, 1] += float(now - seen[x, LAST])
        if seen[x, TURN] == 0:
            seen[x, TURN] = turn
        seen[x, KIND] = fact[x, TYPE] * TURNS + min(turn, TURNS) - 1
        evidence[seen[x, KIND], 1, 0] += 1.0
        seen[x, LAST] = now


@njit(nogil=True)
def _learn_lhd(evidence: Any, edges: Any, table: Any) -> None:
    """Compute the hit density of every class and age."""
    for kind in range(len(evidence)):
        hits, events, lifetime = 0.0, 0.0, 0.0
        for age in range(len(edges) - 2, -1, -1):
            hits += evidence[kind, age, 0]
            events += evidence[kind, age, 0] + evidence[kind, age, 1]
            lifetime += events * (edges[age + 1] - edges[age])
            if lifetime > 0.0:
                table[kind, age] = hits / lifetime


@njit(nogil=True)
def _learn_by_workload(evidence: Any, edges: Any, table: Any, soon: float) -> None:
    """Compute the chance of a reuse soon of every category and age."""
    for kind in range(len(evidence)):
        returns, gaps, uses = evidence[kind, 0, 0], evidence[kind, 0, 1], evidence[kind, 1, 0]
        if uses <= 0.0:
            continue
        mean = max(1.0, gaps / returns) if returns > 0.0 else 1.0
        for age in range(len(edges) - 1):
            begin = edges[age]
            table[kind, age] = min(1.0, returns / uses) * (math.exp(-begin / mean) - math.exp(-(begin + soon) / mean))


@njit(nogil=True)
def _take_in(starts: Any, node: Any, info: Any, fact: Any, key: Any, heap: Any, meta: Any, seen: Any, edges: Any,
             table: Any, now: int, r: int) -> None:  # fmt: skip
    """Mark every block of the request as used and cached, and price it."""
    first, last = starts[r], starts[r + 1]
    for i in range(last - 1, first - 1, -1):
        x = node[i]
        info[x, MARK] = r
        if info[x, AT] >= 0:
            drop_from_heap(heap, info, key, meta, x)
        info[x, STAMP] = first + last - i
        key[x] = _price(seen, edges, table, fact, now, x)
        if not info[x, RESIDENT]:
            info[x, RESIDENT] = 1
            info[x, BORN] = info[x, STAMP]
            meta[USED] += fact[x, SIZE]
            if fact[x, PARENT] >= 0:
                info[fact[x, PARENT], KIDS] += 1
    for i in range(last - 1, first - 1, -1):
        x = node[i]
        if info[x, KIDS] == 0 and info[x, AT] < 0:
            push_to_heap(heap, info, key, meta, x)


@njit(nogil=True)
def run_aged(policy: int, starts: Any, node: Any, tokens: Any, fact: Any, meta: Any, edges: Any, table: Any,
             evidence: Any, tally: Any, used_share: Any, evicted: Any) -> None:  # fmt: skip
    """Run all requests of a trace with one of the two policies."""
    nodes = len(fact)
    info = np.zeros((nodes, 8), np.int32)
    info[:, MARK] = -1
    info[:, AT] = -1
    key, heap, filled = np.zeros(nodes), np.empty(nodes + 1, np.int32), np.zeros(nodes, np.int32)
    seen = np.zeros((nodes, 4), np.int64)
    seen[:, KIND] = -1
    clock, taught, scored = np.int64(0), np.int64(0), 0
    budget = np.full(1, max(1, meta[CAPACITY] // EXPLORED_PART), np.int64)
    for r in range(len(starts) - 1):
        meta[FIRST], now = starts[r], clock
        look_up(starts, node, tokens, info, filled, tally, r)
        if policy == LHD:
            _file_lhd(starts, node, info, fact, seen, evidence, edges, budget, now, r)
        else:
            _file_by_workload(starts, node, fact, seen, evidence, now, r)
        for i in range(starts[r], starts[r + 1]):
            clock += fact[node[i], SIZE]
        lesson = clock - taught >= max(1, meta[CAPACITY])
        if lesson:
            if policy == LHD:
                _learn_lhd(evidence, edges, table)
            else:
                _learn_by_workload(evidence, edges, table, float(max(1, meta[CAPACITY])))
            evidence *= FADE
            taught = clock
        _take_in(starts, node, info, fact, key, heap, meta, seen, edges, table, now, r)
        if lesson or starts[r + 1] - scored >= meta[MEMBERS]:
            for place in range(meta[MEMBERS]):
                key[heap[place]] = _price(seen, edges, table, fact, now, heap[place])
            restore_heap_order(heap, info, key, meta)
            scored = starts[r + 1]
        while meta[USED] > meta[CAPACITY]:
            x = heap[0]
            if policy == LHD:
                evidence[seen[x, KIND], _find_age(seen, edges, now, x), 1] += 1.0
                _end_exploring(seen, fact, budget, x)
            above = fact[x, PARENT]
            if above >= 0 and info[above, KIDS] == 1:  # it is about to stand in the heap
                key[above] = _price(seen, edges, table, fact, now, above)
            evict_smallest(info, fact, key, heap, meta, evicted, r, False)
        if meta[CAPACITY] > 0:
            used_share[r] = meta[USED] / meta[CAPACITY]
