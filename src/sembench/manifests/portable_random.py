"""Random choices that stay the same on every machine and in every version of Python.

The standard library promises that for ``random()`` alone, not for ``choice`` or ``shuffle``; a manifest whose
checksum is pinned needs more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class PortableRandom:
    """The random generator SplitMix64, seeded by words.

    >>> rng = PortableRandom("fixture", 3)
    >>> [rng.draw_below(100) for _ in range(4)]
    [90, 20, 79, 88]
    """

    def __init__(self, *seed: object) -> None:
        packed = "\x1f".join(str(part) for part in seed).encode("utf-8")
        self._state = int.from_bytes(hashlib.sha256(packed).digest()[:8], "big")

    def draw_bits(self) -> int:
        """Return 64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def draw_below(self, limit: int) -> int:
        """Return a whole number in [0, limit), evenly distributed."""
        return (self.draw_bits() * limit) >> 64

    def choose(self, items: Sequence[T]) -> T:
        return items[self.draw_below(len(items))]
