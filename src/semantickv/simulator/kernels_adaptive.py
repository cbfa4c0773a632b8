"""The compiled loop of `adaptive_semantic` over the kernels that engines use too; `policies.adaptive` is its twin.

Importing this module imports numba.
"""

from __future__ import annotations

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
    USED,
    drop_from_heap,
    look_up,
    push_to_heap,
    restore_heap_order,
)
from semantickv.simulator.kernels_priority import evict_smallest
from semblend.eviction.kernels import KEY, hear_use, learn_if_due, price_row
from semblend.fingerprint.kernels import njit


@njit(inline="always")
def _price(rows: Any, index: Any, edges: Any, meta: Any, row_of: Any, x: int) -> Any:
    """Compute the value of node ``x``; nothing if the policy has forgotten it."""
    if rows[row_of[x], KEY] != x:
        return 0.0
    return price_row(rows, index, edges, meta, row_of[x])


@njit(nogil=True)
def _take_in(starts: Any, node: Any, info: Any, fact: Any, key: Any, heap: Any, meta: Any, rows: Any, index: Any,
             edges: Any, learnt: Any, row_of: Any, path: Any, r: int) -> None:  # fmt: skip
    """Mark every block of the request as used and cached, and price it."""
    first, last = starts[r], starts[r + 1]
    for i in range(last - 1, first - 1, -1):
        x = node[i]
        row_of[x] = path[i - first]
        info[x, MARK] = r
        if info[x, AT] >= 0:
            drop_from_heap(heap, info, key, meta, x)
        info[x, STAMP] = first + last - i
        if not info[x, RESIDENT]:
            info[x, RESIDENT] = 1
            info[x, BORN] = info[x, STAMP]
            meta[USED] += fact[x, SIZE]
            if fact[x, PARENT] >= 0:
                info[fact[x, PARENT], KIDS] += 1
    for i in range(last - 1, first - 1, -1):
        x = node[i]
        if info[x, KIDS] == 0 and info[x, AT] < 0:
            key[x] = _price(rows, index, edges, learnt, row_of, x)
            push_to_heap(heap, info, key, meta, x)


@njit(nogil=True)
def run_adaptive(starts: Any, node: Any, tokens: Any, types: Any, sessions: Any, fact: Any, meta: Any, rows: Any,
                 heads: Any, ring: Any, ledger: Any, index: Any, edges: Any, behind: Any, priors: Any, groups: Any,
                 plan: Any, learnt: Any, tally: Any, used_share: Any, evicted: Any) -> None:  # fmt: skip
    """Run all requests of a trace. ``learnt`` is the policy's own ``meta``."""
    nodes = len(fact)
    info = np.zeros((nodes, 8), np.int32)
    info[:, MARK] = -1
    info[:, AT] = -1
    key, heap, row_of = np.zeros(nodes), np.empty(nodes + 1, np.int32), np.zeros(nodes, np.int64)
    longest = 1
    for r in range(len(starts) - 1):
        longest = max(longest, starts[r + 1] - starts[r])
    path, keys, kinds = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    scored, filled = 0, np.zeros(nodes, np.int32)
    for r in range(len(starts) - 1):
        first, n, size = starts[r], starts[r + 1] - starts[r], 0
        meta[FIRST] = first
        look_up(starts, node, tokens, info, filled, tally, r)
        for i in range(n):
            keys[i], kinds[i] = node[first + i], types[node[first + i]]
            size += fact[node[first + i], SIZE]
        hear_use(rows, heads, ring, ledger, edges, behind, learnt, keys[:n], kinds[:n], size, 0, sessions[r], path)
        lesson = learn_if_due(ledger, index, edges, priors, groups, plan, learnt)
        _take_in(starts, node, info, fact, key, heap, meta, rows, index, edges, learnt, row_of, path, r)
        if lesson or starts[r + 1] - scored >= meta[MEMBERS]:
            for place in range(meta[MEMBERS]):
                key[heap[place]] = _price(rows, index, edges, learnt, row_of, heap[place])
            restore_heap_order(heap, info, key, meta)
            scored = starts[r + 1]
        while meta[USED] > meta[CAPACITY]:
            above = fact[heap[0], PARENT]
            if above >= 0 and info[above, KIDS] == 1:  # it is about to stand in the heap
                key[above] = _price(rows, index, edges, learnt, row_of, above)
            evict_smallest(info, fact, key, heap, meta, evicted, r, False)
        if meta[CAPACITY] > 0:
            used_share[r] = meta[USED] / meta[CAPACITY]
