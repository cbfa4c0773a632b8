"""Hashes of token blocks, as engines make them: on a grid by content, on a grid by prefix, and at any offset.

Hashes are 64 bits of a polynomial over mixed token ids, computed for a whole prompt at once. Two different blocks of a
store of a million share one with a chance of about one in forty million.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend.prompt import TokenArray

HashArray = npt.NDArray[np.uint64]
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(values: HashArray) -> HashArray:
    """Mix the bits of each value (the finalizer of SplitMix64)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _compute_powers(count: int) -> HashArray:
    powers = np.empty(count, dtype=np.uint64)
    value = 1
    for at in range(count):
        powers[at] = value
        value = value * _ODD & _MASK
    return powers


def _salt(tokens: TokenArray) -> HashArray:
    return _mix(tokens.astype(np.uint64) + np.uint64(_ODD))


def hash_content(tokens: TokenArray, block_size: int) -> HashArray:
    """Return one hash for each full block on the grid; the tokens in front of a block do not matter.

    >>> import numpy as np
    >>> a, b = hash_content(np.array([1, 2, 1, 2], dtype=np.int32), 2)
    >>> bool(a == b)
    True
    """
    blocks = len(tokens) // block_size
    grid = _salt(tokens[: blocks * block_size]).reshape(blocks, block_size)
    return _mix((grid * _compute_powers(block_size)).sum(axis=1, dtype=np.uint64))


def hash_prefixes(tokens: TokenArray, block_size: int) -> HashArray:
    """Return one hash for each full block on the grid together with all tokens before it, as vLLM chains them.

    >>> import numpy as np
    >>> a, b = hash_prefixes(np.array([1, 2, 1, 2], dtype=np.int32), 2)
    >>> bool(a == b)
    False
    """
    grid = hash_content(tokens, block_size)
    if not len(grid):
        return grid
    places = np.arange(1, len(grid) + 1, dtype=np.uint64)
    return _mix(np.cumsum(_mix(grid + places * np.uint64(_ODD)), dtype=np.uint64))


def hash_every_offset(tokens: TokenArray, block_size: int) -> HashArray:
    """Return the content hash of the block that starts at each position."""
    if len(tokens) < block_size:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(_salt(tokens), block_size)
    total = np.zeros(len(windows), dtype=np.uint64)
    for at, power in enumerate(
        _compute_powers(block_size)
    ):  # one column at a time, so that the windows are never copied
        total += windows[:, at] * power
    return _mix(total)


class HashSet:
    """A set of 64-bit hashes that is asked with whole arrays."""

    def __init__(self) -> None:
        self._parts: list[HashArray] = []
        self._sorted: HashArray = np.empty(0, dtype=np.uint64)

    def add(self, hashes: HashArray) -> None:
        self._parts.append(hashes)

    def contains(self, hashes: HashArray) -> npt.NDArray[np.bool_]:
        """Return for each hash whether it was added."""
        if self._parts:
            self._sorted = np.unique(np.concatenate([self._sorted, *self._parts]))
            self._parts = []
        if not len(self._sorted):
            return np.zeros(len(hashes), dtype=np.bool_)
        places = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        found: npt.NDArray[np.bool_] = self._sorted[places] == hashes
        return found
