"""Plots of time to first token, cold beside warm."""

from __future__ import annotations

from collections.abc import Sequence

from sembench.report.frame import DOTS, Figure, Rows, both, pair_words
from sembench.report.svg import Drawing, Scale, doublings, padded, thinned
from sembench.report.view import Point, View, grouped, quantile, speedup_of
from sembench.report.words import milliseconds, span, times, title_of, tokens


def ttft_by_length(view: View) -> Figure | None:
    """Every pair as two dots over its prompt's length."""
    points = view.points
    if not points:
        return None
    shown = thinned(points, DOTS)
    drawn = "" if len(shown) == len(points) else f" {len(shown)} of {len(points)} pairs are drawn."

    def draw(width: float) -> Drawing:
        height, left, bottom = (360.0, 56.0, 318.0) if width > 500 else (320.0, 46.0, 278.0)
        drawing = Drawing(width, height)
        x = Scale(*padded([p.prompt_tokens for p in points], log=True), left, width - 14, log=True)
        y = Scale(*padded([t for p in points for t in (p.cold_ms, p.warm_ms)], log=True), bottom, 14, log=True)
        for tick in y.ticks():
            drawing.line(left, y(tick), width - 14, y(tick), "grid")
            drawing.text(left - 6, y(tick) + 4, _short_ms(tick), "tick", "end")
        for tick in doublings(x.low, x.high, 7 if width > 500 else 5):
            drawing.text(x(tick), bottom + 16, tokens(tick), "tick", "middle")
        drawing.line(left, bottom, width - 14, bottom, "rule")
        drawing.text(width - 14, bottom + 34, "prompt tokens", "axis", "end")
        for point in shown:
            at = x(point.prompt_tokens)
            drawing.line(at, y(point.cold_ms), at, y(point.warm_ms), "link")
        for point in shown:
            at, hover = x(point.prompt_tokens), pair_words(point)
            drawing.dot(at, y(point.cold_ms), 3.6, "cold", hover)
            drawing.diamond(at, y(point.warm_ms), 3.6, "warm", hover)
        return drawing

    bands = _bands(points)
    return Figure(
        "ttft-length",
        "Time to first token by prompt length",
        both(draw, "Scatter: TTFT of the cold and the warm run of each pair over prompt length, both axes by ratio"),
        (("cold", "cold (caches flushed)"), ("warm", "warm (donor primed)")),
        "Each line joins the two runs of one request. Both axes are logarithmic. Negative controls are not drawn "
        "here." + drawn,
        ("prompt tokens", "pairs", "cold, median", "warm, median", "speed-up, median"),
        tuple(_band_row(name, group) for name, group in bands.items()),
    )


def ttft_by_transform(view: View) -> Figure | None:
    """Median TTFT of both arms, one row a transform, with the speed-up beside it."""
    groups = grouped(view.points)
    if not groups:
        return None
    stats = {
        name: (_median(group, "cold_ms"), _median(group, "warm_ms"), speedup_of(group))
        for name, group in groups.items()
    }

    def draw(width: float) -> Drawing:
        frame = Rows(tuple(stats), width, row=30.0, right=92.0)
        drawing = frame.drawing()
        everything = [value for cold, warm, _ in stats.values() for value in (cold, warm)]
        scale = frame.scale(*padded(everything, log=True), log=True)
        frame.x_axis(drawing, scale, _short_ms, "median time to first token")
        for at, (name, (cold, warm, speed)) in enumerate(stats.items()):
            y = frame.middle(at)
            drawing.line(scale(cold), y, scale(warm), y, "link strong")
            drawing.dot(scale(cold), y, 6, "cold", f"{title_of(name)}: cold {milliseconds(cold)}")
            drawing.diamond(scale(warm), y, 6, "warm", f"{title_of(name)}: warm {milliseconds(warm)}")
            drawing.text(width - 4, y + 4, times(speed.value), "big", "end")
        frame.name_rows(drawing)
        return drawing

    return Figure(
        "ttft-transform",
        "Time to first token by transform",
        both(draw, "Dumbbells: median cold and warm TTFT by transform, with the median speed-up"),
        (("cold", "cold"), ("warm", "warm")),
        "The number at the right is the median of cold over warm, pair by pair; the axis is logarithmic.",
        ("transform", "pairs", "cold, median", "warm, median", "speed-up, median", "95 %"),
        tuple(
            (title_of(name), str(s.n), milliseconds(cold), milliseconds(warm), times(s.value), span(s.ci, times))
            for name, (cold, warm, s) in stats.items()
        ),
    )


def _bands(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Pairs by length, in doublings of a thousand tokens."""
    bands: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda p: p.prompt_tokens):
        low = 1
        while low * 2048 <= point.prompt_tokens:
            low *= 2
        name = "below 2k" if low == 1 else f"{low}k to {low * 2}k"
        bands.setdefault(name, []).append(point)
    return bands


def _band_row(name: str, group: Sequence[Point]) -> tuple[str, ...]:
    cold, warm = _median(group, "cold_ms"), _median(group, "warm_ms")
    return name, str(len(group)), milliseconds(cold), milliseconds(warm), times(speedup_of(group).value)


def _median(points: Sequence[Point], attribute: str) -> float:
    return quantile([getattr(point, attribute) for point in points], 50)


def _short_ms(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
