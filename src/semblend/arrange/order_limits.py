"""How far passages may move: what the caller allows, and whether an order can still be completed within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semblend.errors import InputError


@dataclass(frozen=True, slots=True)
class OrderLimits:
    """What stays where the caller put it.

    ``first`` and ``last``: so many passages at the beginning and at the end keep their places. ``within``: no passage
    moves by more places than that; None for as far as you like. ``displaced``: with scores, the share of all relevance
    that may be moved back, as `measure_displaced` counts it; None for any.
    """

    first: int = 0
    last: int = 0
    within: int | None = None
    displaced: float | None = None

    def __post_init__(self) -> None:
        for name in ("first", "last", "within"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise InputError(f"keep {name}={value!r} is not a number of places", hint="0 or more")
        if self.displaced is not None and not 0 <= self.displaced <= 1:
            raise InputError(f"keep displaced={self.displaced!r} is no share", hint="from 0 to 1")


FREE = OrderLimits()


def measure_displaced(order: Sequence[int], scores: Sequence[float]) -> float:
    """The relevance that stands further back than before: 0 where nothing does, 1 where it is as far as could be.

    >>> measure_displaced([0, 1, 2], [5, 1, 1]), measure_displaced([1, 2, 0], [5, 0, 0])
    (0.0, 1.0)
    """
    most = sum(scores) * (len(order) - 1)
    if most <= 0:
        return 0.0
    return sum(scores[index] * max(0, place - index) for place, index in enumerate(order)) / most


class PlacementCheck:
    """Which passage may take which place of ``count``, if none moves further than ``within`` and some are fixed.

    Places are taken from the front. A passage that is left can still reach a place as long as no more than ``within``
    passages from behind it stand in front of it, and the first of those left is always the one with the most.
    """

    def __init__(self, count: int, keep: OrderLimits, within: int | None) -> None:
        self.count = count
        self.first = min(keep.first, count)
        self.last = min(keep.last, count - self.first)
        self._within = count if within is None else within
        self.is_free = self._within >= count and not self.first and not self.last

    def may_move(self, index: int, place: int) -> bool:
        """Whether a passage that is not fixed reaches a place that stands in front of it."""
        return index - place <= self._within

    def is_due(self, lowest: int, place: int) -> bool:
        """Whether the first of the passages left must take the place now."""
        return place - lowest >= self._within

    def may_take(self, index: int, place: int, lowest: int) -> bool:
        """Whether a passage may stand at ``place``; ``lowest`` is the first of the movable ones that are left."""
        if place < self.first or place >= self.count - self.last:
            return index == place
        if index < self.first or index >= self.count - self.last:
            return False
        return self.may_move(index, place) and (index == lowest or not self.is_due(lowest, place))
