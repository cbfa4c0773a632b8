"""Hashes of k-grams, and the choice of those that represent a prompt.

A prompt is sampled by *minimizers*: of every ``window`` consecutive k-grams the one with the smallest
hash is kept. The choice depends on the tokens alone, so two prompts that share a run of
``k + window - 1`` tokens keep the same k-gram in it, at whatever position. That is the guarantee:
every shared run of that length has a common seed. About 2 in ``window + 1`` positions are kept.

This module is the plain numpy twin; `semblend.fingerprint.kernels` is the compiled one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semblend.prompt import TokenArray

HashArray = npt.NDArray[np.uint64]
PositionArray = npt.NDArray[np.int64]

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class HashScheme:
    """Which k-grams are hashed and how. Donor and query must use the same scheme.

    ``base`` is the multiplier of the rolling hash. An even base makes equal hashes of different k-grams
    easy to force, which is how the tests check that a collision is caught.

    >>> HashScheme().guaranteed_tokens
    32
    """

    k: int = 16
    window: int = 17
    base: int = 0x9E3779B97F4A7C15

    @property
    def guaranteed_tokens(self) -> int:
        """Every shared run of this many tokens has a common seed."""
        return self.k + self.window - 1


DEFAULT_SCHEME = HashScheme()


def mix64(values: HashArray) -> HashArray:
    """Mix 64-bit numbers without loss, so that each output bit depends on all input bits (splitmix64's last step)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_kgrams(tokens: TokenArray, scheme: HashScheme) -> HashArray:
    """Compute the mixed rolling hash of every k-gram, in order; empty if the prompt is shorter than k."""
    count = len(tokens) - scheme.k + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    symbols = mix64(tokens.astype(np.uint64) + np.uint64(1))
    hashes = np.zeros(count, np.uint64)
    for j in range(scheme.k):
        weight = pow(scheme.base, scheme.k - 1 - j, 1 << 64) & _MASK64
        hashes += symbols[j : j + count] * np.uint64(weight)
    return mix64(hashes)


def select_minimizers(tokens: TokenArray, scheme: HashScheme = DEFAULT_SCHEME) -> tuple[PositionArray, HashArray]:
    """Select the k-grams that represent ``tokens``; return their positions (ascending) and hashes.

    Of equal smallest hashes in a window the rightmost counts. A prompt with fewer k-grams than a
    window keeps its smallest one.
    """
    hashes = hash_kgrams(tokens, scheme)
    if len(hashes) == 0:
        return np.empty(0, np.int64), hashes
    width = min(scheme.window, len(hashes))
    windows = np.lib.stride_tricks.sliding_window_view(hashes, width)
    rightmost = width - 1 - np.argmin(windows[:, ::-1], axis=1)
    positions = np.unique(np.arange(len(windows)) + rightmost)
    return positions, hashes[positions]
