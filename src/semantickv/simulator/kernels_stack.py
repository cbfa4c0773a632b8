"""LRU stack distances, compiled. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from semblend.fingerprint.kernels import njit


@njit(nogil=True)
def _add(tree: Any, place: int, amount: int) -> None:
    while place < len(tree):
        tree[place] += amount
        place += place & -place


@njit(nogil=True)
def _below(tree: Any, place: int) -> Any:
    total = 0
    while place > 0:
        total += tree[place]
        place -= place & -place
    return total


@njit(nogil=True)
def stack_distances(starts: Any, node: Any, sizes: Any) -> Any:
    """For every access, the space taken by its block and all used since; -1 at the first use.

    A binary indexed tree over moments holds the sizes of the blocks at their last use. Requests are looked up whole and
    then used from their last block to their first, as in the simulator.
    """
    tree = np.zeros(len(node) + 2, np.int64)
    last = np.zeros(len(sizes), np.int64)
    out = np.empty(len(node), np.int64)
    total = 0
    for r in range(len(starts) - 1):
        first, end = starts[r], starts[r + 1]
        for i in range(first, end):
            at = last[node[i]]
            out[i] = total - _below(tree, at - 1) if at > 0 else -1
        for i in range(end - 1, first - 1, -1):
            x = node[i]
            if last[x] > 0:
                _add(tree, last[x], -sizes[x])
            else:
                total += sizes[x]
            last[x] = first + end - i
            _add(tree, last[x], sizes[x])
    return out
