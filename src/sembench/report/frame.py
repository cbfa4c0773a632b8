"""What the plots share: a figure with its numbers, and a frame with one row for each transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sembench.report.view import PairPoint
from sembench.report.words import format_milliseconds, format_ratio, format_title
from semblend.web.svg import Drawing, Scale

WIDE, NARROW = 900.0, 360.0
DOTS = 600  # more dots cover each other and make a large page


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot of the page: two drawings, a legend of (class, words), a caption and the numbers as a table."""

    name: str
    title: str
    drawings: tuple[str, str]
    legend: tuple[tuple[str, str], ...]
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Draw = Callable[[float], Drawing]


def draw_both(draw: Draw, label: str) -> tuple[str, str]:
    return draw(WIDE).render(label), draw(NARROW).render(label)


@dataclass(frozen=True, slots=True)
class RowFrame:
    """A frame with one row for each transform; the names stand beside the rows, or above them on a narrow page."""

    names: Sequence[str]
    width: float
    row: float
    axis: float = 34.0
    top: float = 8.0
    right: float = 64.0

    @property
    def narrow(self) -> bool:
        return self.width < 500

    @property
    def left(self) -> float:
        return 4.0 if self.narrow else 190.0

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
            if self.narrow:
                drawing.add_text(self.left, self.find_middle(at) - self.row / 2 - 3, format_title(name), "name")
            else:
                drawing.add_text(self.left - 12, self.find_middle(at) + 4, format_title(name), "name", "end")

    def _draw_x_axis(self, drawing: Drawing, scale: Scale, show: Callable[[float], str], words: str) -> None:
        bottom = self.top + self.pitch * len(self.names) + 2
        for tick in scale.choose_ticks(3 if self.narrow else 5):
            drawing.add_line(scale(tick), self.top, scale(tick), bottom, "grid")
            drawing.add_text(scale(tick), bottom + 14, show(tick), "tick", "middle")
        drawing.add_text(scale.end, bottom + 29, words, "axis", "end")


def describe_pair(point: PairPoint) -> str:
    confirmed = "unknown" if point.confirmed_tokens is None else f"{point.confirmed_tokens:,}"
    return (
        f"{point.item_id} ({format_title(point.transform)}), {point.prompt_tokens:,} tokens: cold "
        f"{format_milliseconds(point.cold_ms)}, warm {format_milliseconds(point.warm_ms)}, "
        f"{format_ratio(point.speedup)}, confirmed tokens {confirmed}"
    )
