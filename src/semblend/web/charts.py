"""Charts as inline SVG: elements, scales and their ticks, frames, figures, and the colours of the style sheet.

Colours are CSS classes, so that one drawing serves light, dark and paper; a picture on its own has the colours of the
light theme in place of their names. Each figure is drawn twice, for a wide page and for a phone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, TypeVar

from semblend.web.site import read_static

T = TypeVar("T")
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values of ``low..high`` to pixels of ``start..end``, evenly or by ratio."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values outside the range are drawn at the edge.

        >>> Scale(0, 10, 100, 200)(5)
        150.0
        >>> round(Scale(1, 100, 0, 200, log=True)(10))
        100
        """
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def choose_ticks(self, about: int = 5) -> list[float]:
        return (
            _choose_log_ticks(self.low, self.high, about) if self.log else choose_even_ticks(self.low, self.high, about)
        )


def choose_even_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers inside ``low..high``.

    >>> choose_even_ticks(0, 1, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about + 0.5)
    first = math.ceil(low / step - 1e-9)
    return [round(at * step, 12) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def _choose_log_ticks(low: float, high: float, about: int) -> list[float]:
    if high / low < 4:  # a short range: round numbers read better than powers
        return choose_even_ticks(low, high, about)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        found = [round(tick, 12) for tick in found if low * 0.999 <= tick <= high * 1.001]
        if len(found) >= min(about, 3):
            return found
    return found


def list_doublings(low: float, high: float, most: int = 7) -> list[float]:
    """Return the powers of two inside ``low..high``, thinned out if many; round numbers if there are few.

    Prompt lengths come in doublings.

    >>> list_doublings(900, 9000)
    [1024, 2048, 4096, 8192]
    """
    found = [2**power for power in range(31) if low <= 2**power <= high]
    return list(thin_out(found, most)) if len(found) >= 3 else choose_even_ticks(low, high, 4)


def thin_out(items: Sequence[T], most: int) -> Sequence[T]:
    """Return every n-th item, so that at most ``most`` are left."""
    return items[:: 1 + (len(items) - 1) // most] if items else items


def pad_range(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """Return the range of the values with a margin, never empty.

    >>> pad_range([2.0, 2.0])
    (1.9, 2.1)
    """
    low, high = min(values), max(values)
    if log:
        margin = max((high / low) ** 0.06, 1.1)
        return low / margin, high * margin
    margin = (high - low) * 0.06 or abs(low) * 0.05 or 1.0
    return low - margin, high + margin


@dataclass
class Drawing:
    """An SVG that is being drawn. Coordinates are pixels of the view box.

    The ``kind`` of a mark is its classes in the style sheet, or declarations such as ``fill:#4c78a8``.
    """

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def add_line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f"<line {_write_numbers(x1=x1, y1=y1, x2=x2, y2=y2)} {_write_kind(kind)}/>")

    def add_bar(self, x: float, y: float, width: float, height: float, kind: str, hover: str = "") -> None:
        numbers = _write_numbers(x=x, y=y, width=max(width, 0), height=height, rx=2)
        self._add_shape("rect", numbers, kind, hover)

    def add_dot(self, x: float, y: float, radius: float, kind: str, hover: str = "") -> None:
        self._add_shape("circle", _write_numbers(cx=x, cy=y, r=radius), kind, hover)

    def add_diamond(self, x: float, y: float, radius: float, kind: str, hover: str = "") -> None:
        """Add a second shape, for those who do not see the colour."""
        r = radius * 1.25
        corners = ((x, y - r), (x + r, y), (x, y + r), (x - r, y))
        path = "L".join(f"{_round(at)} {_round(down)}" for at, down in corners)
        self._add_shape("path", f'd="M{path}Z"', kind, hover)

    def add_curve(self, points: Sequence[tuple[float, float]], kind: str, hover: str = "") -> None:
        """Add straight lines from point to point; nothing where there are no points."""
        if not points:
            return
        path = "L".join(f"{_round(x)} {_round(y)}" for x, y in points)
        self._add_shape("path", f'd="M{path}"', kind, hover)

    def add_text(self, x: float, y: float, words: str, kind: str = "label", anchor: Anchor = "start") -> None:
        self.parts.append(
            f'<text {_write_numbers(x=x, y=y)} {_write_kind(kind)} text-anchor="{anchor}">{escape(words)}</text>'
        )

    def render(self, label: str, style: str = "") -> str:
        """Return the SVG element; a screen reader says ``label`` in its place. ``style`` makes it a file of its own."""
        body = "".join(self.parts)
        if style:
            ground = f'<rect {_write_numbers(width=self.width, height=self.height)} class="ground"/>'
            body = f"<title>{escape(label)}</title><style>\n{style}</style>{ground}{body}"
        box = f'viewBox="0 0 {_round(self.width)} {_round(self.height)}"'
        size = _write_numbers(width=self.width, height=self.height)
        space = ' xmlns="http://www.w3.org/2000/svg"' if style else ""
        return f'<svg{space} {box} {size} role="img" aria-label="{escape(label)}">{body}</svg>'

    def _add_shape(self, tag: str, shape: str, kind: str, hover: str) -> None:
        inner = f"<title>{escape(hover)}</title>" if hover else ""
        self.parts.append(f"<{tag} {shape} {_write_kind(kind)}>{inner}</{tag}>")


def _write_kind(kind: str) -> str:
    return f'style="{kind}"' if ":" in kind else f'class="{kind}"'


def _write_numbers(**numbers: float) -> str:
    """Write numbers as attributes of an element.

    >>> _write_numbers(x=1.04, y=2)
    'x="1" y="2"'
    """
    return " ".join(f'{name}="{_round(value)}"' for name, value in numbers.items())


def _round(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


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
    draw_axes(drawing, across, up, x, y, words)
    return drawing, across, up


def draw_axes(drawing: Drawing, across: Scale, up: Scale, x: Axis, y: Axis, words: str) -> None:
    """Draw both axes around the place that the scales say."""
    for tick in y.list_ticks(up):
        drawing.add_line(across.start, up(tick), across.end, up(tick), "grid")
        drawing.add_text(across.start - 6, up(tick) + 4, y.show(tick), "tick", "end")
    for tick in x.list_ticks(across):
        drawing.add_text(across(tick), up.start + 16, x.show(tick), "tick", "middle")
    drawing.add_line(across.start, up.start, across.end, up.start, "rule")
    drawing.add_text(across.end, up.start + 34, words, "axis", "end")


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


_COLOUR = re.compile(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")


def read_palette(theme: Literal["light", "dark"] = "light") -> dict[str, str]:
    """Return the colours of a theme by their names in the style sheet.

    >>> read_palette()["reused"]
    '#e0803c'
    """
    found = _COLOUR.findall(read_static("base.css", "report.css"))
    return {name: light if theme == "light" else dark for name, light, dark in found}


def write_plain_style() -> str:
    """Return the style of charts with the light theme's colours in place of their names: few programs know names."""
    colours = read_palette()
    return re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: colours[found[1]], read_static("chart.css"))
