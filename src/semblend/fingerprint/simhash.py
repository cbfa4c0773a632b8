"""Sketches of a prompt's token 3-grams, to find prompts that are nearly the same with small edits everywhere.

`simhash` is 64 bits in which similar sets differ little (Charikar's construction): each 3-gram is hashed to 64 bits,
and every bit position takes the majority vote. The share of differing bits estimates the angle between two sets. It is
a pre-filter: 8 bytes for each donor, thousands of donors compared in one vector operation, but noisy (unrelated prompts
differ in 32 bits on average, give or take 4).

The `smallest` hashes (bottom-k min-hash) decide about those that pass the filter: of the k smallest hashes of the union
of two sets, the share held by both estimates their Jaccard overlap, with a standard error of about 1 / (2 sqrt(k)).

Only integer arithmetic of fixed width is used, so sketches are equal on every platform and numpy version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semblend.fingerprint.hashes import HashArray, mix64
from semblend.prompt import TokenArray

GRAM_TOKENS = 3
SMALLEST = 64
_POSITION_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)  # odd, so no token is lost
_BITS_OF_BYTE = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """What is kept of a prompt: simhash, k smallest 3-gram hashes (ascending), number of distinct 3-grams."""

    simhash: int
    smallest: HashArray
    grams: int


def make_sketch(token_ids: TokenArray) -> Sketch:
    """Make the sketch of one prompt. Repetition does not count: a paragraph said twice weighs as one."""
    grams = np.unique(hash_grams(token_ids))
    return Sketch(_take_majority(grams), grams[:SMALLEST].copy(), len(grams))


def hash_grams(token_ids: TokenArray, size: int = GRAM_TOKENS) -> HashArray:
    """Compute one 64-bit hash for each run of ``size`` tokens, in order; a shorter prompt is one gram.

    >>> [hex(h) for h in hash_grams(np.array([1, 2, 3], dtype=np.int32)).tolist()]
    ['0x10024f1cc0d450f8']
    """
    tokens = token_ids.astype(np.uint64) + np.uint64(1)  # so that token 0 counts
    size = min(size, len(tokens))
    count = len(tokens) - size + 1
    mixed = np.zeros(count, dtype=np.uint64)
    for offset in range(size):
        mixed += tokens[offset : offset + count] * np.uint64(_POSITION_FACTORS[offset])
    return mix64(mixed)


def count_differing_bits(one: int, many: HashArray) -> npt.NDArray[np.uint8]:
    """Count in how many bits each of ``many`` differs from ``one``.

    >>> count_differing_bits(0b1011, np.array([0b1011, 0b0000, 2**64 - 1], dtype=np.uint64)).tolist()
    [0, 3, 61]
    """
    return _count_bits(many ^ np.uint64(one))


def estimate_overlap(a: Sketch, b: Sketch) -> float:
    """Estimate the share of common 3-grams, 2|A∩B| / (|A|+|B|), in [0, 1]; exact for up to 64 grams.

    This form (Dice) equals the cosine of two sets of the same size, so it compares with an embedder's figures.
    """
    union = np.union1d(a.smallest, b.smallest)
    if max(a.grams, b.grams) > SMALLEST:  # a sketch knows only its smallest hashes: beyond them "absent" means nothing
        union = union[:SMALLEST]
    both = np.intersect1d(a.smallest, b.smallest, assume_unique=True)
    jaccard = float(np.isin(union, both, assume_unique=True).mean())
    return 2.0 * jaccard / (1.0 + jaccard)


def _take_majority(hashes: HashArray) -> int:
    """Set each bit that more than half of the hashes have; counts each byte's 256 values, then their bits."""
    columns = hashes.astype("<u8").view(np.uint8).reshape(-1, 8)  # little-endian, whatever the machine is
    value = 0
    for byte in range(8):
        ones = np.bincount(columns[:, byte], minlength=256) @ _BITS_OF_BYTE
        for bit in np.flatnonzero(2 * ones > len(hashes)).tolist():
            value |= 1 << (8 * byte + bit)
    return value


def _count_bits_by_halves(values: HashArray) -> npt.NDArray[np.uint8]:
    """Count the bits of each value by adding neighbours: pairs, then fours, then bytes (for numpy 1.26)."""
    values = values - ((values >> np.uint64(1)) & np.uint64(0x5555555555555555))
    pairs = np.uint64(0x3333333333333333)
    values = (values & pairs) + ((values >> np.uint64(2)) & pairs)
    values = (values + (values >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return ((values * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(np.uint8)


def _count_bits(values: HashArray) -> npt.NDArray[np.uint8]:
    """Count the bits of each value."""
    if hasattr(np, "bitwise_count"):  # numpy >= 2
        counts: npt.NDArray[np.uint8] = np.bitwise_count(values)
        return counts
    return _count_bits_by_halves(values)
