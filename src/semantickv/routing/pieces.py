"""Where a text is cut, and the hash of each piece: the plain twin of `semantickv.routing.kernels`.

A gear hash rolls over the last 32 bytes; where its upper bits are 0 the text is cut. A piece's hash adds up its words
of eight bytes, each mixed with its place and a seed. It is fast and keyed, not cryptographic: who makes two pieces
collide has made a router take one for the other in his own namespace, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

CUT_SHIFT = 23
"""A cut where the upper 9 of 32 bits are 0: every 512 bytes on average, 128 tokens."""
LEAST_PIECE_BYTES = 32
MAX_PIECE_BYTES = 8192
"""Text that repeats itself is never rare: it is cut after so many bytes, or a table of zeros would be one piece."""
WORD_FACTOR = 0xBF58476D1CE4E5B9
LAST_FACTOR = 0x94D049BB133111EB
CHAIN_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Cuts = tuple[list[int], list[int], list[int]]
"""Where each piece ends, its hash, and the hash of everything up to its end."""


@cache
def make_gear() -> npt.NDArray[np.uint32]:
    """One number for each byte, the same on every machine."""
    digests = (hashlib.blake2b(bytes([byte]), digest_size=4, person=b"semantickv").digest() for byte in range(256))
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32)


def cut_plainly(data: bytes, ends: Sequence[int], seed: int) -> Cuts:
    """Cut ``data`` where its content says so and at ``ends`` (ascending, the last one its length)."""
    cuts = split_long(sorted({*_find_cuts(np.frombuffer(data, np.uint8)).tolist(), *ends}))
    hashes = [hash_piece(data[start:end], seed) for start, end in zip([0, *cuts[:-1]], cuts, strict=True)]
    chains, chain = [], 0
    for value in hashes:
        chain = ((chain ^ value) * CHAIN_FACTOR + 1) & _MASK
        chains.append(chain)
    return cuts, hashes, chains


def split_long(cuts: Sequence[int]) -> list[int]:
    """Cut pieces that are too long, each from its own beginning.

    >>> split_long([100, 100 + 2 * MAX_PIECE_BYTES + 1])
    [100, 8292, 16484, 16485]
    """
    found: list[int] = []
    start = 0
    for end in cuts:
        found += range(start + MAX_PIECE_BYTES, end, MAX_PIECE_BYTES)
        found.append(end)
        start = end
    return found


def hash_piece(piece: bytes, seed: int) -> int:
    """Hash the bytes of one piece: each word of eight is mixed with its place and the seed, and all are added up."""
    filled = piece + bytes(-len(piece) % 8)  # the length tells these zeros from real ones
    words = np.frombuffer(filled, "<u8").astype(np.uint64)
    places = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(CHAIN_FACTOR)
    mixed = ((words ^ np.uint64(seed)) + places) * np.uint64(WORD_FACTOR)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(LAST_FACTOR)
    value = int((mixed ^ (mixed >> np.uint64(29))).sum(dtype=np.uint64)) ^ seed ^ len(piece)
    value = (value * WORD_FACTOR) & _MASK
    return value ^ value >> 32


def _find_cuts(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Positions behind which to cut, ascending: those where the rolling hash of the last 32 bytes is rare.

    The sum over 32 bytes is built by doubling: two bytes, four, eight, sixteen, thirty-two.
    """
    rolling = make_gear().take(data)
    shifted = np.empty_like(rolling)
    for width in (1, 2, 4, 8, 16):
        np.left_shift(rolling[:-width], np.uint32(width), out=shifted[width:])
        rolling[width:] += shifted[width:]
    cuts = np.flatnonzero(rolling < np.uint32(1 << CUT_SHIFT)) + 1
    far = np.ones(len(cuts), bool)
    np.greater_equal(cuts[1:] - cuts[:-1], LEAST_PIECE_BYTES, out=far[1:])  # a run of one letter would cut everywhere
    return cuts[far]
