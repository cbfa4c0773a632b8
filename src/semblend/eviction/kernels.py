"""The compiled code of `Adaptive`; ``tests/plain_adaptive.py`` is its plain twin. Importing this imports numba.

The simulator's loop and the class that engines hold call the same functions over the same arrays:

- ``rows`` (int64): one row a known block, found by ``heads``, a table of chains by the hash of the key;
- ``ring`` (int64): row, clock and classes of the last uses, the row -1 where the block came back. Growing older walks
  it from end to end and touches nothing else; ``behind[k]`` is the first place younger than the edge of age k;
- ``ledger``, ``index`` (float64): the evidence and what follows from it, by class and age.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from semblend.eviction.plan import (
    BLOCK_KINDS,
    ENDS,
    FIRST_LESSON,
    GROUPS,
    KINDS,
    NEW,
    NEW_KINDS,
    OWN,
    SESSION,
    SEVERAL,
    SHARED,
)
from semblend.fingerprint.kernels import mix64, njit

# Columns of ``rows``, eight of them: a row is 64 bytes. CLASSES holds both, the view by block above the low 32 bits.
KEY, NEXT, LAST, CLASSES, PLACE, USES, FAN, TURN = range(8)
COLUMNS = 8
LOW = 0xFFFFFFFF
# Columns of ``ring``.
ROW, AT, FIRST_CLASS, SECOND_CLASS = range(4)
RETURNS, EXPOSURE, AT_RISK, SINCE = range(4)
# Places in ``meta`` (int64). NOW is the clock at the last request, CLOCK what it is for the next one.
NOW, CLOCK, HEAD, TAIL, FREE, FRESH, ACCESSES, TAUGHT_CLOCK, TAUGHT_ACCESSES, EPOCH, CHAINED = range(11)
# Places in ``plan`` (float64), as in `plan.AdaptivePlan`.
EVERY, BLOCKS, MEMORY, MEMORY_BLOCKS, TRUST, HOPE, DOUBT = range(7)


@njit(inline="always")
def _find_chain(heads: Any, key: int) -> Any:
    return np.int64(mix64(np.uint64(key)) & np.uint64(len(heads) - 1))


@njit(inline="always")
def find_row(rows: Any, heads: Any, key: int) -> Any:
    """Find the row of a block; -1 if it is not known. Chains hold row + 1, so that an empty table is all zeros."""
    r = heads[_find_chain(heads, key)] - 1
    while r >= 0 and rows[r, KEY] != key:
        r = rows[r, NEXT] - 1
    return r


@njit(inline="always")
def _make_row(rows: Any, heads: Any, meta: Any, key: int, turn: int) -> Any:
    if meta[FREE] > 0:
        r = meta[FREE] - 1
        meta[FREE] = rows[r, NEXT]
    else:
        r = meta[FRESH]
        meta[FRESH] += 1
    chain = _find_chain(heads, key)
    rows[r, :] = 0
    rows[r, KEY], rows[r, NEXT], rows[r, PLACE], rows[r, TURN] = key, heads[chain], -1, turn
    rows[r, CLASSES] = -1
    heads[chain] = r + 1
    return r


@njit(inline="always")
def _free_row(rows: Any, heads: Any, meta: Any, r: int) -> None:
    chain = _find_chain(heads, rows[r, KEY])
    q = heads[chain] - 1
    if q == r:
        heads[chain] = rows[r, NEXT]
    else:
        while rows[q, NEXT] != r + 1:
            q = rows[q, NEXT] - 1
        rows[q, NEXT] = rows[r, NEXT]
    rows[r, KEY] = -1
    rows[r, NEXT] = meta[FREE]
    meta[FREE] = r + 1


@njit(inline="always")
def _settle_cell(ledger: Any, c: int, k: int, now: float, change: float) -> None:
    ledger[c, k, EXPOSURE] += ledger[c, k, AT_RISK] * (now - ledger[c, k, SINCE])
    ledger[c, k, SINCE] = now
    ledger[c, k, AT_RISK] += change


@njit(inline="always")
def _find_age(age: float, edges: Any) -> Any:
    """Find the index of the age range that a waiting time falls into."""
    k, bins = 0, len(edges) - 1
    while k < bins - 1 and age >= edges[k + 1]:
        k += 1
    return k


@njit(inline="always")
def _settle(ring: Any, ledger: Any, at: int, k: int, now: float, change: float) -> None:
    """Bring the exposure of both classes of a use at one age up to date, then add ``change`` blocks."""
    if ring[at, FIRST_CLASS] >= 0:
        _settle_cell(ledger, ring[at, FIRST_CLASS], k, now, change)
        _settle_cell(ledger, ring[at, SECOND_CLASS], k, now, change)


@njit(nogil=True)
def _grow_older(ring: Any, ledger: Any, edges: Any, behind: Any, meta: Any) -> None:
    """Move uses that have not returned to the next age; neighbours of one class, as most of a prompt, move together."""
    now = meta[NOW]
    for k in range(1, len(edges) - 1):
        q = max(behind[k], meta[TAIL])
        at, run, run_at = q % len(ring), 0.0, 0
        while q < meta[HEAD] and now - ring[at, AT] >= edges[k]:
            if ring[at, ROW] >= 0:
                same = (
                    run > 0.0
                    and ring[at, FIRST_CLASS] == ring[run_at, FIRST_CLASS]
                    and ring[at, SECOND_CLASS] == ring[run_at, SECOND_CLASS]
                )
                if run > 0.0 and not same:
                    _settle(ring, ledger, run_at, k - 1, now, -run)
                    _settle(ring, ledger, run_at, k, now, run)
                run = run + 1.0 if same else 1.0
                run_at = at
            q += 1
            at = at + 1 if at + 1 < len(ring) else 0
        if run > 0.0:
            _settle(ring, ledger, run_at, k - 1, now, -run)
            _settle(ring, ledger, run_at, k, now, run)
        behind[k] = q


@njit(inline="always")
def _leave_ring(rows: Any, ring: Any, ledger: Any, edges: Any, meta: Any, r: int, returned: bool) -> None:
    """End the wait of a block that came back, and count its return."""
    if rows[r, PLACE] < 0:
        return
    at = rows[r, PLACE] % len(ring)
    k = _find_age(meta[NOW] - ring[at, AT], edges)
    if returned and ring[at, FIRST_CLASS] >= 0:
        ledger[ring[at, FIRST_CLASS], k, RETURNS] += 1.0
        ledger[ring[at, SECOND_CLASS], k, RETURNS] += 1.0
    _settle(ring, ledger, at, k, meta[NOW], -1.0)
    ring[at, ROW] = -1
    rows[r, PLACE] = -1


@njit(inline="always")
def _join_ring(rows: Any, heads: Any, ring: Any, ledger: Any, edges: Any, meta: Any, r: int) -> None:
    """Remember a use; the oldest one leaves a full ring, and its block with it."""
    if meta[HEAD] - meta[TAIL] >= len(ring):
        gone = ring[meta[TAIL] % len(ring), ROW]
        meta[TAIL] += 1
        if gone >= 0:
            _leave_ring(rows, ring, ledger, edges, meta, gone, False)
            _free_row(rows, heads, meta, gone)
    q = meta[HEAD]
    meta[HEAD] = q + 1
    at = q % len(ring)
    ring[at, ROW], ring[at, AT] = r, meta[NOW]
    ring[at, FIRST_CLASS], ring[at, SECOND_CLASS] = rows[r, CLASSES] >> 32, rows[r, CLASSES] & LOW
    rows[r, PLACE] = q
    _settle(ring, ledger, at, 0, meta[NOW], 1.0)


@njit(inline="always")
def _step_length(unseen: int) -> Any:
    return 0 if unseen < 3 else 1 if unseen < 12 else 2 if unseen < 40 else 3


@njit(inline="always")
def _classify_known(uses: int, gap: float, fan: int, unit: float) -> Any:
    """Find the class of a block that was used before, from its uses, its last gap and its children."""
    level, limit = 0, 4.0 * unit
    while level < 5 and gap >= limit:
        level += 1
        limit *= 4.0
    fame, limit_uses = min(uses, 5) - 2, 8
    while uses > limit_uses and fame < 6:
        fame += 1
        limit_uses *= 4
    return SEVERAL + level if fan > 1 and fame < 4 else NEW_KINDS + fame * 6 + level


@njit(inline="always")
def _find_context(turn: int, uses: int) -> Any:
    if uses >= 32:
        return 1
    if uses >= 2:
        return 2 if uses >= 4 else 3
    return 4 if turn < 3 else 5 if turn < 4 else 6 if turn < 6 else 7


@njit(nogil=True)
def _meet(rows: Any, heads: Any, edges: Any, meta: Any, keys: Any, told: int, session: int, path: Any,
          context: Any) -> None:  # fmt: skip
    """Find or make the row of every block into ``path``; fill ``context``: seen, kind, silence, turn, last use."""
    n, seen, kind, silence, turn, last = len(keys), 0, 0, 0, 1, np.int64(-1)
    while seen < n:
        r = find_row(rows, heads, keys[seen])
        if r < 0:
            break
        path[seen] = r
        seen += 1
    known = np.int64(-1)
    if session != 0:
        known = find_row(rows, heads, session ^ SESSION)
    if told > 0 and seen > 0:
        turn = rows[path[min(seen, told) - 1], TURN]
        kind = _find_context(turn, 1)
    elif known >= 0:
        turn, last = rows[known, USES] + 1, rows[known, LAST]
        kind = _find_context(turn, 1)
    elif session != 0 or seen == 0:
        kind = 1 if seen > 0 else 0
    else:
        deepest = path[seen - 1]
        turn, last = rows[deepest, TURN] + 1, rows[deepest, LAST]
        kind = _find_context(turn, rows[deepest, USES])
        turn = 1 if kind == 1 else turn
    if last >= 0:
        quiet, unit = meta[NOW] - last, edges[1]
        silence = 0 if quiet < 16 * unit else 1 if quiet < 64 * unit else 2 if quiet < 256 * unit else 3
    for i in range(seen, n):
        r = find_row(rows, heads, keys[i])
        if r < 0 and i >= told:
            r = _make_row(rows, heads, meta, keys[i], turn)
            if meta[CHAINED] and i > 0 and path[i - 1] >= 0:
                rows[path[i - 1], FAN] += 1
        path[i] = r
    context[0], context[1], context[2], context[3], context[4] = seen, kind, silence, turn, last


@njit(inline="always")
def _file(rows: Any, heads: Any, ring: Any, ledger: Any, edges: Any, meta: Any, context: Any, r: int, unseen: int,
          end: bool, first: int) -> None:  # fmt: skip
    """Count a return of the block in row ``r``, and file its new use."""
    now, seen, kind, silence = meta[NOW], context[0], context[1], context[2]
    gap, own = np.int64(0), False
    if rows[r, USES] > 0:
        gap, own = now - rows[r, LAST], rows[r, LAST] == context[4]
    _leave_ring(rows, ring, ledger, edges, meta, r, True)
    rows[r, USES] += 1
    length = _step_length(unseen)
    if rows[r, USES] == 1:
        group = 0 if end else 1 if seen <= 1 else 2 if unseen < 6 else 3
        by_block = group * 4 + length
        by_talk = ENDS + kind * 4 + length if end else NEW + (kind * 4 + silence) * 4 + length
    else:
        by_block = _classify_known(rows[r, USES], gap, rows[r, FAN], edges[1])
        fanned = 1 if rows[r, FAN] > 1 else 0
        by_talk = OWN + (kind * 4 + silence) * 2 + fanned if own else SHARED + by_block - NEW_KINDS
    rows[r, CLASSES] = (first + by_block) << 32 | (first + by_talk)
    rows[r, LAST] = now
    _join_ring(rows, heads, ring, ledger, edges, meta, r)


@njit(nogil=True)
def hear_use(rows: Any, heads: Any, ring: Any, ledger: Any, edges: Any, behind: Any, meta: Any, keys: Any, types: Any,
             size: int, told: int, session: int, path: Any) -> None:  # fmt: skip
    """File the blocks of one request. ``types`` may be empty; ``size`` is what the request adds to the clock."""
    meta[NOW] = meta[CLOCK]
    context = np.empty(5, np.int64)
    _grow_older(ring, ledger, edges, behind, meta)
    _meet(rows, heads, edges, meta, keys, told, session, path, context)
    n = len(keys)
    unseen = n - context[0]
    for i in range(n - 1, told - 1, -1):
        r = path[i]
        if rows[r, KEY] != keys[i]:  # the ring is shorter than this request
            continue
        first = types[i] * KINDS if len(types) else 0
        _file(rows, heads, ring, ledger, edges, meta, context, r, unseen, i == n - 1, first)
    if session != 0 and told == 0:
        r = find_row(rows, heads, session ^ SESSION)
        if r < 0:
            r = _make_row(rows, heads, meta, session ^ SESSION, context[3])
        rows[r, USES] += 1
        rows[r, LAST] = meta[NOW]
        _leave_ring(rows, ring, ledger, edges, meta, r, False)
        _join_ring(rows, heads, ring, ledger, edges, meta, r)
    meta[CLOCK] += size
    meta[ACCESSES] += n - told


@njit(inline="always")
def price_row(rows: Any, index: Any, edges: Any, meta: Any, r: int) -> Any:
    """Compute the value of the block in a row at its present age."""
    both = rows[r, CLASSES]
    if both < 0:
        return 0.0
    k = _find_age(meta[NOW] - rows[r, LAST], edges)
    if not meta[CHAINED]:
        return index[both >> 32, k]
    return np.sqrt(index[both >> 32, k] * index[both & LOW, k])


@njit(nogil=True)
def price_keys(rows: Any, heads: Any, index: Any, edges: Any, meta: Any, keys: Any, out: Any) -> None:
    """Compute the value of each block; 0 for what is not known."""
    for i in range(len(keys)):
        r = find_row(rows, heads, keys[i])
        out[i] = price_row(rows, index, edges, meta, r) if r >= 0 else 0.0


@njit(nogil=True)
def _find_best_rates(rate: Any, edges: Any, stretches: Any, best: Any) -> None:
    """Find for every age the best ratio of returns to waiting, into ``best``; ``stretches`` is room for a stack."""
    depth = 0
    for k in range(len(rate) - 1, -1, -1):
        width = edges[k + 1] - edges[k]
        expected = rate[k] * width
        chance = expected / (1.0 + expected)
        gain, cost, left = chance, width * (1.0 - 0.5 * chance), 1.0 - chance
        while depth > 0 and stretches[depth - 1, 0] * cost > gain * stretches[depth - 1, 1]:
            depth -= 1
            gain += left * stretches[depth, 0]
            cost += left * stretches[depth, 1]
            left *= stretches[depth, 2]
        stretches[depth, 0], stretches[depth, 1], stretches[depth, 2] = gain, cost, left
        depth += 1
        best[k] = gain / cost


@njit(nogil=True)
def _estimate_common_rates(ledger: Any, edges: Any, plan: Any, now: float, common: Any) -> None:
    """Estimate the rate of returns by age over all blocks except the ends of prompts."""
    sums = np.zeros((len(common), 2))
    for c in range(len(ledger)):  # as the table lies in memory
        counts = 4 <= c % KINDS < BLOCK_KINDS
        for k in range(len(common)):
            if ledger[c, k, AT_RISK] > 0.0:
                _settle_cell(ledger, c, k, now, 0.0)
            if counts:
                sums[k, 0] += ledger[c, k, RETURNS]
                sums[k, 1] += ledger[c, k, EXPOSURE]
    for k in range(len(common)):
        prior = plan[HOPE] / (0.5 * (edges[k] + edges[k + 1]))
        if k > 0:
            prior = max(prior, common[k - 1])
        common[k] = (sums[k, 0] + plan[DOUBT]) / (sums[k, 1] + plan[DOUBT] / prior)


@njit(nogil=True)
def _learn(ledger: Any, index: Any, edges: Any, priors: Any, groups: Any, plan: Any, now: float,
           fade: float) -> None:  # fmt: skip
    """Compute the index of every class from the evidence, then let the evidence fade."""
    bins, trust = index.shape[1], plan[TRUST]
    common, stretches, rate = np.zeros(bins), np.zeros((bins, 3)), np.zeros(bins)
    _estimate_common_rates(ledger, edges, plan, now, common)
    together, unknown, members = np.zeros((GROUPS, bins)), np.zeros((GROUPS, bins)), np.zeros((GROUPS, bins, 2))
    for first in range(0, len(ledger), KINDS):
        members[:] = 0.0
        for kind in range(KINDS):
            for k in range(bins):
                members[groups[kind], k, 0] += ledger[first + kind, k, RETURNS]
                members[groups[kind], k, 1] += ledger[first + kind, k, EXPOSURE]
        for g in range(GROUPS):
            for k in range(bins):
                together[g, k] = (members[g, k, 0] + trust) / (members[g, k, 1] + trust / (priors[g, k] * common[k]))
                rate[k] = trust / (trust / together[g, k])
            _find_best_rates(rate, edges, stretches, unknown[g])
        for kind in range(KINDS):
            c, g = first + kind, groups[kind]
            known = False
            for k in range(bins):
                known = known or ledger[c, k, EXPOSURE] > 0.0 or ledger[c, k, RETURNS] > 0.0
            if not known:  # most classes, most of the time
                index[c] = unknown[g]
                continue
            for k in range(bins):
                rate[k] = (ledger[c, k, RETURNS] + trust) / (ledger[c, k, EXPOSURE] + trust / together[g, k])
                ledger[c, k, RETURNS] *= fade
                ledger[c, k, EXPOSURE] *= fade
            _find_best_rates(rate, edges, stretches, index[c])


@njit(nogil=True)
def learn_if_due(ledger: Any, index: Any, edges: Any, priors: Any, groups: Any, plan: Any, meta: Any) -> Any:
    """Learn the index again if it is time; whether it was."""
    clock, accesses = meta[CLOCK] - meta[TAUGHT_CLOCK], meta[ACCESSES] - meta[TAUGHT_ACCESSES]
    if clock < plan[EVERY] or accesses < min(plan[BLOCKS], max(FIRST_LESSON, meta[ACCESSES] / 8.0)):
        return False
    fade = 0.5 ** min(clock / plan[MEMORY], accesses / plan[MEMORY_BLOCKS])
    _learn(ledger, index, edges, priors, groups, plan, float(meta[NOW]), fade)
    meta[TAUGHT_CLOCK], meta[TAUGHT_ACCESSES] = meta[CLOCK], meta[ACCESSES]
    meta[EPOCH] += 1
    return True
