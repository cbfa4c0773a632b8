"""Which reused tokens to compute again. A rule takes plain arrays and returns target positions, ascending."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from semblend.span import Span

Positions = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating]


def seams(spans: Sequence[Span], width: int) -> Positions:
    """The first ``width`` tokens of each span: they saw the most foreign context.

    A span that goes on exactly where the one before ended, in the same donor, has no seam.

    >>> seams([Span("d", 0, 10, 40)], width=3).tolist()
    [10, 11, 12]
    """
    heads: list[Positions] = []
    before: Span | None = None
    for span in spans:
        goes_on = (
            before is not None
            and (before.donor_id, before.generation) == (span.donor_id, span.generation)
            and before.target_end == span.target_start
            and before.donor_end == span.donor_start
        )
        if not goes_on:
            heads.append(np.arange(span.target_start, min(span.target_start + width, span.target_end)))
        before = span
    return np.concatenate(heads) if heads else np.empty(0, np.int64)


def highest(positions: Positions, scores: Scores, share: float) -> Positions:
    """The ``share`` of ``positions`` with the largest scores; ties go to the earlier token.

    >>> highest(np.array([4, 5, 6, 7]), np.array([.1, .9, .9, .2]), share=.5).tolist()
    [5, 6]
    """
    count = round(share * len(positions))
    order = np.lexsort((positions, -scores))[:count]
    chosen: Positions = np.sort(positions[order])
    return chosen


def reused_positions(spans: Sequence[Span]) -> Positions:
    """Every target position that a span covers."""
    ranges = [np.arange(span.target_start, span.target_end) for span in spans]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)
