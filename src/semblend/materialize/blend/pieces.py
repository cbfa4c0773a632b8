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

LEAST_PIECE_ROWS = 128
"""On a GPU a piece is not smaller: the work of fewer rows would hide in what starting them costs."""

CPU_PIECE_ROWS = 16
"""On a CPU a piece is not smaller: 16 rows take it as long as 128 take a GPU, and longer."""

LONGER_BY = 0.25
"""The last rows of a pass may make its pieces so much longer than asked for."""


@dataclass(slots=True)
class Pace:
    """About how long a piece takes, in milliseconds; 0: all is done at once. An engine sets it as it has other work."""

    piece_ms: float = 0.0


class PieceRate:
    """How fast pieces are done, in rows through all layers a millisecond, by those done last.

    >>> rate = PieceRate()
    >>> rate.note(1024, ms=32.0)
    >>> rate.note(130, ms=10.0)  # what was left of a repair: few rows, and slow ones
    >>> rate.rows_per_ms, count_piece_rows(rate.rows_per_ms, ms=30.0, most=4096)
    (32.0, 896)
    """

    def __init__(self, least: int = LEAST_PIECE_ROWS) -> None:
        self.rows_per_ms, self._rows, self._least = 0.0, 0.0, least

    def note(self, rows: float, ms: float) -> None:
        """So many rows are done. Few of them, done slowly, say nothing about many."""
        rate = rows / max(ms, 1e-6)
        if rows < self._least or (rate < self.rows_per_ms and rows < self._rows / 2):
            return
        self.rows_per_ms = (self.rows_per_ms + rate) / 2 if self.rows_per_ms else rate
        self._rows = rows


def count_piece_rows(
    rows_per_ms: float, ms: float, most: int, left: int | None = None, *, least: int = LEAST_PIECE_ROWS
) -> int:
    """Rows of a piece that may take so long: a multiple of ``least``, and that at least.

    Where so many rows are ``left``, their pieces are equally long and may take up to a quarter longer, rather than
    leaving a few rows: a piece costs some milliseconds however small it is, and a step of the engine behind it.

    >>> count_piece_rows(0.0, ms=40.0, most=4096)
    128
    >>> count_piece_rows(29.0, ms=40.0, most=4096), count_piece_rows(29.0, ms=40.0, most=4096, left=2500)
    (1152, 1280)
    """
    fit = max(1, min(most, int(rows_per_ms * ms)) // least) * least
    if not rows_per_ms or not left:
        return fit
    pieces = max(1, int(left / fit + 1 - LONGER_BY))
    return max(least, min(most, -(-left // pieces // least) * least))


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
