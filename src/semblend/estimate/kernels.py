"""The loops of `semblend.estimate.prefix_cache`, compiled. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from semblend.fingerprint.kernels import mix64, njit

# Columns of ``nodes`` (int32): the list from the newest to the oldest block, and the region that a block stands in.
NEWER, OLDER, REGION = range(3)
# Places in ``meta`` (int64).
NEWEST, OLDEST, HELD = range(3)
# Columns of ``regions`` (int32).
ROOM, COUNT, LAST = range(3)
NONE = -1


@njit(nogil=True)
def hash_blocks(tokens: Any, block: int, seed: Any) -> Any:
    """Compute the key of every whole block: a hash of its tokens and of the key before it."""
    keys = np.empty(len(tokens) // block, np.uint64)
    key = np.uint64(seed)
    for number in range(len(keys)):
        for at in range(number * block, (number + 1) * block):
            key = mix64(key + np.uint64(tokens[at]) + np.uint64(0x9E3779B97F4A7C15))
        keys[number] = key
    return keys


@njit(nogil=True)
def _find_slot(table: Any, names: Any, key: Any) -> Any:
    """The slot that holds ``key``, or the empty one where it belongs."""
    mask = len(table) - 1
    slot = np.int64(mix64(key) & np.uint64(mask))
    while table[slot] != NONE and names[table[slot]] != key:
        slot = (slot + 1) & mask
    return slot


@njit(nogil=True)
def _clear_slot(table: Any, names: Any, slot: int) -> None:
    """Empty a slot and move back what stood behind it because of it."""
    mask = len(table) - 1
    at = slot
    while True:
        at = (at + 1) & mask
        node = table[at]
        if node == NONE:
            break
        home = np.int64(mix64(names[node]) & np.uint64(mask))
        if ((at - home) & mask) >= ((at - slot) & mask):
            table[slot] = node
            slot = at
    table[slot] = NONE


@njit(nogil=True)
def _unlink(nodes: Any, regions: Any, meta: Any, node: int) -> None:
    newer, older, region = nodes[node, NEWER], nodes[node, OLDER], nodes[node, REGION]
    if newer == NONE:
        meta[NEWEST] = older
    else:
        nodes[newer, OLDER] = older
    if older == NONE:
        meta[OLDEST] = newer
    else:
        nodes[older, NEWER] = newer
    regions[region, COUNT] -= 1
    if regions[region, LAST] == node:
        regions[region, LAST] = newer if regions[region, COUNT] else NONE


@njit(nogil=True)
def _put_first(nodes: Any, regions: Any, meta: Any, node: int) -> None:
    """Put a node in front; the last one of each full region moves on to the next."""
    first = meta[NEWEST]
    nodes[node, NEWER], nodes[node, OLDER], nodes[node, REGION] = NONE, first, 0
    if first == NONE:
        meta[OLDEST] = node
    else:
        nodes[first, NEWER] = node
    meta[NEWEST] = node
    if regions[0, COUNT] == 0:
        regions[0, LAST] = node
    regions[0, COUNT] += 1
    for region in range(len(regions) - 1):
        if regions[region, COUNT] <= regions[region, ROOM]:
            return
        last = regions[region, LAST]
        regions[region, LAST] = nodes[last, NEWER]
        regions[region, COUNT] -= 1
        nodes[last, REGION] = region + 1
        if regions[region + 1, COUNT] == 0:
            regions[region + 1, LAST] = last
        regions[region + 1, COUNT] += 1


@njit(nogil=True)
def replay_prompt(
    keys: Any, asked: int, held: int, table: Any, names: Any, nodes: Any, regions: Any, meta: Any, hits: Any
) -> None:
    """Count the leading blocks of ``keys[:asked]`` that caches of each size hold into ``hits``; hold ``keys[:held]``.

    A region holds the blocks that fit into a cache of its size and not into the one before. Blocks are touched from the
    last to the first, so that a block is never older than those behind it.
    """
    hits[:] = 0
    deepest = 0
    for number in range(asked):
        node = table[_find_slot(table, names, keys[number])]
        if node == NONE:
            break
        deepest = max(deepest, nodes[node, REGION])
        for size in range(deepest, len(hits)):
            hits[size] += 1
    for number in range(held - 1, -1, -1):
        slot = _find_slot(table, names, keys[number])
        node = table[slot]
        if node != NONE:
            _unlink(nodes, regions, meta, node)
        elif meta[HELD] < len(nodes):
            node = meta[HELD]
            meta[HELD] += 1
            names[node] = keys[number]
            table[slot] = node
        else:
            node = meta[OLDEST]
            _unlink(nodes, regions, meta, node)
            _clear_slot(table, names, _find_slot(table, names, names[node]))
            names[node] = keys[number]
            table[_find_slot(table, names, keys[number])] = node
        _put_first(nodes, regions, meta, node)
