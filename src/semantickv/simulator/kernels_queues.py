"""The compiled loop of policies with queues: SIEVE, S3-FIFO, ARC. Twins of `policies.modern`.

Importing this module imports numba. A queue is a doubly linked list through ``older`` and ``newer``. A node is in one
queue at most, cached or only remembered, so one pair of links serves all queues.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from semantickv.simulator.kernels import (
    CAPACITY,
    EPOCH,
    HAND,
    KIDS,
    LEFT,
    MARK,
    PARENT,
    PREFIX,
    REFUSED,
    RESIDENT,
    SIZE,
    TYPE,
    USED,
    USES,
    WARM_UP,
    look_up,
)
from semblend.fingerprint.kernels import njit

SIEVE, S3FIFO, ARC = range(3)
SMALL, MAIN, GHOST = 0, 1, 2  # S3-FIFO; SIEVE uses the first only
ONCE, OFTEN, LEFT_ONCE, LEFT_OFTEN = 0, 1, 2, 3  # ARC


# Columns of ``links`` (int32, per node).
QUEUE, OLDER, NEWER = range(3)
# Columns of ``ends`` (int64, per queue).
OLDEST, NEWEST, TOTAL, COUNT = range(4)


@njit(nogil=True)
def _join(fact: Any, links: Any, ends: Any, q: int, x: int) -> None:
    """Add a node at the new end of a queue."""
    newest = ends[q, NEWEST]
    links[x, OLDER] = newest
    links[x, NEWER] = -1
    if newest >= 0:
        links[newest, NEWER] = x
    else:
        ends[q, OLDEST] = x
    ends[q, NEWEST] = x
    ends[q, TOTAL] += fact[x, SIZE]
    ends[q, COUNT] += 1
    links[x, QUEUE] = q


@njit(nogil=True)
def _leave(fact: Any, links: Any, ends: Any, x: int) -> None:
    """Remove a node from its queue."""
    q = links[x, QUEUE]
    older, newer = links[x, OLDER], links[x, NEWER]
    if older >= 0:
        links[older, NEWER] = newer
    else:
        ends[q, OLDEST] = newer
    if newer >= 0:
        links[newer, OLDER] = older
    else:
        ends[q, NEWEST] = older
    ends[q, TOTAL] -= fact[x, SIZE]
    ends[q, COUNT] -= 1
    links[x, QUEUE] = -1


@njit(nogil=True)
def _renew(fact: Any, links: Any, ends: Any, x: int) -> None:
    """Make a node the newest of its queue."""
    q = links[x, QUEUE]
    _leave(fact, links, ends, x)
    _join(fact, links, ends, q, x)


@njit(nogil=True)
def _is_evictable(info: Any, x: int, r: int) -> Any:
    """Whether a node has no cached children and is not part of request ``r``."""
    return info[x, KIDS] == 0 and info[x, MARK] != r


@njit(nogil=True)
def _find_sieve_victim(info: Any, links: Any, ends: Any, meta: Any, r: int) -> Any:
    """Move the hand to the next block without a mark and return it; -1 if there is none."""
    for _ in range(2 * ends[0, COUNT]):
        x = meta[HAND]
        if x < 0:
            x = ends[0, OLDEST]
        if info[x, USES] == 0 and _is_evictable(info, x, r):
            meta[HAND] = x
            return x
        info[x, USES] = 0
        meta[HAND] = links[x, NEWER]
    return -1


@njit(nogil=True)
def _find_s3fifo_victim(info: Any, fact: Any, links: Any, ends: Any, meta: Any, r: int) -> Any:
    """Find the block to evict in the small or the main queue; -1 if there is none."""
    main_limit = meta[CAPACITY] - max(1, meta[CAPACITY] // 10)
    stuck_small, stuck_main = 0, 0
    while True:
        small_done, main_done = stuck_small >= ends[SMALL, COUNT], stuck_main >= ends[MAIN, COUNT]
        if small_done and main_done:
            return -1
        if (ends[MAIN, TOTAL] > main_limit and not main_done) or small_done:
            x = ends[MAIN, OLDEST]
            if info[x, USES] == 0:
                if _is_evictable(info, x, r):
                    return x
                stuck_main += 1
            else:
                stuck_main = 0
                info[x, USES] -= 1
            _renew(fact, links, ends, x)
        else:
            x = ends[SMALL, OLDEST]
            if info[x, USES] > 1:
                _leave(fact, links, ends, x)
                _join(fact, links, ends, MAIN, x)
                info[x, USES] = 0
                stuck_main = 0
            elif _is_evictable(info, x, r):
                return x
            else:
                stuck_small += 1
                _renew(fact, links, ends, x)


@njit(nogil=True)
def _find_arc_victim(info: Any, links: Any, ends: Any, border: Any, r: int, coming: int) -> Any:
    """Find the block to evict in the list that is beyond the border; -1 if there is none."""
    once = ends[ONCE, TOTAL]
    first_once = once > border[0] or (links[coming, QUEUE] == LEFT_OFTEN and once == border[0])
    for turn in range(2):
        q = ONCE if (turn == 0) == first_once else OFTEN
        x = ends[q, OLDEST]
        while x >= 0:
            if _is_evictable(info, x, r):
                return x
            x = links[x, NEWER]
    return -1


@njit(nogil=True)
def _evict(kind: int, info: Any, fact: Any, links: Any, ends: Any, meta: Any, evicted: Any, r: int, x: int) -> None:
    """Evict node ``x`` and remember it where the policy does so."""
    info[x, RESIDENT] = 0
    info[x, LEFT] = 1
    meta[USED] -= fact[x, SIZE]
    meta[EPOCH] = 1  # something has been evicted
    if r >= meta[WARM_UP]:
        evicted[fact[x, TYPE]] += 1
    if fact[x, PARENT] >= 0:
        info[fact[x, PARENT], KIDS] -= 1
    q = links[x, QUEUE]
    if kind == SIEVE and meta[HAND] == x:
        meta[HAND] = links[x, NEWER]
    _leave(fact, links, ends, x)
    if kind == ARC:
        _join(fact, links, ends, LEFT_ONCE if q == ONCE else LEFT_OFTEN, x)
    elif kind == S3FIFO and q == SMALL:
        _join(fact, links, ends, GHOST, x)
        while ends[GHOST, TOTAL] > meta[CAPACITY] - max(1, meta[CAPACITY] // 10):
            _leave(fact, links, ends, ends[GHOST, OLDEST])


@njit(nogil=True)
def _touch(kind: int, starts: Any, node: Any, info: Any, fact: Any, links: Any, ends: Any, r: int) -> Any:
    """Mark the cached blocks of the request as used; return the space they take."""
    safe = 0
    for i in range(starts[r + 1] - 1, starts[r] - 1, -1):
        x = node[i]
        if not info[x, RESIDENT]:
            continue
        if info[x, MARK] != r:
            info[x, MARK] = r
            safe += fact[x, SIZE]
        if kind == ARC:
            _leave(fact, links, ends, x)
            _join(fact, links, ends, OFTEN, x)
        else:
            info[x, USES] = min(3, info[x, USES] + 1)
    return safe


@njit(nogil=True)
def _move_border(kind: int, links: Any, ends: Any, meta: Any, border: Any, x: int) -> None:
    """Move ARC's border on a miss of a remembered block."""
    if kind != ARC or links[x, QUEUE] < LEFT_ONCE:
        return
    once, often = float(ends[LEFT_ONCE, TOTAL]), float(ends[LEFT_OFTEN, TOTAL])
    if links[x, QUEUE] == LEFT_ONCE:
        border[0] = min(float(meta[CAPACITY]), border[0] + max(1.0, often / once))
    else:
        border[0] = max(0.0, border[0] - max(1.0, once / often))


