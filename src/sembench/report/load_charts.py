"""Plots of a load run: time to first token and goodput over the rate, and what a throughput costs in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sembench.load_result import LoadPoint, LoadResult
from sembench.report.words import format_milliseconds, format_percent
from sembench.scoring.statistics import group_by
from semblend.web.figures import Axis, Figure, begin_plot, draw_both
from semblend.web.svg import Drawing, Scale, pad_range

HEIGHT = 300.0
_KINDS = ("warm", "cold", "rung-exact", "rung-candidate", "rung-eligible", "rung-confirmed")

Read = Callable[[LoadPoint], float | None]


def draw_ttft_by_rate(result: LoadResult) -> Figure | None:
    """Draw the median and the 99th percentile of TTFT over the rate, a line for each concurrency."""
    return _draw_lines(
        result.points,
        "load-ttft",
        "Time to first token",
        "ms, median and 99th percentile",
        ("median_ttft_ms", "p99_ttft_ms"),
        "Time runs from the moment a request was due, so a queue in front of the server counts. Both axes are "
        "logarithmic; the last place on the right is all requests at once.",
        log=True,
    )


def draw_goodput(result: LoadResult) -> Figure | None:
    """Draw the share of requests within the promises over the rate."""
    if not result.slo:
        return None
    promises = ", ".join(f"{name} {limit:g} ms" for name, limit in result.slo.items())
    return _draw_lines(
        result.points,
        "load-goodput",
        "Requests within the promises",
        "share of requests",
        ("goodput_share",),
        f"Promised: {promises}. A request that failed kept none.",
        log=False,
    )


def draw_throughput(result: LoadResult) -> Figure | None:
    """Draw answers a second over the rate that was asked for."""
    return _draw_lines(
        result.points,
        "load-throughput",
        "Answers a second",
        "answers a second",
        ("request_throughput",),
        "Where the line leaves the rate that was asked for, the server does not keep up.",
        log=True,
    )


LOAD_FIGURES: tuple[Callable[[LoadResult], Figure | None], ...] = (draw_ttft_by_rate, draw_goodput, draw_throughput)


def _draw_lines(
    points: Sequence[LoadPoint], name: str, title: str, axis: str, metrics: Sequence[str], caption: str, *, log: bool
) -> Figure | None:
    known = [point for point in points if all(point.summary.get(metric) is not None for metric in metrics)]
    if not known:
        return None
    groups = group_by(known, _name_limit)
    rates = _sort_rates(known)
    places = {rate: at for at, rate in enumerate(rates)}

    def draw(width: float) -> Drawing:
        values = [float(point.summary[metric]) for point in known for metric in metrics]
        low, high = pad_range([max(value, 1e-3) for value in values], log=True) if log else (0.0, max(1.0, *values))
        across = Axis(-0.5, len(rates) - 0.5, lambda at: _name_rate(rates[int(at)]), ticks=range(len(rates)))
        up = Axis(low, high, "{:g}".format, log=log)
        drawing, x, y = begin_plot(width, HEIGHT, across, up, f"{axis}, over requests a second", left=60.0)
        for number, group in enumerate(groups.values()):
            for metric in metrics:
                _draw_line(drawing, x, y, group, places, metric, _KINDS[number % len(_KINDS)])
        return drawing

    return Figure(
        name,
        title,
        draw_both(draw, f"Lines: {title.lower()} over the rate of requests, one for each concurrency"),
        tuple((_KINDS[number % len(_KINDS)], limit) for number, limit in enumerate(groups)),
        caption,
        ("requests a second", "at most under way", *metrics),
        tuple(
            (_name_rate(point.request_rate), _name_limit(point), *(_format(metric, point) for metric in metrics))
            for point in known
        ),
    )


def _draw_line(
    drawing: Drawing,
    x: Scale,
    y: Scale,
    group: Sequence[LoadPoint],
    places: dict[float | None, int],
    metric: str,
    kind: str,
) -> None:
    spots = sorted((places[point.request_rate], max(float(point.summary[metric]), 1e-3)) for point in group)
    drawing.add_curve([(x(at), y(value)) for at, value in spots], "curve other")
    for at, value in spots:
        drawing.add_dot(x(at), y(value), 4.5, kind, f"{metric}: {value:.4g}")


def _sort_rates(points: Sequence[LoadPoint]) -> list[float | None]:
    rates = {point.request_rate for point in points}
    return [*sorted(rate for rate in rates if rate is not None), *([None] if None in rates else [])]


def _name_rate(rate: float | None) -> str:
    return "all at once" if rate is None else f"{rate:g}"


def _name_limit(point: LoadPoint) -> str:
    return "no limit" if point.max_concurrency is None else f"{point.max_concurrency} under way"


def _format(metric: str, point: LoadPoint) -> str:
    value = point.summary[metric]
    if metric.endswith("_ms"):
        return format_milliseconds(value)
    return format_percent(value) if metric.endswith("_share") else f"{value:.3g}"
