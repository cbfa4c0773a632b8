"""The compiled loop of `adaptive_semantic`; its plain twin `policies.adaptive.AdaptiveSemantic` explains it.

Importing this module imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from semantickv.simulator.kernels import (
    AT,
    BORN,
    CAPACITY,
    KIDS,
    MARK,
    MEMBERS,
    PARENT,
    RESIDENT,
    SIZE,
    STAMP,
    TYPE,
    USED,
    USES,
    drop_from_heap,
    look_up,
    push_to_heap,
    restore_heap_order,
)
from semantickv.simulator.kernels_priority import evict_smallest
from semantickv.simulator.policies.adaptive import FIRST_LESSON, KINDS, NEW_KINDS, SEVERAL
from semblend.fingerprint.kernels import njit

FAN = BORN  # known children, in the column that the other policies use for the time of birth
# Columns of ``ledger``: [class, age, (returns, exposure, at risk, since)].
RETURNS, EXPOSURE, AT_RISK, SINCE = range(4)
# Places in ``plan`` (float64), as in `policies.adaptive.AdaptivePlan`.
EVERY, BLOCKS, MEMORY, MEMORY_BLOCKS, TRUST, HOPE, DOUBT = range(7)


@njit(nogil=True)
def find_age(age: float, edges: Any) -> Any:
    """Find the index of the age range that ``age`` falls into."""
    bins = len(edges) - 1
    k = 0
    while k < bins - 1 and age >= edges[k + 1]:
        k += 1
    return k


@njit(nogil=True)
def classify_use(tail: bool, length: int, seen: int, uses: int, gap: float, fan: int, unit: float) -> Any:
    """Find the class of a use from its place, what the request knew, its uses, its last gap and its children."""
    if uses == 1:
        unseen = length - seen
        group = 0 if tail else 1 if seen <= 1 else 2 if unseen < 6 else 3
        return group * 4 + (0 if unseen < 3 else 1 if unseen < 12 else 2 if unseen < 40 else 3)
    level = 0
    limit = 4.0 * unit
    while level < 5 and gap >= limit:
        level += 1
        limit *= 4.0
    fame = min(uses, 5) - 2
    limit_uses = 8
    while uses > limit_uses and fame < 6:
        fame += 1
        limit_uses *= 4
    if fan > 1 and fame < 4:
        return SEVERAL + level
    return NEW_KINDS + fame * 6 + level


@njit(nogil=True)
def find_level(kind: int) -> Any:
    """Find the row of a class in the priors: the group of a new block, or the use count of an older one."""
    if kind < NEW_KINDS:
        return kind // 4
    return 4 if kind >= SEVERAL else 4 + (kind - NEW_KINDS) // 6


@njit(nogil=True)
def _settle(ledger: Any, c: int, k: int, now: float, change: float) -> None:
    """Bring the exposure of a cell up to date, then add ``change`` blocks to it."""
    ledger[c, k, EXPOSURE] += ledger[c, k, AT_RISK] * (now - ledger[c, k, SINCE])
    ledger[c, k, SINCE] = now
    ledger[c, k, AT_RISK] += change


@njit(nogil=True)
def _estimate_rates(cells: Any, assumed: Any, trust: float, rate: Any) -> None:
    """Estimate the rate of returns at every age into ``rate``; little evidence leans on ``assumed``."""
    for k in range(len(rate)):
        rate[k] = (cells[k, RETURNS] + trust) / (cells[k, EXPOSURE] + trust / assumed[k])


@njit(nogil=True)
def _find_best_rates(rate: Any, edges: Any, chance: Any, best: Any) -> None:
    """Find for every age the best ratio of returns to waiting, into ``best``."""
    bins = len(rate)
    for k in range(bins):
        expected = rate[k] * (edges[k + 1] - edges[k])
        chance[k] = expected / (1.0 + expected)
    for k in range(bins):
        most, gain, cost, alive = 0.0, 0.0, 0.0, 1.0
        for j in range(k, bins):
            gain += alive * chance[j]
            cost += alive * (edges[j + 1] - edges[j]) * (1.0 - 0.5 * chance[j])
            alive *= 1.0 - chance[j]
            most = max(most, gain / cost)
        best[k] = most


@njit(nogil=True)
def _estimate_common_rates(ledger: Any, edges: Any, plan: Any, now: float, common: Any) -> None:
    """Estimate the rate of returns by age over all classes except the ends of prompts.

    An age without evidence takes the rate of the age before.
    """
    for k in range(len(common)):
        returns, exposure = 0.0, 0.0
        for c in range(len(ledger)):
            _settle(ledger, c, k, now, 0.0)
            if c % KINDS >= 4:
                returns += ledger[c, k, RETURNS]
                exposure += ledger[c, k, EXPOSURE]
        prior = plan[HOPE] / (0.5 * (edges[k] + edges[k + 1]))
        if k > 0:
            prior = max(prior, common[k - 1])
        common[k] = (returns + plan[DOUBT]) / (exposure + plan[DOUBT] / prior)


@njit(nogil=True)
def _has_evidence(ledger: Any, first: int, classes: int) -> Any:
    """Whether any use was ever filed under these classes."""
    for c in range(first, first + classes):
        for k in range(ledger.shape[1]):
            if ledger[c, k, AT_RISK] > 0.0 or ledger[c, k, EXPOSURE] > 0.0 or ledger[c, k, RETURNS] > 0.0:
                return True
    return False


@njit(nogil=True)
def learn_index(ledger: Any, index: Any, edges: Any, priors: Any, plan: Any, now: float, fade: float) -> None:
    """Compute the index from returns and exposure: the best rate of returns that waiting can still bring."""
    classes, bins = index.shape
    common, chance, rate, together = np.zeros(bins), np.zeros(bins), np.zeros(bins), np.zeros(bins)
    unknown, nothing = np.zeros(priors.shape), np.zeros((bins, 4))
    _estimate_common_rates(ledger, edges, plan, now, common)
    for level in range(len(priors)):
        _estimate_rates(nothing, priors[level] * common, plan[TRUST], rate)
        _find_best_rates(rate, edges, chance, unknown[level])
    c = 0
    while c < classes:
        level = find_level(c % KINDS)
        members = 4 if c % KINDS < NEW_KINDS else 1
        if not _has_evidence(ledger, c, members):
            index[c : c + members] = unknown[level]
            c += members
            continue
        together[:] = priors[level] * common
        if members > 1:
            whole = np.zeros((bins, 4))
            for member in range(c, c + members):
                whole += ledger[member]
            _estimate_rates(whole, priors[level] * common, plan[TRUST], together)
        for member in range(c, c + members):
            _estimate_rates(ledger[member], together, plan[TRUST], rate)
            _find_best_rates(rate, edges, chance, index[member])
            ledger[member, :, RETURNS] *= fade
            ledger[member, :, EXPOSURE] *= fade
        c += members


@njit(nogil=True)
def _grow_older(starts: Any, node: Any, clock: Any, last_at: Any, class_at: Any, behind: Any, ledger: Any, edges: Any,
                r: int) -> None:  # fmt: skip
    """Move uses that have not returned to the next age. ``behind[k]`` is the first request younger than edge k."""
    now = clock[r]
    for k in range(1, len(edges) - 1):
        q = behind[k]
        while q < r and now - clock[q] >= edges[k]:
            for i in range(starts[q], starts[q + 1]):
                if last_at[node[i]] == i:
                    _settle(ledger, class_at[i], k - 1, now, -1.0)
                    _settle(ledger, class_at[i], k, now, 1.0)
            q += 1
        behind[k] = q


@njit(nogil=True)
def _use(starts: Any, node: Any, tail: Any, clock: Any, info: Any, fact: Any, key: Any, heap: Any, meta: Any,
         last_at: Any, class_at: Any, last_clock: Any, ledger: Any, index: Any, edges: Any,
         r: int) -> None:  # fmt: skip
    """Mark every block of the request as used and cached, and file it under its new class."""
    first, last, now = starts[r], starts[r + 1], clock[r]
    seen = 0
    while first + seen < last and info[node[first + seen], USES] > 0:
        seen += 1
    for i in range(last - 1, first - 1, -1):
        x = node[i]
        gap = 0.0
        if info[x, USES] > 0:
            gap = now - last_clock[x]
            c, k = class_at[last_at[x]], find_age(gap, edges)
            ledger[c, k, RETURNS] += 1.0
            _settle(ledger, c, k, now, -1.0)
        elif fact[x, PARENT] >= 0:
            info[fact[x, PARENT], FAN] += 1
        info[x, USES] += 1
        kind = classify_use(tail[i], last - first, seen, info[x, USES], gap, info[x, FAN], edges[1])
        c = fact[x, TYPE] * KINDS + kind
        _settle(ledger, c, 0, now, 1.0)
        last_at[x] = i
        class_at[i] = c
        last_clock[x] = now
        info[x, MARK] = r
        if info[x, AT] >= 0:
            drop_from_heap(heap, info, key, meta, x)
        info[x, STAMP] = first + last - i
        key[x] = index[c, 0]
        if not info[x, RESIDENT]:
            info[x, RESIDENT] = 1
            meta[USED] += fact[x, SIZE]
            if fact[x, PARENT] >= 0:
                info[fact[x, PARENT], KIDS] += 1


@njit(nogil=True)
def _score_all(info: Any, key: Any, heap: Any, meta: Any, last_at: Any, class_at: Any, last_clock: Any, index: Any,
               edges: Any, now: float) -> None:  # fmt: skip
    """Compute the keys of all blocks in the heap again."""
    for place in range(meta[MEMBERS]):
        x = heap[place]
        key[x] = index[class_at[last_at[x]], find_age(now - last_clock[x], edges)]
    restore_heap_order(heap, info, key, meta)


@njit(nogil=True)
def _learn_if_due(
    ledger: Any, index: Any, edges: Any, priors: Any, plan: Any, taught: Any, now: float, seen: float
) -> Any:
    """Learn the index again if it is time. ``taught`` holds the clock and the accesses of the last time."""
    clock, accesses = now - taught[0], seen - taught[1]
    if clock < plan[EVERY] or accesses < min(plan[BLOCKS], max(FIRST_LESSON, seen / 8.0)):
        return False
    fade = 0.5 ** min(clock / plan[MEMORY], accesses / plan[MEMORY_BLOCKS])
    learn_index(ledger, index, edges, priors, plan, now, fade)
    taught[0], taught[1] = now, seen
    return True


@njit(nogil=True)
def run_adaptive(starts: Any, node: Any, tokens: Any, tail: Any, clock: Any, fact: Any, meta: Any, ledger: Any,
                 index: Any, edges: Any, priors: Any, plan: Any, tally: Any, used_share: Any,
                 evicted: Any) -> None:  # fmt: skip
    """Run all requests of a trace."""
    nodes = len(fact)
    info = np.zeros((nodes, 8), np.int32)
    info[:, MARK] = -1
    info[:, AT] = -1
    key, heap = np.zeros(nodes), np.empty(nodes + 1, np.int32)
    last_at, last_clock = np.full(nodes, -1, np.int64), np.zeros(nodes)
    class_at, behind = np.zeros(len(node), np.int32), np.zeros(len(edges), np.int64)
    taught, scored = np.zeros(2), 0
    for r in range(len(starts) - 1):
        now = clock[r]
        look_up(starts, node, tokens, info, tally, r)
        _grow_older(starts, node, clock, last_at, class_at, behind, ledger, edges, r)
        _use(starts, node, tail, clock, info, fact, key, heap, meta, last_at, class_at, last_clock, ledger, index,
             edges, r)  # fmt: skip
        for i in range(starts[r + 1] - 1, starts[r] - 1, -1):
            x = node[i]
            if info[x, KIDS] == 0 and info[x, AT] < 0:
                push_to_heap(heap, info, key, meta, x)
        lesson = _learn_if_due(ledger, index, edges, priors, plan, taught, now, float(starts[r + 1]))
        if lesson or starts[r + 1] - scored >= meta[MEMBERS]:
            _score_all(info, key, heap, meta, last_at, class_at, last_clock, index, edges, now)
            scored = starts[r + 1]
        while meta[USED] > meta[CAPACITY]:
            x = heap[0]
            above = fact[x, PARENT]
            if above >= 0 and info[above, KIDS] == 1:  # it is about to stand in the heap
                key[above] = index[class_at[last_at[above]], find_age(now - last_clock[above], edges)]
            evict_smallest(info, fact, key, heap, meta, evicted, r, False)
        if meta[CAPACITY] > 0:
            used_share[r] = meta[USED] / meta[CAPACITY]
