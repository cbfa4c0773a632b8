"""Plots of a load run: time to first token and goodput over the rate, and what a throughput costs in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sembench.report.words import format_milliseconds, format_percent
from sembench.result import LoadPoint, LoadResult
from sembench.scoring.statistics import group_by
from semblend.web.figures import Axis, Figure, Legend, begin_plot, draw_both
from semblend.web.svg import Drawing, pad_range

HEIGHT = 300.0
SERIES = 6
"""Colours of lines in the style sheet; a sweep over more concurrencies begins anew."""
LINES = {"median_ttft_ms": "median", "p99_ttft_ms": "99th percentile"}
"""What the lines of a figure with more than one metric are called; all but the first are dashed."""


@dataclass(frozen=True, slots=True)
class Plot:
    """What a figure shows: its words, the metrics that become lines, how values are written, and a limit to keep."""

    name: str
    title: str
    axis: str
    metrics: tuple[str, ...]
    caption: str
    show: Callable[[float], str]
    log: bool
    limit: float | None = None
    asked: bool = False


def draw_ttft_by_rate(result: LoadResult) -> Figure | None:
    """Draw the median and the 99th percentile of TTFT over the rate, a line for each concurrency."""
    plot = Plot(
        "load-ttft",
        "Time to first token",
        "time to first token",
        ("median_ttft_ms", "p99_ttft_ms"),
        "Time runs from the moment a request was due, so a queue in front of the server counts. The axis of times is "
        "logarithmic; rates stand side by side, all requests at once on the right.",
        _write_time,
        log=True,
        limit=result.slo.get("ttft"),
    )
    return _draw_lines(result.points, plot)


def draw_goodput(result: LoadResult) -> Figure | None:
    """Draw the share of requests within the promises over the rate."""
    if not result.slo:
        return None
    promises = ", ".join(f"{name} {_write_time(limit)}" for name, limit in result.slo.items())
    plot = Plot(
        "load-goodput",
        "Requests within the promises",
        "share of requests",
        ("goodput_share",),
        f"Promised: {promises}. A request that failed kept none.",
        format_percent,
        log=False,
    )
    return _draw_lines(result.points, plot)


def draw_throughput(result: LoadResult) -> Figure | None:
    """Draw answers a second over the rate that was asked for."""
    plot = Plot(
        "load-throughput",
        "Answers a second",
        "answers a second",
        ("request_throughput",),
        "Where a line stays below the rate that was asked for, the server does not keep up. The axis is logarithmic.",
        "{:g}".format,
        log=True,
        asked=True,
    )
    return _draw_lines(result.points, plot)


LOAD_FIGURES: tuple[Callable[[LoadResult], Figure | None], ...] = (draw_ttft_by_rate, draw_goodput, draw_throughput)


def _draw_lines(points: Sequence[LoadPoint], plot: Plot) -> Figure | None:
    known = [point for point in points if all(point.summary.get(metric) is not None for metric in plot.metrics)]
    if not known:
        return None
    groups = group_by(known, _name_limit)
    rates = _sort_rates(known)
    asked = [(at, rate) for at, rate in enumerate(rates) if plot.asked and rate is not None]

    def draw(width: float) -> Drawing:
        across = Axis(-0.5, len(rates) - 0.5, lambda at: _name_rate(rates[int(at)]), ticks=range(len(rates)))
        low, high = _find_range(known, plot, [rate for _, rate in asked])
        up = Axis(low, high, plot.show, log=plot.log)
        drawing, x, y = begin_plot(width, HEIGHT, across, up, f"{plot.axis}, over requests a second", left=60.0)
        if plot.limit is not None:
            drawing.add_line(x(-0.5), y(plot.limit), x(len(rates) - 0.5), y(plot.limit), "limit")
        wanted = [(x(at), y(rate)) for at, rate in asked]
        if len(wanted) == 1:  # a line needs two ends
            wanted = [(x(-0.5), wanted[0][1]), (x(len(rates) - 0.5), wanted[0][1])]
        drawing.add_curve(wanted, "curve bound")
        for number, group in enumerate(groups.values()):
            for nth, metric in enumerate(plot.metrics):
                spots = [(x(rates.index(point.request_rate)), _read(point, metric), point) for point in group]
                spots.sort(key=lambda spot: spot[0])
                line = f"series-{number % SERIES}" + (" tail" if nth else "")
                drawing.add_curve([(left, y(value)) for left, value, _ in spots], f"curve {line}")
                for left, value, point in spots:
                    told = f"{LINES.get(metric, plot.axis)}, {point.name}: {_format(metric, point)}"
                    drawing.add_dot(left, y(value), 4.5, line, told)
        return drawing

    return Figure(
        plot.name,
        plot.title,
        draw_both(draw, f"Lines: {plot.title.lower()} over the rate of requests, one for each concurrency"),
        _list_legend(list(groups), plot, bool(asked)),
        plot.caption,
        ("requests a second", "at most under way", *plot.metrics),
        tuple(
            (_name_rate(point.request_rate), _name_limit(point), *(_format(metric, point) for metric in plot.metrics))
            for point in known
        ),
    )


def _list_legend(limits: Sequence[str], plot: Plot, asked: bool) -> Legend:
    """Name what can be told apart: concurrencies by colour, metrics by their stroke; one of either needs no name."""
    found = [(f"curve series-{number % SERIES}", name) for number, name in enumerate(limits)]
    if len(limits) == 1:
        found = []
    if len(plot.metrics) > 1:
        one = "curve series-0" if len(limits) == 1 else "curve"
        found += [(f"{one} tail" if nth else one, LINES[metric]) for nth, metric in enumerate(plot.metrics)]
    if plot.limit is not None:
        found.append(("limit", f"promised: {_write_time(plot.limit)}"))
    if asked:
        found += [("curve series-0", "answered")] if len(limits) == 1 else []
        found.append(("curve bound", "asked for"))
    return tuple(found)


def _find_range(points: Sequence[LoadPoint], plot: Plot, asked: Sequence[float]) -> tuple[float, float]:
    values = [_read(point, metric) for point in points for metric in plot.metrics]
    if not plot.log:
        return 0.0, max(1.0, *values)
    return pad_range([*values, *asked, *([] if plot.limit is None else [plot.limit])], log=True)


def _read(point: LoadPoint, metric: str) -> float:
    """Return a metric of a point; zero has no place on a logarithmic axis, so a thousandth is the least."""
    return max(float(point.summary[metric]), 0.0 if metric.endswith("_share") else 1e-3)


def _write_time(milliseconds: float) -> str:
    """Write a tick of an axis of times.

    >>> _write_time(500.0), _write_time(20_000.0)
    ('500 ms', '20 s')
    """
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:g} s"


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
