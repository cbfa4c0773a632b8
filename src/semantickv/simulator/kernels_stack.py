"""LRU stack distances, compiled. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from semblend.fingerprint.kernels import njit


@njit(nogil=True)
def _add(tree: Any, place: int, amount: int) -> None:
    """Add an amount at one place of a binary indexed tree."""
    while place < len(tree):
        tree[place] += amount
        place += place & -place


@njit(nogil=True)
def _sum_below(tree: Any, place: int) -> Any:
    """Sum all amounts up to one place of a binary indexed tree."""
    total = 0
    while place > 0:
        total += tree[place]
        place -= place & -place
    return total


@njit(nogil=True)
def compute_stack_distances(starts: Any, node: Any, sizes: Any) -> Any:
    """Compute for every access the space of its block and all blocks used since; -1 at the first use.

    A binary indexed tree over access times holds the sizes of the blocks at their last use. As in the simulator, a
    request is looked up as a whole and then used from its last block to its first.
    """
    tree = np.zeros(len(node) + 2, np.int64)
    last = np.zeros(len(sizes), np.int64)
    out = np.empty(len(node), np.int64)
    total = 0
    for r in range(len(starts) - 1):
        first, end = starts[r], starts[r + 1]
        for i in range(first, end):
            at = last[node[i]]
            out[i] = total - _sum_below(tree, at - 1) if at > 0 else -1
        for i in range(end - 1, first - 1, -1):
            x = node[i]
            if last[x] > 0:
                _add(tree, last[x], -sizes[x])
            else:
                total += sizes[x]
            last[x] = first + end - i
            _add(tree, last[x], sizes[x])
    return out
