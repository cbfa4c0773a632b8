"""Pictures of simulated results, all in one style and all marked as simulated."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semblend.web.charts import Axis, Drawing, Scale, draw_axes, pad_range, spread_out, thin_out
from semblend.web.plotting import write_picture

# Classic policies have pale colours, semantic ones strong colours, bounds dark ones.
POLICY_COLOURS = {
    "lru": "#4c78a8", "fifo": "#b8bdc4", "lfu": "#72b7b2", "size_aware_lru": "#9ecae9", "static_semantic": "#eeca3b",
    "adaptive_semantic": "#e45756", "sieve": "#9d755d", "s3fifo": "#54a24b", "gdsf": "#ff9da6", "lfuda": "#b279a2",
    "arc": "#f58518", "tinylfu": "#7b8c3c", "belady": "#22262b", "belady_bypass": "#6b7280",
}  # fmt: skip
TYPE_COLOURS = {
    "system": "#4c78a8", "user": "#b8bdc4", "retrieved_context": "#f58518", "tool_output": "#72b7b2",
    "assistant": "#9d755d", "template": "#e45756", "code": "#54a24b", "legal_evidence": "#b279a2", "other": "#d9d4c7",
}  # fmt: skip
_SPARE = ("#2f4b7c", "#a05195", "#ffa600", "#665191", "#003f5c", "#ff7c43")
NOTE = "Simulated"
MAX_DOTS = 1500  # of one colour: more cover each other and take long to draw
_TOP, _BOTTOM, _MARGIN, _PANEL, _BETWEEN = 90.0, 30.0, 16.0, 440.0, 70.0
_NAMES, _ENDS, _ROW = 150.0, 130.0, 26.0  # room for names at the left and at the right, and from row to row
Bars = Sequence[tuple[str, float]]
Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def choose_colour(name: str) -> str:
    """Return the colour of a policy or block type, the same in every picture."""
    known = POLICY_COLOURS | TYPE_COLOURS
    return known.get(name, _SPARE[sum(name.encode()) % len(_SPARE)])


def draw_bars(
    path: Path, title: str, panels: Mapping[str, Bars], *, unit: str, best: str = "high", note: str = "",
    one_scale: bool = True,
) -> None:  # fmt: skip
    """Draw one bar for each policy and one panel for each mode; the best value is bold and in full colour.

    With ``one_scale`` bars of the same length mean the same in all panels. ``best`` says whether low or high is better.
    """
    picture = _Picture(title, list(panels), left=_NAMES, height=_ROW * max(map(len, panels.values())), note=note)
    widest = max([value for values in panels.values() for _, value in values] + [1e-9])
    for at, values in enumerate(panels.values()):
        longest = widest if one_scale else max([*(value for _, value in values), 1e-9])
        scale = picture.scale_across(at, 0.0, longest, right=110.0)
        top = (min if best == "low" else max)((v for label, v in values if not _is_bound(label)), default=0.0)
        for row, (label, value) in enumerate(values):
            y, colour = picture.find_row(row), choose_colour(label)
            first = not _is_bound(label) and abs(value - top) <= 1e-9 * max(1.0, abs(top))
            kind = f"fill:{colour}" if first else f"fill:{colour};fill-opacity:.62"
            if _is_bound(label):
                kind = f"fill:none;stroke:{colour};stroke-dasharray:4 3"
            picture.add_bar(scale.start, y, scale(value) - scale.start, kind)
            picture.drawing.add_text(
                scale(value) + 6, y + 4, _format_number(value, unit), "strong" if first else "label"
            )
            picture.name_row(at, row, label)
    picture.write(path)


def draw_policies(
    records: Mapping[str, Sequence[Mapping[str, Any]]], *, ttft: Path, tokens_saved: Path, hit_rate: Path, note: str
) -> None:
    """Draw average TTFT, prompt tokens saved and block hit rate of all policies; ``records`` are by mode."""
    for path, title, key, unit in (
        (ttft, "Average time to first token (estimated)", "avg_ttft_ms", "ms"),
        (tokens_saved, "Prompt tokens not computed", "tokens_saved", "tokens"),
        (hit_rate, "Block hit rate", "block_hit_rate", "%"),
    ):
        panels = {f"{mode} mode": [(row["policy"], row[key]) for row in rows] for mode, rows in records.items()}
        draw_bars(path, title, panels, unit=unit, best="low" if unit == "ms" else "high", note=note)


def draw_stacked_bars(
    path: Path, title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, note: str = ""
) -> None:
    """Draw one bar for each policy, divided by block type, and one panel for each mode, all on one scale."""
    kinds = list(dict.fromkeys(k for rows in panels.values() for parts in rows.values() for k in parts))
    picture = _Picture(
        title, [f"{name}, blocks evicted" for name in panels], left=_NAMES,
        height=_ROW * max(map(len, panels.values())), note=note, legend=kinds,
    )  # fmt: skip
    widest = max([sum(parts.values()) for rows in panels.values() for parts in rows.values()] + [1.0])
    for at, rows in enumerate(panels.values()):
        scale = picture.scale_across(at, 0.0, widest, right=80.0)
        for row, (policy, parts) in enumerate(rows.items()):
            y, total = picture.find_row(row), 0.0
            for kind in kinds:
                start, total = scale(total), total + parts.get(kind, 0)
                picture.add_bar(start, y, scale(total) - start, f"fill:{choose_colour(kind)}")
            picture.drawing.add_text(scale(total) + 6, y + 4, f"{total:,.0f}")
            picture.name_row(at, row, policy)
    picture.write(path)


def draw_lines(
    path: Path, title: str, panels: Mapping[str, Lines], *, x: str, y: str, note: str = "", share: bool = False,
    empty: str = "nothing to show",
) -> None:  # fmt: skip
    """Draw lines over x with their names at the right end; a panel without lines shows ``empty``."""
    picture = _Picture(title, [f"{name}: {y}" for name in panels], right=_ENDS, height=320.0, note=note)
    for at, series in enumerate(panels.values()):
        if not series:
            middle = picture.scale_across(at, 0, 1)
            picture.drawing.add_text(middle(0.5), _TOP + 160, empty, "faded", "middle")
            continue
        values = [value for _, one in series.values() for value in one]
        low, high = (0.0, 1.02) if share else pad_range(values)
        last = max(max(places) for places, _ in series.values())
        first = min(min(places) for places, _ in series.values())
        across, up = picture.add_axes(at, Axis(first, max(last, first + 1), "{:,.0f}".format),
                                      Axis(low, high, "{:.0%}".format if share else "{:g}".format), x)  # fmt: skip
        for label, (places, one) in series.items():
            points = [(across(place), up(value)) for place, value in zip(places, one, strict=True)]
            picture.drawing.add_curve(points, f"fill:none;stroke:{choose_colour(label)};stroke-width:2")
        names = sorted(series, key=lambda name: up(series[name][1][-1]))
        for name, place in zip(names, spread_out([up(series[one][1][-1]) for one in names], 15, up.start), strict=True):
            picture.add_name(across.end + 8, place, name)
    picture.write(path)


def draw_points(
    path: Path, title: str, series: Lines, *, x: str, y: str, line: tuple[float, float] | None, note: str = ""
) -> None:
    """Draw clouds of points and a line ``base, slope``."""
    picture = _Picture(title, [y], height=420.0, note=note, legend=list(series) if len(series) > 1 else ())
    right, top = (1.05 * max([*(value for one in series.values() for value in one[n]), 1e-9]) for n in (0, 1))
    across, up = picture.add_axes(0, Axis(0.0, right, "{:g}".format), Axis(0.0, top, "{:g}".format), x)
    for label, (places, values) in series.items():
        picture.add_cloud(across, up, places, values, choose_colour(label))
    if line is not None:
        picture.add_slope(across, up, *line)
    picture.write(path)


def draw_residuals(path: Path, fitted: Any, tokens: Any, times: Any) -> None:
    """Draw the observed times with the fitted line (left) and the residuals against length (right), in ms."""
    tokens, times = np.asarray(tokens, np.float64), np.asarray(times, np.float64)
    left = times - fitted.base_ttft_ms - fitted.token_latency_ms * tokens
    note = f"{fitted.requests} observed requests; line and 95 % intervals by {fitted.method}"
    low, high = fitted.token_interval_ms
    title = (
        f"TTFT = {fitted.base_ttft_ms:.1f} ms [{fitted.base_interval_ms[0]:.1f}, {fitted.base_interval_ms[1]:.1f}] "
        f"+ {fitted.token_latency_ms:.4f} ms [{low:.4f}, {high:.4f}] a token"
    )
    limit = 8 * max(fitted.residual_mad_ms, 1e-6)
    beyond = np.abs(left) > limit
    told = f"residual, ms; {int(beyond.sum())} beyond the edge (diamonds)" if beyond.any() else "residual, ms"
    picture = _Picture(title, ["observed TTFT, ms", told], height=380.0, note=note, label="Fitted")
    x = Axis(0.0, float(tokens.max()), "{:,.0f}".format)
    across, up = picture.add_axes(0, x, Axis(0.0, 1.05 * float(times.max()), "{:g}".format), "computed prompt tokens")
    middle = float(np.median(tokens))
    for slope in fitted.token_interval_ms:
        centre = fitted.base_ttft_ms + fitted.token_latency_ms * middle
        picture.add_slope(across, up, centre - slope * middle, slope, "curve tail")
    picture.add_cloud(across, up, tokens, times, "#4c78a8")
    picture.add_slope(across, up, fitted.base_ttft_ms, fitted.token_latency_ms)
    across, up = picture.add_axes(1, x, Axis(-limit, limit, "{:g}".format), "computed prompt tokens")
    picture.add_cloud(across, up, tokens[~beyond], left[~beyond], "#e45756")
    for place, value in zip(tokens[beyond], np.clip(left[beyond], -0.97 * limit, 0.97 * limit), strict=True):
        picture.drawing.add_diamond(across(place), up(value), 5, "fill:#e45756")
    picture.add_slope(across, up, 0.0, 0.0)
    picture.write(path)


class _Picture:
    """Panels side by side under one title, with a note below and perhaps a legend of kinds above."""

    def __init__(
        self, title: str, panels: Sequence[str], *, height: float, note: str, left: float = 60.0, right: float = 0.0,
        legend: Sequence[str] = (), label: str = NOTE,
    ) -> None:  # fmt: skip
        self.left, self.right, self.height = left, right, height
        width = 2 * _MARGIN + left + len(panels) * (_PANEL + right) + (len(panels) - 1) * _BETWEEN
        lines = textwrap.wrap(f"{label}: {note}" if note else label, int(width / 6.3))
        self.drawing = Drawing(width, _TOP + height + _BOTTOM + 30 + 16 * len(lines))
        self.drawing.add_bar(0, 0, width, self.drawing.height, "ground")
        self.drawing.add_text(_MARGIN, 32, title, "title")
        for at, words in enumerate(panels):
            self.drawing.add_text(self.find_left(at), _TOP - 10, words, "faded")
        for row, words in enumerate(lines):
            self.drawing.add_text(_MARGIN, _TOP + height + _BOTTOM + 26 + 16 * row, words, "tick")
        x = _MARGIN
        for kind in legend:
            self.drawing.add_bar(x, 45, 12, 12, f"fill:{choose_colour(kind)}")
            self.drawing.add_text(x + 17, 55, kind)
            x += 40 + 6.4 * len(kind)

    def find_left(self, at: int) -> float:
        return _MARGIN + self.left + at * (_PANEL + self.right + _BETWEEN)

    def find_row(self, row: int) -> float:
        """Return the middle of a row of bars."""
        return _TOP + _ROW * (row + 0.5)

    def scale_across(self, at: int, low: float, high: float, right: float = 0.0) -> Scale:
        return Scale(low, high, self.find_left(at), self.find_left(at) + _PANEL - right)

    def add_bar(self, x: float, y: float, width: float, kind: str) -> None:
        self.drawing.add_bar(x, y - _ROW * 0.34, width, _ROW * 0.68, kind)

    def name_row(self, at: int, row: int, name: str) -> None:
        """Write the name of a row beside the first panel."""
        if at == 0:
            self.drawing.add_text(self.find_left(0) - 10, self.find_row(row) + 4, name, "label", "end")

    def add_name(self, x: float, y: float, name: str) -> None:
        """Write a name beside a stroke in its colour: pale colours can be told apart as lines and not read as text."""
        self.drawing.add_line(x, y, x + 12, y, f"stroke:{choose_colour(name)};stroke-width:3")
        self.drawing.add_text(x + 17, y + 4, name, "tick")

    def add_axes(self, at: int, x: Axis, y: Axis, words: str) -> tuple[Scale, Scale]:
        across = self.scale_across(at, x.low, x.high)
        up = Scale(y.low, y.high, _TOP + self.height, _TOP)
        draw_axes(self.drawing, across, up, x, y, words)
        return across, up

    def add_cloud(self, across: Scale, up: Scale, places: Sequence[float], values: Sequence[float], hue: str) -> None:
        for place, value in thin_out(list(zip(places, values, strict=True)), MAX_DOTS):
            self.drawing.add_dot(across(place), up(value), 2.6, f"fill:{hue};fill-opacity:.45;stroke:none")

    def add_slope(self, across: Scale, up: Scale, base: float, slope: float, kind: str = "rule") -> None:
        """Draw a straight line as far as the axes reach."""
        ends = [place for place in (across.low, across.high) if up.low <= base + slope * place <= up.high]
        ends += [(edge - base) / slope for edge in (up.low, up.high) if slope]
        inside = sorted(place for place in ends if across.low <= place <= across.high)
        if inside:
            self.drawing.add_curve(
                [(across(p), up(base + slope * p)) for p in (inside[0], inside[-1])], f"curve {kind}"
            )

    def write(self, path: Path) -> None:
        write_picture(self.drawing, path, instead="pass --no-plots")


def _is_bound(name: str) -> bool:
    """Whether a policy knows the future: such a policy is drawn hollow and never called the best."""
    return name.startswith("belady")


def _format_number(value: float, unit: str) -> str:
    """Format a value with its unit."""
    if unit == "%":
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.1f} {unit}"
