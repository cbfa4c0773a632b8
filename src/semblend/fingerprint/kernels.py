"""The compiled twin of `semblend.fingerprint.hashes`, and `njit`, which compiles every kernel. Importing imports numba.

Where numba is absent, or does not work with the numpy that is there, the same functions run as plain Python: a
lookup of 8,000 tokens then takes 30 ms instead of one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from semblend.fingerprint import hashes
from semblend.fingerprint.hashes import HashArray, HashScheme, PositionArray
from semblend.prompt import TokenArray

try:
    import numba
except ImportError as error:
    numba = None
    logging.getLogger("semblend").warning("numba cannot be loaded, plain Python does its work: %s", error)

COMPILED = numba is not None
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)


def njit(**options: Any) -> Callable[[Any], Any]:
    """Return `numba.njit` with its on-disk cache, or without one if no cache folder can be written.

    A read-only container has no such folder: each start compiles again there, which is better than not starting.
    """

    def compile_function(function: Any) -> Any:
        if numba is None:
            # Hashes wrap around, which numpy warns of. What is inlined is called by others that say so.
            return function if "inline" in options else np.errstate(over="ignore")(function)
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # numba's word for "no folder to cache in"
            return numba.njit(**options)(function)

    return compile_function


@njit(inline="always")
def mix64(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@njit(nogil=True)
def _hash_kgrams(tokens, k, base, symbols, out):
    """Compute the rolling hash of every k-gram into ``out``: shift by the base, add the newest symbol, drop the oldest.

    Mixing has loops of its own so that the compiler can vectorize it: half the time at 8k tokens.
    """
    top = _ONE
    for _ in range(k):
        top = top * base
    for i in range(len(tokens)):
        symbols[i] = mix64(np.uint64(tokens[i]) + _ONE)
    rolling = np.uint64(0)
    for i in range(k):
        rolling = rolling * base + symbols[i]
    out[0] = rolling
    for i in range(k, len(tokens)):
        rolling = rolling * base + (symbols[i] - top * symbols[i - k])
        out[i - k + 1] = rolling
    for i in range(len(out)):
        out[i] = mix64(out[i])


@njit(nogil=True)
def _select_smallest(hashes, window, positions, selected):
    """Slide a window over the hashes; record its rightmost minimum each time it changes; return how many."""
    width = min(window, len(hashes))
    count = 0
    at = -1
    smallest = np.uint64(0)
    for i in range(len(hashes)):
        if at <= i - width:
            at = max(i - width + 1, 0)
            smallest = hashes[at]
            for j in range(at + 1, i + 1):
                if hashes[j] <= smallest:
                    at, smallest = j, hashes[j]
        elif hashes[i] <= smallest:
            at, smallest = i, hashes[i]
        if i >= width - 1 and (count == 0 or positions[count - 1] != at):
            positions[count] = at
            selected[count] = smallest
            count += 1
    return count


def select_minimizers(tokens: TokenArray, scheme: HashScheme) -> tuple[PositionArray, HashArray]:
    """Select minimizers; same signature and result as `semblend.fingerprint.hashes.select_minimizers`."""
    if not COMPILED:
        return hashes.select_minimizers(tokens, scheme)
    kgrams = len(tokens) - scheme.k + 1
    if kgrams <= 0:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    symbols = np.empty(len(tokens), np.uint64)
    mixed = np.empty(kgrams, np.uint64)
    positions = np.empty(kgrams, np.int64)
    selected = np.empty(kgrams, np.uint64)
    _hash_kgrams(tokens, scheme.k, np.uint64(scheme.base & 0xFFFFFFFFFFFFFFFF), symbols, mixed)
    count = _select_smallest(mixed, scheme.window, positions, selected)
    return positions[:count], selected[:count]
