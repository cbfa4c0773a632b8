"""What charts share: a figure with its numbers, a frame with a row for each name, a frame with two axes, curves.

Each figure is drawn twice, for a wide page and for a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semblend.web.svg import Drawing, Scale

WIDE, NARROW = 900.0, 360.0
Draw = Callable[[float], Drawing]
Legend = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart of a page: two drawings, a legend of (class, words), a caption, and perhaps its numbers as a table."""

    name: str
    title: str
    drawings: tuple[str, str]
    legend: Legend
    caption: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def draw_both(draw: Draw, label: str) -> tuple[str, str]:
    """Draw for a wide and for a narrow page; ``label`` says to a screen reader what is drawn."""
    return draw(WIDE).render(label), draw(NARROW).render(label)


def is_narrow(width: float) -> bool:
    return width < 500


@dataclass(frozen=True, slots=True)
class RowFrame:
    """A frame with one row for each name; the names stand beside the rows, or above them on a narrow page."""

    names: Sequence[str]
    width: float
    row: float
    axis: float = 34.0
    top: float = 8.0
    right: float = 64.0
    beside: float = 190.0

    @property
    def narrow(self) -> bool:
        return is_narrow(self.width)

    @property
    def left(self) -> float:
        return 4.0 if self.narrow else self.beside

    @property
    def pitch(self) -> float:
        return self.row + (18.0 if self.narrow else 0.0)

    def begin(
        self, low: float, high: float, show: Callable[[float], str], words: str, *, log: bool = False
    ) -> tuple[Drawing, Scale]:
        """Return a drawing with the names of the rows and the x axis, and the scale of values to pixels."""
        drawing = Drawing(self.width, self.top + self.pitch * len(self.names) + self.axis)
        scale = Scale(low, high, self.left, self.width - self.right, log)
        self._draw_x_axis(drawing, scale, show, words)
        self._draw_names(drawing)
        return drawing, scale

    def find_middle(self, at: int) -> float:
        return self.top + self.pitch * at + (18.0 if self.narrow else 0.0) + self.row / 2

    def _draw_names(self, drawing: Drawing) -> None:
        for at, name in enumerate(self.names):
            words = name.replace("_", " ")
            if self.narrow:
                drawing.add_text(self.left, self.find_middle(at) - self.row / 2 - 3, words, "name")
            else:
                drawing.add_text(self.left - 12, self.find_middle(at) + 4, words, "name", "end")

    def _draw_x_axis(self, drawing: Drawing, scale: Scale, show: Callable[[float], str], words: str) -> None:
        bottom = self.top + self.pitch * len(self.names) + 2
        for tick in scale.choose_ticks(3 if self.narrow else 5):
            drawing.add_line(scale(tick), self.top, scale(tick), bottom, "grid")
            drawing.add_text(scale(tick), bottom + 14, show(tick), "tick", "middle")
        drawing.add_text(scale.end, bottom + 29, words, "axis", "end")


@dataclass(frozen=True, slots=True)
class Axis:
    """One side of a plot: the range of its values, how they are written, and where ticks stand if not chosen here."""

    low: float
    high: float
    show: Callable[[float], str]
    log: bool = False
    ticks: Sequence[float] | None = None

    def list_ticks(self, scale: Scale) -> Sequence[float]:
        return scale.choose_ticks() if self.ticks is None else self.ticks


def begin_plot(
    width: float, height: float, x: Axis, y: Axis, words: str, *, left: float = 56.0, right: float = 14.0
) -> tuple[Drawing, Scale, Scale]:
    """Return a drawing with both axes, and the scales of x and y to pixels; ``words`` say what the axes are."""
    drawing, bottom = Drawing(width, height), height - 42
    across, up = Scale(x.low, x.high, left, width - right, x.log), Scale(y.low, y.high, bottom, 14, y.log)
    for tick in y.list_ticks(up):
        drawing.add_line(left, up(tick), width - right, up(tick), "grid")
        drawing.add_text(left - 6, up(tick) + 4, y.show(tick), "tick", "end")
    for tick in x.list_ticks(across):
        drawing.add_text(across(tick), bottom + 16, x.show(tick), "tick", "middle")
    drawing.add_line(left, bottom, width - right, bottom, "rule")
    drawing.add_text(width - right, bottom + 34, words, "axis", "end")
    return drawing, across, up


def spread_out(places: Sequence[float], step: float, top: float) -> list[float]:
    """Move sorted places apart until neighbours are ``step`` apart, without passing ``top`` on the way back.

    >>> spread_out([10.0, 11.0, 40.0], 12.0, 100.0)
    [10.0, 22.0, 40.0]
    >>> spread_out([98.0, 99.0], 12.0, 100.0)
    [88.0, 100.0]
    """
    moved = list(places)
    for at in range(1, len(moved)):
        moved[at] = max(moved[at], moved[at - 1] + step)
    for at in range(len(moved) - 1, -1, -1):
        moved[at] = min(moved[at], top if at == len(moved) - 1 else moved[at + 1] - step)
    return moved
