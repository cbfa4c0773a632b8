"""Marks of passages that commute, as requests carry them: read once, for the server, the client and the estimate.

A part of a message is marked by ``"semblend": {"commutes": "a group's name", "score": 0.5}``. A request has its own
``"semblend": {"passages": [...], "scores": [...], "keep": {...}, "reuse": false}``; its passages stand in front of the
last user message. `semblend.wire` checks the same fields for a server, with an error for each field; a test holds both
to one meaning. A mark that cannot be read is refused: a misspelt wish must not be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from semblend.arrange.order_limits import FREE, OrderLimits
from semblend.errors import InputError

MARK: Final = "semblend"
LISTED: Final = "passages"
"""The name of the group that a request's list of passages makes."""
MAX_MARKED: Final = 1024
"""Passages that a request may list, and that one group may hold."""
LONGEST_GROUP: Final = 64
LARGEST_SCORE: Final = 1e9
_REQUEST_FIELDS = ("quality", "reuse", "keep", "passages", "scores")
_HINT = 'such as {"semblend": {"commutes": "docs"}} on a text'


@dataclass(frozen=True, slots=True)
class PassageMark:
    """A part may change places with the other parts of ``group`` in its message; ``score`` is its relevance."""

    group: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class PassageGroup:
    """Parts of message ``message`` at ``places`` that commute; ``scores`` is their relevance, where it is known."""

    message: int
    name: str
    places: tuple[int, ...]
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestMarks:
    """What a request says about its passages. ``listed`` are marks for its own list, one for each of ``passages``."""

    passages: tuple[str, ...] = ()
    listed: tuple[PassageMark, ...] = ()
    keep: OrderLimits = FREE
    reuse: bool = True


NO_MARKS: Final = RequestMarks()


def read_mark(value: object) -> PassageMark | None:
    """The mark of a part; None where it has none."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) - {"commutes", "score"}:
        raise InputError("a mark cannot be read", hint=_HINT)
    name, score = value.get("commutes"), value.get("score")
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_GROUP:
        raise InputError(f"a mark names no group of 1 to {LONGEST_GROUP} characters", hint=_HINT)
    return PassageMark(name, None if score is None else _read_number(score, "score", LARGEST_SCORE))


def read_request(value: object) -> RequestMarks:
    """What stands under ``semblend`` in a request, but for its quality."""
    if value is None:
        return NO_MARKS
    if not isinstance(value, Mapping) or set(value) - set(_REQUEST_FIELDS):
        raise InputError("semblend cannot be read", hint="known are " + ", ".join(_REQUEST_FIELDS))
    reuse = value.get("reuse")
    if reuse is not None and not isinstance(reuse, bool):
        raise InputError("semblend.reuse is neither true nor false", hint="leave it out for true")
    passages, scores = value.get("passages"), value.get("scores")
    if passages is not None:
        if not isinstance(passages, list) or not all(isinstance(one, str) for one in passages):
            raise InputError("semblend.passages is no list of texts", hint='"passages": ["...", "..."]')
        if len(passages) > MAX_MARKED:
            raise InputError(f"semblend.passages has {len(passages)} entries", hint=f"{MAX_MARKED} at most")
    if scores is not None:
        if not isinstance(scores, list):
            raise InputError("semblend.scores is no list of numbers", hint="one number for each passage")
        scores = [_read_number(score, "semblend.scores", LARGEST_SCORE) for score in scores]
    keep = read_keep(value.get("keep"))
    return RequestMarks(tuple(passages or ()), mark_listed(passages, scores), keep, reuse is not False)


def read_keep(value: object) -> OrderLimits:
    """How far passages may move, as a request says it."""
    if value is None:
        return FREE
    known = ("first", "last", "within", "displaced")
    if not isinstance(value, Mapping) or set(value) - set(known):
        raise InputError("semblend.keep cannot be read", hint="known are " + ", ".join(known))
    for name in known[:3]:
        places = value.get(name)
        if places is not None and (type(places) is not int or not 0 <= places <= MAX_MARKED):
            raise InputError(f"semblend.keep.{name} is not a number of places", hint=f"from 0 to {MAX_MARKED}")
    displaced = value.get("displaced")
    if displaced is not None:
        displaced = _read_number(displaced, "semblend.keep.displaced", 1)
    return OrderLimits(value.get("first") or 0, value.get("last") or 0, value.get("within"), displaced)


def mark_listed(passages: Sequence[str] | None, scores: Sequence[float] | None) -> tuple[PassageMark, ...]:
    """Marks for the passages that a request lists."""
    if passages is None:
        if scores is not None:
            raise InputError("semblend.scores has no passages", hint="send semblend.passages, or score the marks")
        return ()
    if scores is not None and len(scores) != len(passages):
        problem = f"semblend.scores has {len(scores)} entries for {len(passages)} passages"
        raise InputError(problem, hint="one number for each")
    return tuple(PassageMark(LISTED, None if scores is None else scores[at]) for at in range(len(passages)))


def find_listed_place(roles: Sequence[object]) -> int:
    """The message in front of whose text listed passages stand: the last of a user."""
    place = next((at for at in reversed(range(len(roles))) if roles[at] == "user"), None)
    if place is None:
        hint = "they stand in front of the last user message: send one"
        raise InputError("semblend.passages has no place here", hint=hint)
    return place


def find_groups(message: int, marks: Sequence[PassageMark | None], keep: OrderLimits = FREE) -> list[PassageGroup]:
    """The groups of one message, by the marks of its parts, in the order in which they begin."""
    places: dict[str, list[int]] = {}
    for place, mark in enumerate(marks):
        if mark is not None:
            places.setdefault(mark.group, []).append(place)
    return [
        PassageGroup(message, name, tuple(found), _collect_scores(message, name, [marks[at] for at in found], keep))
        for name, found in places.items()
    ]


def _collect_scores(
    message: int, name: str, marks: Sequence[PassageMark | None], keep: OrderLimits
) -> tuple[float, ...] | None:
    known = tuple(mark.score for mark in marks if mark is not None and mark.score is not None)
    where = f"group {name!r} of messages[{message}].content"
    if known and len(known) < len(marks):
        problem = f"{where} has {len(known)} scores for {len(marks)} passages"
        raise InputError(problem, hint="score all of them, or none")
    if keep.displaced is not None and not known:
        raise InputError(f"{where} has no scores, which semblend.keep.displaced needs", hint="score its passages")
    return known or None


def _read_number(value: object, name: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{name} is no number", hint=f"from 0 to {most:g}")
    if not 0 <= value <= most:
        raise InputError(f"{name} is {value:g}, outside [0, {most:g}]", hint=f"from 0 to {most:g}")
    return value
