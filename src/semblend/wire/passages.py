"""Passages that commute, as a request marks them: parts of a message, or a list of their own.

Nothing moves without a mark, and nothing moves out of its message: what a system message says stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field

from semblend.arrange import OrderLimits, PassageGroup
from semblend.arrange.marks import LARGEST_SCORE, LONGEST_GROUP, MOST_MARKED, PassageMark, find_groups
from semblend.errors import InputError
from semblend.wire.body import ClosedBody, Within
from semblend.wire.errors import ApiError

Score = Annotated[float, Within(0, LARGEST_SCORE)]
Places = Annotated[int, Within(0, MOST_MARKED)]


class PartMark(ClosedBody):
    """The mark of a part: it may change places with the other parts of its group in the same message."""

    commutes: Annotated[str, Field(min_length=1, max_length=LONGEST_GROUP)]
    score: Score | None = None

    def to_mark(self) -> PassageMark:
        return PassageMark(self.commutes, self.score)


class KeepBody(ClosedBody):
    """How far passages may move; see `semblend.arrange.OrderLimits`."""

    first: Places | None = None
    last: Places | None = None
    within: Places | None = None
    displaced: Annotated[float, Within(0, 1)] | None = None

    def to_keep(self) -> OrderLimits:
        return OrderLimits(self.first or 0, self.last or 0, self.within, self.displaced)


def find_marked_groups(message: int, marks: Sequence[PartMark | None], keep: OrderLimits) -> list[PassageGroup]:
    """The groups of one message, by the marks of its parts; `ApiError` 400 for marks that do not fit together."""
    with refused_as(f"messages[{message}].content"):
        return find_groups(message, [None if mark is None else mark.to_mark() for mark in marks], keep)


@contextmanager
def refused_as(param: str) -> Iterator[None]:
    """A mistake in marks, as an `ApiError` 400 that names the field."""
    try:
        yield
    except InputError as error:
        raise ApiError(400, error.message, hint=error.hint or "", param=param) from None
