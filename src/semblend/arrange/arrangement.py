"""An order of passages, and what it is expected to save."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.arrange.memory import Sent


@dataclass(frozen=True, slots=True)
class Expected:
    """Sizes of passages, in the arranger's unit: in an exact prefix, in an earlier prompt at any place, in none."""

    exact: int
    elsewhere: int
    unseen: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """``order[i]`` is the index of the passage at place i.

    ``repeats`` are pairs ``(index, earlier index)`` of passages that are there twice. ``keys`` and ``root`` are what
    `Arranger.record` remembers: the passages in their new order, and what stands before them in which namespace.
    """

    order: tuple[int, ...]
    repeats: tuple[tuple[int, int], ...]
    expected: Expected
    owner: bytes
    scope: bytes
    root: bytes
    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]

    def to_sent(self) -> Sent:
        """What is remembered of a prompt in this order."""
        return Sent(self.owner, self.scope, self.root, self.keys, self.sizes)

    def find_place(self, index: int) -> int:
        """Where a passage of the caller stands now: for citations."""
        return self.order.index(index)
