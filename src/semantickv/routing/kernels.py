"""The compiled twin of `semantickv.routing.pieces`. Importing this module imports numba."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semantickv.routing.pieces import (
    CHAIN_FACTOR,
    CUT_SHIFT,
    LAST_FACTOR,
    LEAST_PIECE_BYTES,
    MAX_PIECE_BYTES,
    WORD_FACTOR,
    Cuts,
    make_gear,
    split_long,
)
from semblend.fingerprint.kernels import COMPILED as COMPILED
from semblend.fingerprint.kernels import njit

_RARE = np.uint32(1 << CUT_SHIFT)
_WORD, _LAST, _CHAIN = np.uint64(WORD_FACTOR), np.uint64(LAST_FACTOR), np.uint64(CHAIN_FACTOR)
_S29, _S32, _ONE, _SEVEN, _EIGHT = np.uint64(29), np.uint64(32), np.uint64(1), np.uint64(7), np.uint64(8)


@njit(nogil=True)
def _find_cuts(data, ends, gear, cuts):
    """Write where pieces end, and return how many there are. ``ends`` is ascending, the last one is the length."""
    rolling = np.uint32(0)
    count = part = 0
    last_rare = -LEAST_PIECE_BYTES
    for at in range(len(data)):
        rolling = np.uint32((rolling << _ONE) + gear[data[at]])  # numba computes in 64 bits
        if rolling < _RARE:
            here = at + 1
            while ends[part] < here:
                cuts[count] = ends[part]
                count += 1
                part += 1
            if here - last_rare >= LEAST_PIECE_BYTES and here != ends[part]:
                cuts[count] = here
                count += 1
            last_rare = here
    for end in ends[part:]:
        cuts[count] = end
        count += 1
    return count


@njit(nogil=True)
def _hash_pieces(data, cuts, seed, words, hashes, chains):
    """Hash each piece and everything up to its end. A piece is copied to ``words``: there its words are aligned.

    The indexes are unsigned, or numba would ask for each whether it is negative: then nothing is vectorized, and this
    takes 58 µs instead of 10.
    """
    as_bytes = words.view(np.uint8)
    chain = np.uint64(0)
    start = 0
    for number in range(len(cuts)):
        piece = data[start : cuts[number]]
        start = cuts[number]
        length = np.uint64(len(piece))
        full = (length + _SEVEN) // _EIGHT
        for at in range(length):
            as_bytes[at] = piece[at]
        for at in range(length, _EIGHT * full):
            as_bytes[at] = 0
        total = place = np.uint64(0)
        for at in range(full):
            place += _CHAIN
            mixed = ((words[at] ^ seed) + place) * _WORD
            mixed = (mixed ^ (mixed >> _S32)) * _LAST
            total += mixed ^ (mixed >> _S29)
        total = (total ^ seed ^ length) * _WORD
        total ^= total >> _S32
        chain = (chain ^ total) * _CHAIN + _ONE
        hashes[number], chains[number] = total, chain


def cut_compiled(data: bytes, ends: Sequence[int], seed: int) -> Cuts:
    """Do what `pieces.cut_plainly` does."""
    array, words = np.frombuffer(data, np.uint8), np.empty(len(data) // 8 + 1, np.uint64)
    cuts = np.empty(len(data) // LEAST_PIECE_BYTES + len(ends) + 1, np.int64)
    cuts = cuts[: _find_cuts(array, np.asarray(ends, np.int64), make_gear(), cuts)]
    if max(cuts[0], (cuts[1:] - cuts[:-1]).max(initial=0)) > MAX_PIECE_BYTES:
        cuts = np.array(split_long(cuts.tolist()), np.int64)
    hashes, chains = np.empty(len(cuts), np.uint64), np.empty(len(cuts), np.uint64)
    _hash_pieces(array, cuts, np.uint64(seed), words, hashes, chains)
    return cuts.tolist(), hashes.tolist(), chains.tolist()
