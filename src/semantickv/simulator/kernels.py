"""Compiled code that all compiled policies share: numbering of nodes, next uses, lookup and a heap.

Importing this module imports numba. The loops are in `kernels_priority`, `kernels_queues` and `kernels_adaptive`; each
has a plain twin in `semantickv.simulator.policies`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from semblend.fingerprint.kernels import mix64, njit


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


# Columns of the node table ``info`` (int32): one row is half a cache line, and one array is cheap to hand around,
# where a tuple of a dozen arrays costs a microsecond of reference counting per call.
RESIDENT, LEFT, KIDS, USES, MARK, BORN, STAMP, AT = range(8)
# Columns of ``fact``: what never changes about a node.
PARENT, SIZE, TOKENS, TYPE = range(4)
# Places in ``meta`` (int64).
MEMBERS, USED, CAPACITY, WARM_UP, PREFIX, ASKS, EPOCH, HAND, WINDOW, REFUSED, FIRST = range(11)
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


# The heap: ``heap`` holds nodes, ``info[node, AT]`` its place or -1, ``meta[MEMBERS]`` their number. Smallest key
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
