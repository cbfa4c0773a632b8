"""Plots of reuse, quality and negative controls. Each is drawn for a wide page and for a phone."""

from __future__ import annotations

from collections.abc import Callable

from sembench.report.time_charts import DOTS, describe_pair, draw_ttft_by_length, draw_ttft_by_transform
from sembench.report.view import RUNGS, ReportView, compute_quantile, find_noise_band
from sembench.report.words import (
    DASH,
    format_interval,
    format_milliseconds,
    format_number,
    format_percent,
    format_ratio,
    format_title,
)
from sembench.scoring.aggregate import FALSE_SAFE_KL
from sembench.scoring.statistics import Estimate, group_by
from semblend.web.figures import Figure, RowFrame, draw_both
from semblend.web.svg import Drawing, Scale, pad_range, thin_out

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
