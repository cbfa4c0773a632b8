"""Passages that commute, as a request marks them: parts of a message, or a list of their own.

Nothing moves without a mark, and nothing moves out of its message: what a system message says stays there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from semblend.arrange import Keep, PassageGroup
from semblend.wire.body import ClosedBody, Within
from semblend.wire.errors import ApiError

MOST_PASSAGES = 1024
LONGEST_GROUP = 64
LISTED = "passages"
"""The name of the group that ``semblend.passages`` makes."""

Score = Annotated[float, Within(0, 1e9)]
Places = Annotated[int, Within(0, MOST_PASSAGES)]


class PartMark(ClosedBody):
    """The mark of a part: it may change places with the other parts of its group in the same message."""

    commutes: Annotated[str, Field(min_length=1, max_length=LONGEST_GROUP)]
    score: Score | None = None


class KeepBody(ClosedBody):
    """How far passages may move; see `semblend.arrange.Keep`."""

    first: Places | None = None
    last: Places | None = None
    within: Places | None = None
    displaced: Annotated[float, Within(0, 1)] | None = None

    def to_keep(self) -> Keep:
        return Keep(self.first or 0, self.last or 0, self.within, self.displaced)


def find_groups(message: int, marks: Sequence[PartMark | None], keep: Keep) -> list[PassageGroup]:
    """The groups of one message, by the marks of its parts; `ApiError` 400 for marks that do not fit together."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, mark in enumerate(marks):
        if mark is not None:
            places[mark.commutes].append(place)
    return [
        PassageGroup(message, name, tuple(found), _collect_scores(message, name, [marks[at] for at in found], keep))
        for name, found in places.items()
    ]


def _collect_scores(message: int, name: str, marks: Iterable[PartMark | None], keep: Keep) -> tuple[float, ...] | None:
    scores = [None if mark is None else mark.score for mark in marks]
    known = tuple(score for score in scores if score is not None)
    if known and len(known) < len(scores):
        problem = f"has {len(known)} scores for {len(scores)} passages"
        raise _refuse(message, name, problem, "score all of them, or none")
    if keep.displaced is not None and not known:
        raise _refuse(message, name, "has no scores, which semblend.keep.displaced needs", "score its passages")
    return known or None


def _refuse(message: int, name: str, what: str, hint: str) -> ApiError:
    where = f"messages[{message}].content"
    return ApiError(400, f"group {name!r} of {where} {what}", hint=hint, param=where)
