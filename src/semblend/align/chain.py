"""Matches across small edits: the short runs between two changes, which no seed guarantees.

From the end of a piece we look a few tokens ahead in prompt and donor for the place where they agree again, as a
genome aligner does between its anchors. Only runs beside a found piece of the same donor are taken, so there is
never a short run alone. With ``min_span_tokens`` at or above the seed guarantee nothing here runs.
"""

from __future__ import annotations

from typing import NamedTuple

from semblend.align.exact import count_equal
from semblend.prompt import TokenArray

MAX_EDIT = 12  # tokens replaced, inserted or deleted between two runs


class ChainPiece(NamedTuple):
    """Target tokens [start, end) equal the donor's from ``donor_start``."""

    start: int
    end: int
    slot: int
    donor_start: int

    @property
    def donor_end(self) -> int:
        return self.donor_start + self.end - self.start


def resync(target: TokenArray, donor: TokenArray, shortest: int) -> tuple[int, int, int] | None:
    """Find the nearest (skipped in target, skipped in donor, run) after which at least ``shortest`` tokens agree.

    >>> import numpy as np
    >>> a = np.array([9, 1, 2, 3, 4], np.int32); b = np.array([7, 8, 1, 2, 3, 4], np.int32)
    >>> resync(a, b, 3)
    (1, 2, 4)
    """
    for skipped in range(1, 2 * MAX_EDIT + 1):
        for in_target in range(max(0, skipped - MAX_EDIT), min(skipped, MAX_EDIT) + 1):
            in_donor = skipped - in_target
            if in_target + shortest > len(target) or in_donor + shortest > len(donor):
                continue
            if target[in_target] != donor[in_donor]:
                continue
            run = count_equal(target[in_target:], donor[in_donor:])
            if run >= shortest:
                return in_target, in_donor, run
    return None


def _extend_right(
    tokens: TokenArray, donor: TokenArray, piece: ChainPiece, limit: int, shortest: int
) -> list[ChainPiece]:
    """Find the short runs to the right of a piece, up to ``limit``."""
    found: list[ChainPiece] = []
    while (step := resync(tokens[piece.end : limit], donor[piece.donor_end :], shortest)) is not None:
        skipped, skipped_donor, run = step
        start = piece.end + skipped
        piece = ChainPiece(start, start + run, piece.slot, piece.donor_end + skipped_donor)
        found.append(piece)
    return found


def _extend_left(
    tokens: TokenArray, donor: TokenArray, piece: ChainPiece, floor: int, shortest: int
) -> list[ChainPiece]:
    """Find the short runs to the left of a piece, down to ``floor``: the same walk on reversed tokens."""
    size, donor_size = len(tokens), len(donor)
    mirrored = ChainPiece(size - piece.end, size - piece.start, piece.slot, donor_size - piece.donor_end)
    found = _extend_right(tokens[::-1], donor[::-1], mirrored, size - floor, shortest)
    return [
        ChainPiece(size - run.end, size - run.start, run.slot, donor_size - run.donor_end) for run in reversed(found)
    ]


def chain_pieces(
    tokens: TokenArray, pieces: list[ChainPiece], donors: dict[int, TokenArray], shortest: int, floor: int
) -> list[ChainPiece]:
    """Return the pieces with the short runs between and beside them, in target order."""
    chained: list[ChainPiece] = []
    end = floor
    for i, piece in enumerate(pieces):
        donor = donors[piece.slot]
        chained += _extend_left(tokens, donor, piece, end, shortest)
        limit = pieces[i + 1].start if i + 1 < len(pieces) else len(tokens)
        onward = _extend_right(tokens, donor, piece, limit, shortest)
        chained += [piece, *onward]
        end = chained[-1].end
    return chained
