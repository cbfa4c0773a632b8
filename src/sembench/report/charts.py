"""Plots of times, reuse, quality, negative controls and load. Each is drawn for a wide page and for a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sembench.report.view import RUNGS, PairPoint, ReportView, compute_quantile, estimate_speedup, find_noise_band
from sembench.result import LoadPoint, LoadResult
from sembench.scoring.aggregate import FALSE_SAFE_KL
from sembench.scoring.statistics import Estimate, group_by
from semblend.formatting import (
    DASH,
    format_interval,
    format_milliseconds,
    format_number,
    format_percent,
    format_ratio,
    format_tick_ms,
    format_title,
    format_tokens,
)
from semblend.web.charts import (
    Axis,
    Drawing,
    Figure,
    Legend,
    RowFrame,
    Scale,
    begin_plot,
    draw_both,
    is_narrow,
    list_doublings,
    pad_range,
    thin_out,
)

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
        up = Axis(*pad_range([t for p in points for t in (p.cold_ms, p.warm_ms)], log=True), format_tick_ms, log=True)
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
        drawing, scale = frame.begin(low, high, format_tick_ms, "median time to first token", log=True)
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


# -- reuse ---------------------------------------------------------------------------------------------------------


def draw_ladder(view: ReportView) -> Figure | None:
    """Draw the rates from exact hits to confirmed reuse, for all requests and by transform."""
    everything = {"all requests": view.aggregate, **view.by_transform}
    groups = {name: [group.get(key) for _, key in RUNGS] for name, group in everything.items()}
    seen = [at for at in range(len(RUNGS)) if any(rates[at] is not None for rates in groups.values())]
    if not seen:
        return None

    def draw(width: float) -> Drawing:
        frame = RowFrame(tuple(groups), width, row=11.0 * len(seen) + 12)
        drawing, scale = frame.begin(0, 1, format_percent, "share of full blocks")
        for at, (name, rates) in enumerate(groups.items()):
            top = frame.find_middle(at) - 5.5 * len(seen)
            for place, rung in enumerate(seen):
                _draw_rung(drawing, scale, top + 11 * place, everything[name], rung, rates[rung])
        return drawing

    missing = [word for at, (word, _) in enumerate(RUNGS) if at not in seen]
    note = f" Not measured in this run: {', '.join(missing)}." if missing else ""
    return Figure(
        "ladder",
        "How far reuse gets",
        draw_both(
            draw, "Bars: share of full blocks that are exact hits, candidates, eligible and confirmed, by transform"
        ),
        tuple((f"rung-{RUNGS[at][0]}", RUNGS[at][0]) for at in seen),
        "Exact: an exact block cache has it. Candidate: a planner proposes it. Eligible: the proposal holds, token by "
        "token. Confirmed: the backend says it ran on it, beyond the exact prefix. Only the last is reuse. Thin lines "
        "are 95 % intervals over documents." + note,
        ("transform", *(word for word, _ in RUNGS)),
        tuple((format_title(name), *(format_percent(rate, 1) for rate in rates)) for name, rates in groups.items()),
    )


def _draw_rung(drawing: Drawing, scale: Scale, y: float, group: object, rung: int, rate: float | None) -> None:
    word, key = RUNGS[rung]
    if rate is None:
        drawing.add_text(scale.start + 4, y + 8, f"{word}: not measured", "tick")
        return
    ci = group.get(f"{key}_ci") if isinstance(group, dict) else None
    hover = f"{word}: {format_percent(rate, 1)} (95 % {format_interval(ci, format_percent)})"
    drawing.add_bar(scale.start, y, scale(rate) - scale.start, 9, f"rung-{word}", hover)
    end = scale(rate)
    if ci:
        drawing.add_line(scale(ci[0]), y + 4.5, scale(ci[1]), y + 4.5, "whisker")
        end = max(end, scale(ci[1]))
    drawing.add_text(end + 5, y + 8, format_percent(rate), "value")


# -- quality -------------------------------------------------------------------------------------------------------


def draw_quality(view: ReportView) -> Figure | None:
    """Draw the F1 of warm answers against cold ones, with intervals and the F1 of a second cold answer."""
    rows = [row for row in view.closeness if row.f1.value is not None]
    if not rows:
        return None
    ceiling = view.rerun_f1

    def draw(width: float) -> Drawing:
        frame = RowFrame([row.transform for row in rows], width, row=28.0)
        ends = [end for row in rows for end in (row.f1.ci or (row.f1.value or 0.0,))]
        low = min(0.9, *(end for end in ends)) if ends else 0.0
        drawing, scale = frame.begin(
            max(0.0, low - 0.05), 1.0, lambda tick: f"{tick:.2f}", "token F1 against the cold answer"
        )
        if ceiling.value is not None:
            x = scale(ceiling.value)
            drawing.add_line(x, frame.top, x, frame.find_middle(len(rows) - 1) + frame.row / 2, "ceiling")
        for at, row in enumerate(rows):
            _draw_interval(drawing, scale, frame.find_middle(at), row.f1, "warm", format_title(row.transform))
            drawing.add_text(width - 4, frame.find_middle(at) + 4, format_number(row.f1.value, 2), "big", "end")
        return drawing

    legend = [("warm", "warm answer, mean with 95 % interval")]
    legend += (
        [("ceiling", f"cold answered again: {format_number(ceiling.value, 2)}")] if ceiling.value is not None else []
    )
    return Figure(
        "quality",
        "Answers against the cold answer",
        draw_both(draw, "Dots with intervals: token F1 of warm answers against the cold answer, by transform"),
        tuple(legend),
        "1 is the same words. A server does not always repeat itself: the dashed line is what the same cold prompt "
        "scored against itself, where that was run.",
        ("transform", "n", "F1 against cold", "95 %", "gold score cold", "gold score warm"),
        tuple(
            (
                format_title(r.transform),
                str(r.f1.n),
                format_number(r.f1.value),
                format_interval(r.f1.ci),
                format_number(r.gold_cold),
                format_number(r.gold_warm),
            )
            for r in rows
        ),
    )


def draw_divergence(view: ReportView) -> Figure | None:
    """Draw the KL of every confirmed reuse from the cold answer, with the limit of a false safe."""
    if not view.kl:
        return None
    floor = 1e-5
    by_transform = group_by(view.kl, lambda row: row[1])
    groups = {name: [(item, max(kl, floor)) for item, _, kl in rows] for name, rows in by_transform.items()}

    def draw(width: float) -> Drawing:
        frame = RowFrame(tuple(groups), width, row=26.0, right=24.0)
        top = max(max(kl for _, kl in group) for group in groups.values())
        drawing, scale = frame.begin(floor, max(1.0, top * 1.2), "{:g}".format, "KL in nats, by ratio", log=True)
        limit, bottom = scale(FALSE_SAFE_KL), frame.find_middle(len(groups) - 1) + frame.row / 2
        drawing.add_line(limit, frame.top, limit, bottom, "limit")
        for at, group in enumerate(groups.values()):
            far = [one for one in group if one[1] > FALSE_SAFE_KL]
            near = [one for one in group if one[1] <= FALSE_SAFE_KL]
            for item, kl in thin_out(near, DOTS // len(groups)):
                drawing.add_diamond(scale(kl), frame.find_middle(at), 4, "warm faint", f"{item}: KL {kl:.5f}")
            for item, kl in far:
                drawing.add_dot(scale(kl), frame.find_middle(at), 4, "bad", f"{item}: KL {kl:.5f}")
        return drawing

    far = sum(kl > FALSE_SAFE_KL for *_, kl in view.kl)
    return Figure(
        "divergence",
        "Distance of each reused answer",
        draw_both(draw, f"Strip: KL divergence from the cold answer of every confirmed reuse; {far} beyond the limit"),
        (
            ("warm", "confirmed reuse"),
            ("bad", f"beyond the limit: {far} of {len(view.kl)}"),
            ("limit", f"limit {FALSE_SAFE_KL}"),
        ),
        f"A confirmed reuse beyond {FALSE_SAFE_KL} nats is a false safe. Values below {floor:g} are drawn at the edge.",
        ("transform", "n", "median", "95th percentile", "largest"),
        tuple(
            (
                format_title(name),
                str(len(g)),
                *(f"{compute_quantile([kl for _, kl in g], share):.5f}" for share in (50, 95, 100)),
            )
            for name, g in groups.items()
        ),
    )


def draw_negatives(view: ReportView) -> Figure | None:
    """Draw the speed-ups of unrelated pairs beside the noise; the two must not differ."""
    points = view.negatives
    if not points:
        return None
    band = find_noise_band(view)

    def draw(width: float) -> Drawing:
        drawing = Drawing(width, 110)
        values = [point.speedup for point in points] + list(band or ()) + [0.8, 1.25]
        scale = Scale(*pad_range(values, log=True), 16, width - 16, log=True)
        if band:
            drawing.add_bar(
                scale(band[0]), 14, scale(band[1]) - scale(band[0]), 50, "band", "cold against cold again, 90 %"
            )
        drawing.add_line(scale(1), 10, scale(1), 68, "rule")
        for tick in scale.choose_ticks(4 if width < 500 else 8):
            drawing.add_text(scale(tick), 84, f"{tick:g}×", "tick", "middle")
        drawing.add_text(width - 16, 102, "cold over warm TTFT of unrelated pairs", "axis", "end")
        for at, point in enumerate(thin_out(points, DOTS)):
            kind = "unknown" if point.confirmed_tokens is None else "bad" if point.confirmed_tokens else "cold"
            drawing.add_dot(scale(point.speedup), 27 + 12 * (at % 3), 4.5, kind, describe_pair(point))
        return drawing

    reused = sum(bool(point.confirmed_tokens) for point in points)
    unknown = sum(point.confirmed_tokens is None for point in points)
    legend = [
        ("cold", f"ran cold, as it must: {len(points) - reused - unknown}"),
        ("bad", f"reused something: {reused}"),
    ]
    legend += [("unknown", f"nobody says what it reused: {unknown}")] if unknown else []
    legend += [("band", "noise: cold against cold again, 90 %")] if band else []
    return Figure(
        "negatives",
        "Unrelated pairs must stay cold",
        draw_both(draw, f"Strip: speed-ups of {len(points)} unrelated pairs; {reused} reused something"),
        tuple(legend),
        "The donor has nothing to do with the request. A confirmed token here is a fault, and a speed-up outside the "
        "noise means that something else than reuse made the warm arm faster.",
        ("item", "cold", "warm", "speed-up", "confirmed tokens"),
        tuple(
            (
                p.item_id,
                format_milliseconds(p.cold_ms),
                format_milliseconds(p.warm_ms),
                format_ratio(p.speedup),
                _format_count(p.confirmed_tokens),
            )
            for p in thin_out(points, DOTS)
        ),
    )


FIGURES: tuple[Callable[[ReportView], Figure | None], ...] = (
    draw_ttft_by_transform,
    draw_ttft_by_length,
    draw_ladder,
    draw_quality,
    draw_divergence,
    draw_negatives,
)


def _draw_interval(drawing: Drawing, scale: Scale, y: float, found: Estimate, kind: str, name: str) -> None:
    value = found.value or 0.0
    if found.ci:
        drawing.add_line(scale(found.ci[0]), y, scale(found.ci[1]), y, "whisker strong")
    drawing.add_diamond(
        scale(value), y, 5, kind, f"{name}: {format_number(value)} (95 % {format_interval(found.ci)}, n={found.n})"
    )


def _format_count(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


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


def list_load_plots(result: LoadResult) -> Iterator[Plot]:
    """Yield what is drawn of a load run over its rates: TTFT, the promises where there are some, answers a second."""
    yield Plot(
        "load-ttft",
        "Time to first token",
        "time to first token",
        ("median_ttft_ms", "p99_ttft_ms"),
        "Time runs from the moment a request was due, so a queue in front of the server counts. The axis of times is "
        "logarithmic; rates stand side by side, all requests at once on the right.",
        format_tick_ms,
        log=True,
        limit=result.slo.get("ttft"),
    )
    if result.slo:
        promises = ", ".join(f"{name} {format_tick_ms(limit)}" for name, limit in result.slo.items())
        yield Plot(
            "load-goodput",
            "Requests within the promises",
            "share of requests",
            ("goodput_share",),
            f"Promised: {promises}. A request that failed kept none.",
            format_percent,
            log=False,
        )
    yield Plot(
        "load-throughput",
        "Answers a second",
        "answers a second",
        ("request_throughput",),
        "Where a line stays below the rate that was asked for, the server does not keep up. The axis is logarithmic.",
        "{:g}".format,
        log=True,
        asked=True,
    )


def draw_load(result: LoadResult) -> list[Figure | None]:
    """Draw a load run: a line for each concurrency, over the rates."""
    return [_draw_lines(result.points, plot) for plot in list_load_plots(result)]


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
        found.append(("limit", f"promised: {format_tick_ms(plot.limit)}"))
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