@njit(nogil=True)
def _insert(kind: int, info: Any, fact: Any, links: Any, ends: Any, meta: Any, x: int) -> None:
    """Insert node ``x`` into the queue where the policy wants it."""
    known = links[x, QUEUE] >= 0
    if known:
        _leave(fact, links, ends, x)
    info[x, RESIDENT] = 1
    info[x, USES] = 0
    meta[USED] += fact[x, SIZE]
    if fact[x, PARENT] >= 0:
        info[fact[x, PARENT], KIDS] += 1
    if kind == SIEVE:
        _join(fact, links, ends, 0, x)
        return
    small = max(1, meta[CAPACITY] // 10)
    full = kind == S3FIFO and meta[EPOCH] == 0 and ends[SMALL, TOTAL] >= small
    _join(fact, links, ends, 1 if known or full else 0, x)  # S3-FIFO's main queue, ARC's list of what came often
    if kind == ARC:
        while ends[LEFT_ONCE, COUNT] > 0 and ends[ONCE, TOTAL] + ends[LEFT_ONCE, TOTAL] > meta[CAPACITY]:
            _leave(fact, links, ends, ends[LEFT_ONCE, OLDEST])
        while ends[LEFT_OFTEN, COUNT] > 0 and ends[:, TOTAL].sum() > 2 * meta[CAPACITY]:
            _leave(fact, links, ends, ends[LEFT_OFTEN, OLDEST])


@njit(nogil=True)
def _bring_in(kind: int, starts: Any, node: Any, info: Any, fact: Any, links: Any, ends: Any, meta: Any, border: Any,
              evicted: Any, fits: Any, r: int, safe: int) -> None:  # fmt: skip
    """Insert the new blocks of the request that fit, making room for one after the other."""
    room, count, closed = meta[CAPACITY] - safe, 0, False
    for i in range(starts[r], starts[r + 1]):
        x = node[i]
        if info[x, MARK] == r:
            continue
        info[x, MARK] = r
        _move_border(kind, links, ends, meta, border, x)
        room -= fact[x, SIZE]
        closed = closed or room < 0
        if not closed:
            fits[count] = x
            count += 1
    for step in range(count - 1, -1, -1):
        x = fits[step]
        fitted = True
        while meta[USED] + fact[x, SIZE] > meta[CAPACITY]:
            if kind == SIEVE:
                victim = _find_sieve_victim(info, links, ends, meta, r)
            elif kind == S3FIFO:
                victim = _find_s3fifo_victim(info, fact, links, ends, meta, r)
            else:
                victim = _find_arc_victim(info, links, ends, border, r, x)
            fitted = victim >= 0
            if not fitted:
                break
            _evict(kind, info, fact, links, ends, meta, evicted, r, victim)
        if not fitted:
            if r >= meta[WARM_UP]:
                meta[REFUSED] += step + 1 if meta[PREFIX] else 1
            if meta[PREFIX]:
                break
            continue
        _insert(kind, info, fact, links, ends, meta, x)


@njit(nogil=True)
def run_queues(kind: int, starts: Any, node: Any, tokens: Any, fact: Any, meta: Any, tally: Any, used_share: Any,
               evicted: Any) -> None:  # fmt: skip
    """Run all requests of a trace with one policy."""
    info = np.zeros((len(fact), 8), np.int32)
    info[:, MARK] = -1
    links = np.full((len(fact), 3), -1, np.int32)
    ends, border = np.zeros((4, 4), np.int64), np.zeros(1)
    ends[:, :2] = -1
    longest = 1
    for r in range(len(starts) - 1):
        longest = max(longest, starts[r + 1] - starts[r])
    fits, filled = np.empty(longest, np.int64), np.zeros(len(fact), np.int32)
    for r in range(len(starts) - 1):
        look_up(starts, node, tokens, info, filled, tally, r)
        safe = _touch(kind, starts, node, info, fact, links, ends, r)
        _bring_in(kind, starts, node, info, fact, links, ends, meta, border, evicted, fits, r, safe)
        if meta[CAPACITY] > 0:
            used_share[r] = meta[USED] / meta[CAPACITY]
