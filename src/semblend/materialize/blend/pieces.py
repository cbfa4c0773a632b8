"""Work in pieces: a generator that stops where it may be put aside, and whose result is what it returns.

An engine with other work to do goes on with it in a later step, or closes it and the donors it held are released.
Everybody else calls `finish`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")
Pieces = Generator[None, None, Result]


@dataclass(slots=True)
class Pace:
    """About how long a piece takes, in milliseconds; 0: all is done at once. An engine sets it as it has other work."""

    piece_ms: float = 0.0


def finish(pieces: Pieces[Result]) -> Result:
    """Do all of it now.

    >>> def add(numbers):
    ...     total = 0
    ...     for number in numbers:
    ...         total += number
    ...         yield
    ...     return total
    >>> finish(add([1, 2, 3]))
    6
    """
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            result: Result = done.value
            return result
