"""Plots of time to first token, cold and warm."""

from __future__ import annotations

from collections.abc import Sequence

from sembench.report.view import PairPoint, ReportView, compute_quantile, estimate_speedup
from sembench.report.words import format_interval, format_milliseconds, format_ratio, format_title, format_tokens
from sembench.scoring.statistics import group_by
from semblend.web.figures import Axis, Figure, RowFrame, begin_plot, draw_both, is_narrow
from semblend.web.svg import Drawing, list_doublings, pad_range, thin_out

DOTS = 600  # more dots cover each other and make a large page


def draw_ttft_by_length(view: ReportView) -> Figure | None:
    """Draw every pair as two dots over the length of its prompt."""
    points = view.points
    if not points:
        return None
    shown = thin_out(points, DOTS)
    drawn = "" if len(shown) == len(points) else f" {len(shown)} of {len(points)} pairs are drawn."

    def draw(width: float) -> Drawing:
        narrow = is_narrow(width)
        low, high = pad_range([p.prompt_tokens for p in points], log=True)
        across = Axis(low, high, format_tokens, log=True, ticks=list_doublings(low, high, 5 if narrow else 7))
        up = Axis(*pad_range([t for p in points for t in (p.cold_ms, p.warm_ms)], log=True), _format_short_ms, log=True)
        drawing, x, y = begin_plot(width, 320.0 if narrow else 360.0, across, up, "prompt tokens")
        for point in shown:
            at = x(point.prompt_tokens)
            drawing.add_line(at, y(point.cold_ms), at, y(point.warm_ms), "link")
        for point in shown:
            at, hover = x(point.prompt_tokens), describe_pair(point)
            drawing.add_dot(at, y(point.cold_ms), 3.6, "cold", hover)
            drawing.add_diamond(at, y(point.warm_ms), 3.6, "warm", hover)
        return drawing

    bands = _group_by_length(points)
    return Figure(
        "ttft-length",
        "Time to first token by prompt length",
        draw_both(
            draw, "Scatter: TTFT of the cold and the warm run of each pair over prompt length, both axes by ratio"
        ),
        (("cold", "cold (caches flushed)"), ("warm", "warm (donor primed)")),
        "Each line joins the two runs of one request. Both axes are logarithmic. Negative controls are not drawn "
        "here." + drawn,
        ("prompt tokens", "pairs", "cold, median", "warm, median", "speed-up, median"),
        tuple(_format_band(name, group) for name, group in bands.items()),
    )


def draw_ttft_by_transform(view: ReportView) -> Figure | None:
    """Draw the median TTFT of both arms for each transform, with the speed-up."""
    groups = group_by(view.points, lambda point: point.transform)
    if not groups:
        return None
    stats = {
        name: (_compute_median(group, "cold_ms"), _compute_median(group, "warm_ms"), estimate_speedup(group))
        for name, group in groups.items()
    }

    def draw(width: float) -> Drawing:
        frame = RowFrame(tuple(stats), width, row=30.0, right=92.0)
        everything = [value for cold, warm, _ in stats.values() for value in (cold, warm)]
        low, high = pad_range(everything, log=True)
        drawing, scale = frame.begin(low, high, _format_short_ms, "median time to first token", log=True)
        for at, (name, (cold, warm, speed)) in enumerate(stats.items()):
            y = frame.find_middle(at)
            drawing.add_line(scale(cold), y, scale(warm), y, "link strong")
            drawing.add_dot(scale(cold), y, 6, "cold", f"{format_title(name)}: cold {format_milliseconds(cold)}")
            drawing.add_diamond(scale(warm), y, 6, "warm", f"{format_title(name)}: warm {format_milliseconds(warm)}")
            drawing.add_text(width - 4, y + 4, format_ratio(speed.value), "big", "end")
        return drawing

    return Figure(
        "ttft-transform",
        "Time to first token by transform",
        draw_both(draw, "Dumbbells: median cold and warm TTFT by transform, with the median speed-up"),
        (("cold", "cold"), ("warm", "warm")),
        "The number at the right is the median of cold over warm, pair by pair; the axis is logarithmic.",
        ("transform", "pairs", "cold, median", "warm, median", "speed-up, median", "95 %"),
        tuple(
            (
                format_title(name),
                str(s.n),
                format_milliseconds(cold),
                format_milliseconds(warm),
                format_ratio(s.value),
                format_interval(s.ci, format_ratio),
            )
            for name, (cold, warm, s) in stats.items()
        ),
    )


def describe_pair(point: PairPoint) -> str:
    """Say in a line what a pair measured, for those who point at its dots."""
    confirmed = "unknown" if point.confirmed_tokens is None else f"{point.confirmed_tokens:,}"
    return (
        f"{point.item_id} ({format_title(point.transform)}), {point.prompt_tokens:,} tokens: cold "
        f"{format_milliseconds(point.cold_ms)}, warm {format_milliseconds(point.warm_ms)}, "
        f"{format_ratio(point.speedup)}, confirmed tokens {confirmed}"
    )


def _group_by_length(points: Sequence[PairPoint]) -> dict[str, list[PairPoint]]:
    """Group pairs by prompt length, in powers of two of 1,024 tokens."""

    def name_band(point: PairPoint) -> str:
        low = 1
        while low * 2048 <= point.prompt_tokens:
            low *= 2
        return "below 2k" if low == 1 else f"{low}k to {low * 2}k"

    return group_by(sorted(points, key=lambda point: point.prompt_tokens), name_band)


def _format_band(name: str, group: Sequence[PairPoint]) -> tuple[str, ...]:
    cold, warm = _compute_median(group, "cold_ms"), _compute_median(group, "warm_ms")
    return (
        name,
        str(len(group)),
        format_milliseconds(cold),
        format_milliseconds(warm),
        format_ratio(estimate_speedup(group).value),
    )


def _compute_median(points: Sequence[PairPoint], attribute: str) -> float:
    return compute_quantile([getattr(point, attribute) for point in points], 50)


def _format_short_ms(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
