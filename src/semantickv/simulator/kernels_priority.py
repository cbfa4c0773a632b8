"""The compiled loop of policies that evict by a priority set at the last use: twins of `policies.classic` and others.

Importing this module imports numba. The heap holds only blocks that may be evicted: those without cached children that
are not part of the current request. In prefix mode that is one push for each request, not one for each block.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from semantickv.simulator.kernels import (
    ASKS,
    AT,
    BORN,
    CAPACITY,
    EPOCH,
    FIRST,
    KIDS,
    LEFT,
    MARK,
    MEMBERS,
    PARENT,
    PREFIX,
    REFUSED,
    RESIDENT,
    SIZE,
    STAMP,
    TOKENS,
    TYPE,
    USED,
    USES,
    WARM_UP,
    WINDOW,
    drop_from_heap,
    look_up,
    push_to_heap,
    replace_top_of_heap,
)
from semblend.fingerprint.kernels import njit

FIFO, LRU, LFU, SIZE_LRU, LFUDA, GDSF, STATIC, BELADY, TINY, LFU_ALL, LRU2, SLRU, TLRU = range(13)
SEGMENT = float(1 << 40)  # one segment's distance from the next, in accesses


@njit(inline="always")
def _compute_priority(kind: int, info: Any, fact: Any, next_use: Any, weights: Any, floor: Any, asked: Any, x: int,
                      i: int) -> Any:  # fmt: skip
    """Compute the priority of node ``x`` at access ``i``; the smallest is evicted first."""
    if kind == LFU_ALL:
        asked[x, 0] += 1
        return float(asked[x, 0])
    if kind == LRU2:
        asked[x, 0], asked[x, 1] = asked[x, 1], info[x, STAMP]
        return float(asked[x, 0])
    if kind == SLRU:
        return info[x, STAMP] + (SEGMENT if info[x, USES] > 1 else 0.0)
    if kind == TLRU:
        asked[x, 0] = max(asked[x, 0], next_use[i])
        return info[x, STAMP] - (SEGMENT if asked[x, 0] <= weights[-1] else 0.0)
    if kind in (LRU, TINY):
        return float(info[x, STAMP])
    if kind == FIFO:
        return float(info[x, BORN])
    if kind == LFU:
        return float(info[x, USES])
    if kind == SIZE_LRU:
        return info[x, STAMP] / fact[x, TOKENS]
    if kind == LFUDA:
        return floor[0] + info[x, USES]
    if kind == GDSF:
        return floor[0] + info[x, USES] / fact[x, SIZE]
    if kind == STATIC:
        tokens = fact[x, TOKENS]
        fame = max(1.0, math.log(1.0 + info[x, USES]))
        return weights[fact[x, TYPE]] * fame * max(1.0, tokens * 0.08) / math.sqrt(tokens)
    return -float(next_use[i])


@njit(inline="always")
def evict_smallest(info: Any, fact: Any, key: Any, heap: Any, meta: Any, evicted: Any, r: int, safe: bool) -> None:
    """Evict the top of the heap; its parent takes its place if this was the last cached child."""
    x = heap[0]
    info[x, RESIDENT] = 0
    info[x, LEFT] = 1
    meta[USED] -= fact[x, SIZE]
    if r >= meta[WARM_UP]:
        if info[x, BORN] > meta[FIRST]:  # it came with this request: refused, not evicted
            meta[REFUSED] += 1
        else:
            evicted[fact[x, TYPE]] += 1
    above = fact[x, PARENT]
    if above >= 0:
        info[above, KIDS] -= 1
        if info[above, KIDS] == 0 and info[above, RESIDENT] and not (safe and info[above, MARK] == r):
            replace_top_of_heap(heap, info, key, meta, above)
            return
    drop_from_heap(heap, info, key, meta, x)


@njit(nogil=True)
def _count_ask(asked: Any, fact: Any, meta: Any, x: int) -> None:
    """Count a request for node ``x``; the window is counted in sizes, and halving is delayed until a count is read."""
    asked[x, 0] = (asked[x, 0] >> min(31, meta[EPOCH] - asked[x, 1])) + 1
    asked[x, 1] = meta[EPOCH]
    meta[ASKS] += fact[x, SIZE]
    if meta[ASKS] >= meta[WINDOW]:
        meta[ASKS] = 0
        meta[EPOCH] += 1


@njit(inline="always")
def _read_asks(asked: Any, meta: Any, x: int) -> Any:
    """Return how often node ``x`` was asked for, with the halvings that are due."""
    return asked[x, 0] >> min(31, meta[EPOCH] - asked[x, 1])


@njit(nogil=True)
def _touch(kind: int, starts: Any, node: Any, next_use: Any, info: Any, fact: Any, key: Any, heap: Any, meta: Any,
           weights: Any, floor: Any, asked: Any, r: int) -> Any:  # fmt: skip
    """Mark the cached blocks of the request as used; return the space they take."""
    first, last = starts[r], starts[r + 1]
    safe = 0
    for i in range(last - 1, first - 1, -1):
        x = node[i]
        if not info[x, RESIDENT]:
            continue
        if info[x, MARK] != r:
            info[x, MARK] = r
            safe += fact[x, SIZE]
            if info[x, AT] >= 0:
                drop_from_heap(heap, info, key, meta, x)
        info[x, USES] += 1
        info[x, STAMP] = first + last - i
        key[x] = _compute_priority(kind, info, fact, next_use, weights, floor, asked, x, i)
        if kind == TINY:
            _count_ask(asked, fact, meta, x)
    return safe


@njit(nogil=True)
def _choose_fitting(kind: int, bypass: bool, starts: Any, node: Any, info: Any, fact: Any, meta: Any, asked: Any,
                    fits: Any, r: int, safe: int) -> Any:  # fmt: skip
    """Choose the new blocks that fit beside the safe ones, from the first on, into ``fits``; return their number."""
    room, count, closed = meta[CAPACITY] - safe, 0, False
    for i in range(starts[r], starts[r + 1]):
        x = node[i]
        if info[x, MARK] == r:
            continue
        info[x, MARK] = r
        if kind == TINY:
            _count_ask(asked, fact, meta, x)
        room -= fact[x, SIZE]
        closed = closed or (room < 0 and not bypass)
        if not closed:
            fits[count] = i
            count += 1
    return count


@njit(nogil=True)
def _bring_in(kind: int, bypass: bool, starts: Any, node: Any, next_use: Any, info: Any, fact: Any, key: Any,
              heap: Any, meta: Any, weights: Any, floor: Any, asked: Any, fits: Any, count: int, evicted: Any,
              r: int) -> None:  # fmt: skip
    """Insert the chosen blocks, making room for one after the other."""
    top = starts[r] + starts[r + 1]
    for step in range(count):
        i = fits[step] if kind == TINY else fits[count - 1 - step]
        x = node[i]
        refused = False
        while not bypass and meta[USED] + fact[x, SIZE] > meta[CAPACITY]:
            if meta[MEMBERS] == 0 or (kind == TINY and _read_asks(asked, meta, x) <= _read_asks(asked, meta, heap[0])):
                refused = True
                break
            floor[0] = key[heap[0]]
            evict_smallest(info, fact, key, heap, meta, evicted, r, True)
        if refused:
            if r >= meta[WARM_UP]:
                meta[REFUSED] += count - step if meta[PREFIX] else 1
            if meta[PREFIX]:
                break
            continue
        info[x, RESIDENT] = 1
        meta[USED] += fact[x, SIZE]
        info[x, USES] = 1
        info[x, STAMP] = top - i
        info[x, BORN] = top - i
        if fact[x, PARENT] >= 0:
            info[fact[x, PARENT], KIDS] += 1
        key[x] = _compute_priority(kind, info, fact, next_use, weights, floor, asked, x, i)


@njit(nogil=True)
def run_priority(kind: int, bypass: bool, starts: Any, node: Any, tokens: Any, next_use: Any, fact: Any, meta: Any,
                 weights: Any, asked: Any, tally: Any, used_share: Any, evicted: Any) -> None:  # fmt: skip
    """Run all requests of a trace with one policy."""
    nodes = len(fact)
    info = np.zeros((nodes, 8), np.int32)
    info[:, MARK] = -1
    info[:, AT] = -1
    key, heap, floor = np.zeros(nodes), np.empty(nodes + 1, np.int32), np.zeros(1)
    filled = np.zeros(nodes, np.int32)
    longest = 1
    for r in range(len(starts) - 1):
        longest = max(longest, starts[r + 1] - starts[r])
    fits = np.empty(longest, np.int64)
    for r in range(len(starts) - 1):
        meta[FIRST] = starts[r]
        look_up(starts, node, tokens, info, filled, tally, r)
        safe = _touch(kind, starts, node, next_use, info, fact, key, heap, meta, weights, floor, asked, r)
        count = _choose_fitting(kind, bypass, starts, node, info, fact, meta, asked, fits, r, safe)
        _bring_in(kind, bypass, starts, node, next_use, info, fact, key, heap, meta, weights, floor, asked, fits, count,
                  evicted, r)  # fmt: skip
        for i in range(starts[r + 1] - 1, starts[r] - 1, -1):
            x = node[i]
            if info[x, RESIDENT] and info[x, KIDS] == 0 and info[x, AT] < 0:
                push_to_heap(heap, info, key, meta, x)
        while meta[USED] > meta[CAPACITY]:
            evict_smallest(info, fact, key, heap, meta, evicted, r, False)
        if meta[CAPACITY] > 0:
            used_share[r] = meta[USED] / meta[CAPACITY]
