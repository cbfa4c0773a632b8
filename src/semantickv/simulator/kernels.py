"""The compiled simulator: a heap, and a loop for each family of policies.

Importing this module imports numba. Every policy has a plain twin in ``tests/plain_policies.py``:

- *priority*: policies that evict by a value set at the last use. The heap holds only blocks that may be evicted, those
  without cached children that are not part of the current request: one push for each request, not for each block.
- *queues*: SIEVE, S3-FIFO, ARC. A queue is a doubly linked list; a node is in one queue at most.
- *aged*: LHD and the policy of Bailian, whose values fall with age.
- *adaptive*: `adaptive_semantic`, over the kernels that engines use too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from semblend.eviction.kernels import KEY, hear_use, learn_if_due, price_row
from semblend.fingerprint.kernels import mix64, njit

SEGMENT = 1 << 40  # one segment's distance from the next, in accesses
FADE = 0.9  # of the evidence that is left after a lesson
TURNS = 4  # turns of a conversation that are told apart; later ones are the last
LHD_CLASSES = 12  # new, or by the age at the last hit
EXPLORER_EVERY, EXPLORED_PART = 32, 64  # of the blocks, and of the cache
# Columns of the node table ``info`` (int32): one row is half a cache line, and one array is cheap to hand around,
# where a tuple of a dozen arrays costs a microsecond of reference counting per call.
RESIDENT, LEFT, KIDS, USES, MARK, BORN, STAMP, AT = range(8)
# Columns of ``fact``: what never changes about a node.
PARENT, SIZE, TOKENS, TYPE = range(4)
# Places in ``meta`` (int64).
MEMBERS, USED, CAPACITY, PREFIX, ASKS, EPOCH, HAND, WINDOW, REFUSED, FIRST, LONGEST = range(11)
# Columns of ``tally`` (int32, per request).
HIT_BLOCKS, HIT_TOKENS, REGRET = range(3)


@njit(nogil=True)
def look_up(starts: Any, node: Any, tokens: Any, info: Any, filled: Any, tally: Any, r: int) -> None:
    """Count the cached blocks and tokens of request ``r``, and its misses of evicted blocks.

    In prefix mode nothing is cached behind a gap, because parents stay longer than their children. ``filled`` holds the
    tokens computed in each block: a block that grows (the end of a prompt that goes on) gives only what it had.
    """
    for i in range(starts[r], starts[r + 1]):
        x = node[i]
        if info[x, RESIDENT]:
            tally[r, HIT_BLOCKS] += 1
            tally[r, HIT_TOKENS] += min(tokens[i], filled[x])
            filled[x] = max(filled[x], tokens[i])
        else:
            filled[x] = tokens[i]
            if info[x, LEFT]:
                tally[r, REGRET] += 1


# -- a trace as a forest --------------------------------------------------------------------------------------------


@njit(nogil=True)
def number_nodes(ids: Any, starts: Any, tenant: Any, prefix: bool, above_of: Any, id_of: Any, slots: Any) -> Any:
    """Number the (parent, id) pairs in order of first appearance, in an open-addressed hash table."""
    mask = len(slots) - 1
    node = np.empty(len(ids), np.int32)
    count = 0
    for r in range(len(starts) - 1):
        root = -1 - tenant[r]
        above = root
        for i in range(starts[r], starts[r + 1]):
            mixed = mix64(np.uint64(ids[i]) + mix64(np.uint64(above + 0x40000000)))
            slot = np.int64(mixed & np.uint64(mask))
            while True:
                found = slots[slot]
                if found < 0:
                    slots[slot] = count
                    above_of[count] = above
                    id_of[count] = ids[i]
                    found = count
                    count += 1
                    break
                if above_of[found] == above and id_of[found] == ids[i]:
                    break
                slot = (slot + 1) & mask
            node[i] = found
            above = found if prefix else root
    return node, count


@njit(nogil=True)
def find_next_uses(node: Any, starts: Any, nodes: int) -> Any:
    """Find for every access the next request that uses its node; the number of requests if none does."""
    never = len(starts) - 1
    later = np.full(nodes, never, np.int32)
    out = np.empty(len(node), np.int32)
    for r in range(never - 1, -1, -1):
        for i in range(starts[r], starts[r + 1]):
            out[i] = later[node[i]]
        for i in range(starts[r], starts[r + 1]):
            later[node[i]] = r
    return out


# -- the heap -------------------------------------------------------------------------------------------------------

# ``heap`` holds nodes, ``info[node, AT]`` its place or -1, ``meta[MEMBERS]`` their number. Smallest key
# first, then the smallest stamp; stamps differ, so the order is total and equal to the plain twin's.


@njit(inline="always")
def _comes_before(key: Any, info: Any, a: int, b: int) -> Any:
    """Whether node ``a`` leaves the heap before node ``b``."""
    return key[a] < key[b] or (key[a] == key[b] and info[a, STAMP] < info[b, STAMP])


@njit(inline="always")
def _move_up(heap: Any, info: Any, key: Any, place: int) -> None:
    """Move a node towards the top of the heap until its parent is smaller."""
    node = heap[place]
    while place > 0:
        above = (place - 1) >> 1
        other = heap[above]
        if not _comes_before(key, info, node, other):
            break
        heap[place] = other
        info[other, AT] = place
        place = above
    heap[place] = node
    info[node, AT] = place


@njit(inline="always")
def _move_down(heap: Any, info: Any, key: Any, place: int, count: int) -> None:
    """Move a node towards the bottom of the heap until its children are larger."""
    node = heap[place]
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and _comes_before(key, info, heap[child + 1], heap[child]):
            child += 1
        other = heap[child]
        if not _comes_before(key, info, other, node):
            break
        heap[place] = other
        info[other, AT] = place
        place = child
    heap[place] = node
    info[node, AT] = place


@njit(nogil=True)
def push_to_heap(heap: Any, info: Any, key: Any, meta: Any, node: int) -> None:
    """Add a node to the heap."""
    place = meta[MEMBERS]
    heap[place] = node
    meta[MEMBERS] = place + 1
    _move_up(heap, info, key, place)


@njit(nogil=True)
def drop_from_heap(heap: Any, info: Any, key: Any, meta: Any, node: int) -> None:
    """Remove a node from any place in the heap."""
    place = info[node, AT]
    info[node, AT] = -1
    last = meta[MEMBERS] - 1
    meta[MEMBERS] = last
    if place == last:
        return
    moved = heap[last]
    heap[place] = moved
    info[moved, AT] = place
    _move_up(heap, info, key, place)
    _move_down(heap, info, key, info[moved, AT], last)


@njit(inline="always")
def replace_top_of_heap(heap: Any, info: Any, key: Any, meta: Any, node: int) -> None:
    """Replace the smallest node; cheap, because a parent that follows its child is often the smallest again."""
    info[heap[0], AT] = -1
    heap[0] = node
    info[node, AT] = 0
    _move_down(heap, info, key, 0, meta[MEMBERS])


@njit(nogil=True)
def restore_heap_order(heap: Any, info: Any, key: Any, meta: Any) -> None:
    """Restore the order of the heap after all keys have changed."""
    for place in range(meta[MEMBERS] // 2 - 1, -1, -1):
        _move_down(heap, info, key, place, meta[MEMBERS])


# -- policies with a priority ---------------------------------------------------------------------------------------

FIFO, LRU, LFU, SIZE_LRU, LFUDA, GDSF, STATIC, BELADY, TINY, LFU_ALL, LRU2, SLRU, TLRU = range(13)


@njit(inline="always")
def _compute_priority(kind: int, info: Any, fact: Any, next_use: Any, weights: Any, floor: Any, asked: Any, x: int,
                      i: int) -> Any:  # fmt: skip
    """Compute the priority of node ``x`` at access ``i``; the smallest is evicted first.

    LFU_ALL and LRU2 remember what was evicted. TLRU (arXiv:2510.15152) gives up the last ``tail_tokens`` of the longest
    prompt through a block first: computing them again keeps the next turn within its time to first token. LFUDA and
    GDSF age: every eviction raises the value that new blocks start from. STATIC values all blocks in milliseconds, at
    0.08 a token. BELADY knows what comes next, and is a bound.
    """
    if kind == LFU_ALL:
        asked[x, 0] += 1
        return float(asked[x, 0])
    if kind == LRU2:
        asked[x, 0], asked[x, 1] = asked[x, 1], info[x, STAMP]
        return float(asked[x, 0])
    if kind == SLRU:
        return info[x, STAMP] + (float(SEGMENT) if info[x, USES] > 1 else 0.0)
    if kind == TLRU:
        asked[x, 0] = max(asked[x, 0], next_use[i])
        return info[x, STAMP] - (float(SEGMENT) if asked[x, 0] <= weights[-1] else 0.0)
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
    """Count a request for node ``x``, cached or not (TINY). After ten times the capacity all counts are halved.

    The window is counted in sizes, and halving is delayed until a count is read.
    """
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
def run_priority(kind: int, bypass: bool, starts: Any, node: Any, tokens: Any, info: Any, fact: Any, meta: Any,
                 tally: Any, used_share: Any, evicted: Any, next_use: Any, weights: Any,
                 asked: Any) -> None:  # fmt: skip
    """Run all requests of a trace with one policy."""
    nodes = len(fact)
    key, heap, floor = np.zeros(nodes), np.empty(nodes + 1, np.int32), np.zeros(1)
    filled, fits = np.zeros(nodes, np.int32), np.empty(meta[LONGEST], np.int64)
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


# -- policies with queues -------------------------------------------------------------------------------------------

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
    """Move the hand to the next block without a mark and return it; -1 if there is none.

    The hand walks from old to new, clears the marks of what was used, and stays where it evicted. Nothing moves on a
    hit; a newcomer joins at the new end without a mark.
    """
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
    """Find the block to evict in the small or the main queue; -1 if there is none.

    Newcomers pass through the small queue (a tenth); what was used twice there moves to the main one, which gives a
    block one more round for each use, three at most. What leaves the small queue is remembered, and joins the main one
    at once if it comes back soon.
    """
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
    """Find the block to evict in the list that is beyond the border; -1 if there is none.

    One list holds blocks seen once, the other the rest. What left either is remembered, and a miss on it moves the
    border towards the list that it left (`_move_border`).
    """
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
def _evict_queued(kind: int, info: Any, fact: Any, links: Any, ends: Any, meta: Any, evicted: Any, x: int) -> None:
    """Evict node ``x`` and remember it where the policy does so."""
    info[x, RESIDENT] = 0
    info[x, LEFT] = 1
    meta[USED] -= fact[x, SIZE]
    meta[EPOCH] = 1  # something has been evicted
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
def _touch_queues(kind: int, starts: Any, node: Any, info: Any, fact: Any, links: Any, ends: Any, r: int) -> Any:
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
def _insert_queued(kind: int, info: Any, fact: Any, links: Any, ends: Any, meta: Any, x: int) -> None:
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
def _fill_queues(kind: int, starts: Any, node: Any, info: Any, fact: Any, links: Any, ends: Any, meta: Any, border: Any,
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
            _evict_queued(kind, info, fact, links, ends, meta, evicted, victim)
        if not fitted:
            meta[REFUSED] += step + 1 if meta[PREFIX] else 1
            if meta[PREFIX]:
                break
            continue
        _insert_queued(kind, info, fact, links, ends, meta, x)


@njit(nogil=True)
def run_queues(kind: int, starts: Any, node: Any, tokens: Any, info: Any, fact: Any, meta: Any, tally: Any,
               used_share: Any, evicted: Any) -> None:  # fmt: skip
    """Run all requests of a trace with one policy."""
    links = np.full((len(fact), 3), -1, np.int32)
    ends, border = np.zeros((4, 4), np.int64), np.zeros(1)
    ends[:, :2] = -1
    fits, filled = np.empty(meta[LONGEST], np.int64), np.zeros(len(fact), np.int32)
    for r in range(len(starts) - 1):
        look_up(starts, node, tokens, info, filled, tally, r)
        safe = _touch_queues(kind, starts, node, info, fact, links, ends, r)
        _fill_queues(kind, starts, node, info, fact, links, ends, meta, border, evicted, fits, r, safe)
        if meta[CAPACITY] > 0:
            used_share[r] = meta[USED] / meta[CAPACITY]


# -- policies whose values age --------------------------------------------------------------------------------------

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
def _price_aged(seen: Any, edges: Any, table: Any, fact: Any, now: int, x: int) -> Any:
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
    """Count the hits of cached blocks by class and age, and give every block its new class.

    Least hit density (Beckmann, Chen, Cidon: NSDI 2018). A class is a block's type (the paper's application) and the
    age at its last hit. The paper samples 64 blocks for an eviction; here the least of all leaves goes. As there, a few
    newcomers explore: they stay until they are hit or reach the last age, or hits behind the present age of eviction
    would never be seen. They may take a 64th of the cache, and come from every 32nd block.
    """
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
    """Count returns and gaps by category, and give every block its new category.

    As Alibaba's Bailian evicts (Wang and others: KVCache Cache in the Wild, ATC 2025). A category is a block's type and
    the turn of the conversation that used it last, which is one more than that of the deepest block known of it. Gaps
    are taken as exponential, and "soon" is the next cache-ful.
    """
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
def _take_in(starts: Any, node: Any, info: Any, fact: Any, key: Any, heap: Any, meta: Any, r: int) -> None:
    """Mark every block of the request as used and cached."""
    first, last = starts[r], starts[r + 1]
    for i in range(last - 1, first - 1, -1):
        x = node[i]
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


@njit(nogil=True)
def run_aged(policy: int, starts: Any, node: Any, tokens: Any, info: Any, fact: Any, meta: Any, tally: Any,
             used_share: Any, evicted: Any, edges: Any, table: Any, evidence: Any) -> None:  # fmt: skip
    """Run all requests of a trace with one of the two policies."""
    nodes = len(fact)
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
        _take_in(starts, node, info, fact, key, heap, meta, r)
        for i in range(starts[r + 1] - 1, starts[r] - 1, -1):
            x = node[i]
            if info[x, KIDS] == 0 and info[x, AT] < 0:
                key[x] = _price_aged(seen, edges, table, fact, now, x)
                push_to_heap(heap, info, key, meta, x)
        if lesson or starts[r + 1] - scored >= meta[MEMBERS]:
            for place in range(meta[MEMBERS]):
                key[heap[place]] = _price_aged(seen, edges, table, fact, now, heap[place])
            restore_heap_order(heap, info, key, meta)
            scored = starts[r + 1]
        while meta[USED] > meta[CAPACITY]:
            x = heap[0]
            if policy == LHD:
                evidence[seen[x, KIND], _find_age(seen, edges, now, x), 1] += 1.0
                _end_exploring(seen, fact, budget, x)
            above = fact[x, PARENT]
            if above >= 0 and info[above, KIDS] == 1:  # it is about to stand in the heap
                key[above] = _price_aged(seen, edges, table, fact, now, above)
            evict_smallest(info, fact, key, heap, meta, evicted, r, False)
        if meta[CAPACITY] > 0:
            used_share[r] = meta[USED] / meta[CAPACITY]


@njit(inline="always")
def _price_adaptive(rows: Any, index: Any, edges: Any, meta: Any, row_of: Any, x: int) -> Any:
    """Compute the value of node ``x``; nothing if the policy has forgotten it."""
    if rows[row_of[x], KEY] != x:
        return 0.0
    return price_row(rows, index, edges, meta, row_of[x])


@njit(nogil=True)
def run_adaptive(starts: Any, node: Any, tokens: Any, info: Any, fact: Any, meta: Any, tally: Any, used_share: Any,
                 evicted: Any, types: Any, sessions: Any, rows: Any, heads: Any, ring: Any, ledger: Any, index: Any,
                 edges: Any, behind: Any, priors: Any, groups: Any, plan: Any, learnt: Any) -> None:  # fmt: skip
    """Run all requests of a trace. ``learnt`` is the policy's own ``meta``."""
    nodes, longest = len(fact), meta[LONGEST]
    key, heap, row_of = np.zeros(nodes), np.empty(nodes + 1, np.int32), np.zeros(nodes, np.int64)
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
        for i in range(n):  # a block that stands twice has the row of its first place
            row_of[node[first + n - 1 - i]] = path[n - 1 - i]
        _take_in(starts, node, info, fact, key, heap, meta, r)
        for i in range(first + n - 1, first - 1, -1):
            x = node[i]
            if info[x, KIDS] == 0 and info[x, AT] < 0:
                key[x] = _price_adaptive(rows, index, edges, learnt, row_of, x)
                push_to_heap(heap, info, key, meta, x)
        if lesson or starts[r + 1] - scored >= meta[MEMBERS]:
            for place in range(meta[MEMBERS]):
                key[heap[place]] = _price_adaptive(rows, index, edges, learnt, row_of, heap[place])
            restore_heap_order(heap, info, key, meta)
            scored = starts[r + 1]
        while meta[USED] > meta[CAPACITY]:
            above = fact[heap[0], PARENT]
            if above >= 0 and info[above, KIDS] == 1:  # it is about to stand in the heap
                key[above] = _price_adaptive(rows, index, edges, learnt, row_of, above)
            evict_smallest(info, fact, key, heap, meta, evicted, r, False)
        if meta[CAPACITY] > 0:
            used_share[r] = meta[USED] / meta[CAPACITY]
