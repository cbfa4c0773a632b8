"""Renders a load result: the sentence on top, a table of its points, and plots, as HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from sembench.report.load_charts import LOAD_FIGURES
from sembench.report.markdown import escape_plain, render_markdown_table
from sembench.report.story import flatten
from sembench.report.words import DASH, format_milliseconds, format_moment, format_percent
from sembench.result import LoadPoint, LoadResult
from sembench.trust import Finding
from semblend.web.report import render_document, render_figure, render_head, render_list
from semblend.web.tables import render_table

TAG = "sembench load report"
HEAD = (
    "requests a second", "at most under way", "answered", "failed", "answers a second", "TTFT median", "TTFT p99",
    "TPOT median", "whole time p99", "within promises", "prefix cache hits",
)  # fmt: skip


def render_load_html(result: LoadResult, title: str, findings: Sequence[Finding] = ()) -> str:
    """Return the whole page."""
    figures = [found for figure in LOAD_FIGURES if (found := figure(result)) is not None]
    doubts = render_list(finding.to_line() for finding in findings) if findings else ""
    body = [
        render_head(title, _list_subtitle(result), write_load_headline(result, findings), TAG),
        f'<div class="doubts"><h2>Reasons not to believe this result</h2>{doubts}</div>' if doubts else "",
        render_table(HEAD, [format_point(point) for point in result.points]),
        *(render_figure(figure) for figure in figures),
        '<h2 id="provenance">Where this comes from</h2>'
        + render_table(("what", "value"), _list_provenance(result), classes={0: "key", 1: "value"}),
    ]
    return render_document(f"{title} · {TAG}", body)


def render_load_markdown(result: LoadResult, title: str, findings: Sequence[Finding] = ()) -> str:
    """Return the same as Markdown; plots become tables."""
    parts = [f"# {escape_plain(title)}", escape_plain(write_load_headline(result, findings))]
    if findings:
        lines = [f"- {escape_plain(finding.to_line())}" for finding in findings]
        parts += ["## Reasons not to believe this result", "\n".join(lines)]
    parts.append(render_markdown_table(HEAD, [format_point(point) for point in result.points]))
    for figure in LOAD_FIGURES:
        found = figure(result)
        if found is not None:
            parts += [f"## {found.title}", found.caption, render_markdown_table(found.head, found.rows)]
    parts += ["## Where this comes from", render_markdown_table(("what", "value"), _list_provenance(result))]
    return "\n\n".join(parts) + "\n"


def write_load_headline(result: LoadResult, findings: Sequence[Finding]) -> str:
    """Say in a sentence what the server carried, or that the file is not believed."""
    if findings:
        return "Do not believe this result: see the reasons below."
    failed = sum(point.summary["failed"] for point in result.points)
    note = f" {failed} requests failed." if failed else ""
    kept = [point for point in result.points if (point.summary.get("goodput_share") or 0.0) >= 0.99]
    if result.slo and kept:
        best = max(kept, key=lambda point: point.summary["request_throughput"])
        return f"99 % of requests kept the promises up to {best.summary['request_throughput']:.3g} a second.{note}"
    if result.slo:
        return f"At no point did 99 % of requests keep the promises.{note}"
    best = max(result.points, key=lambda point: point.summary["request_throughput"])
    return f"The server answered {best.summary['request_throughput']:.3g} requests a second at most.{note}"


def format_point(point: LoadPoint) -> tuple[str, ...]:
    """Return the row of a point."""
    found, hits = point.summary, point.engine.get("prefix_cache_hit_rate")
    times = [found.get(name) for name in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_e2el_ms")]
    good = found.get("goodput_share")
    return (
        "all at once" if point.request_rate is None else f"{point.request_rate:g}",
        DASH if point.max_concurrency is None else str(point.max_concurrency),
        str(found["completed"]),
        str(found["failed"]),
        f"{found['request_throughput']:.3g}",
        *(DASH if value is None else format_milliseconds(value) for value in times),
        DASH if good is None else format_percent(good),
        DASH if hits is None else format_percent(hits),
    )


def _list_subtitle(result: LoadResult) -> tuple[str, ...]:
    count = sum(len(point.requests) for point in result.points)
    when = format_moment(str(result.run.get("timestamp_utc") or ""))
    return ("load", str(result.config.get("model") or ""), f"{count:,} requests", f"{len(result.points)} points", when)


def _list_provenance(result: LoadResult) -> list[tuple[str, str]]:
    parts = (("run", result.run), ("config", result.config), ("environment", result.environment))
    return [row for name, part in parts for row in flatten(name, part)]
