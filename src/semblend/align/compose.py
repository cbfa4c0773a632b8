"""Matches → cover: the pieces of overlapping matches that together save most prefill. The readable twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semblend.align.exact import MatchArray

SEAM = 1  # tokens that a further piece must add: of equal covers the one with fewer pieces wins
LOOK_BACK = 32  # overlapping matches considered as predecessor of a match


@dataclass(slots=True)
class _Cover:
    value: int
    begin: int
    previous: int


def drop_dominated(matches: MatchArray) -> MatchArray:
    """Return matches in target order without those inside another; of equal ones the first found stays.

    >>> drop_dominated(np.array([[0, 50, 1, 0], [10, 40, 2, 0], [40, 90, 3, 0]]))[:, :2].tolist()
    [[0, 50], [40, 90]]
    """
    if len(matches) < 2:
        return matches
    order = np.lexsort((-matches[:, 1], matches[:, 0]))
    ordered = matches[order]
    furthest = np.maximum.accumulate(ordered[:, 1])
    keep = np.ones(len(ordered), bool)
    keep[1:] = ordered[1:, 1] > furthest[:-1]
    return ordered[keep]


def choose_cover(matches: MatchArray, shortest: int, seam: int = SEAM) -> MatchArray:
    """Choose the pieces of a cover, in target order; see `semblend.align.kernels.choose_cover`."""
    best: list[_Cover] = []
    leader: list[int] = []
    for i, (start, end) in enumerate(matches[:, :2].tolist()):
        mine = _Cover(end - start - seam, start, -1)
        apart = int(np.searchsorted(matches[:i, 1], start, side="right"))
        if apart > 0:
            mine.previous = leader[apart - 1]
            mine.value += best[mine.previous].value
        for j in range(max(apart, i - LOOK_BACK), i):
            cut = min(int(matches[j, 1]), end - shortest)
            gained = best[j].value + end - int(matches[j, 1]) - seam
            if gained > mine.value and cut - best[j].begin >= shortest and cut >= start:
                mine = _Cover(gained, cut, j)
        best.append(mine)
        leader.append(i if i == 0 or mine.value > best[leader[i - 1]].value else leader[i - 1])
    pieces: list[tuple[int, int, int, int]] = []
    at = leader[-1] if leader else -1
    limit = int(matches[-1, 1]) if leader else 0
    while at >= 0:
        start, end, slot, donor_start = matches[at].tolist()
        begin = best[at].begin
        pieces.append((begin, min(end, limit), slot, donor_start + begin - start))
        limit, at = begin, best[at].previous
    return np.array(pieces[::-1], np.int64).reshape(-1, 4)
