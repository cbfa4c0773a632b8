"""Renders results and load results, as one HTML page that needs no network and no scripts, or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sembench.report import story
from sembench.report.charts import FIGURES, LOAD_FIGURES
from sembench.report.story import flatten
from sembench.report.view import NotableRequest, ReportView
from sembench.result import LoadPoint, LoadResult
from sembench.trust import Finding
from semblend.formatting import DASH, format_milliseconds, format_moment, format_number, format_percent, format_title
from semblend.web.report import render_document, render_figure, render_head, render_list, render_table, render_tiles

TAG = "sembench report"
ENGINE_HEAD = ("engine", "lines", "donors", "hits", "materializations", "tokens", "errors")
WORST_HEAD = ("request", "why", "transform", "prompt", "confirmed", "cold", "warm", "F1", "KL")
_ANSWER_CHARS = 400


def render_html(view: ReportView, title: str, summaries: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the whole page."""
    figures = [found for figure in FIGURES if (found := figure(view)) is not None]
    body = [
        render_head(title, _list_subtitle(view), story.write_headline(view), TAG),
        _render_doubts(view),
        render_tiles(story.build_tiles(view)),
        *(render_figure(figure) for figure in figures),
        _render_worst(view.worst),
        _render_engines(summaries),
        _render_absent(view),
        _render_provenance(view),
    ]
    return render_document(f"{title} · {TAG}", body)


def _list_subtitle(view: ReportView) -> list[str]:
    result = view.result
    run, config = result.run or {}, result.config
    return [
        str(run.get("engine") or config.get("mode") or "sembench"),
        str(config.get("model") or config.get("planner") or ""),
        f"{view.aggregate.get('request_count') or 0:,} requests",
        f"{view.aggregate.get('source_count') or 0:,} documents",
        format_moment(result.created_at_utc),
    ]


def _render_doubts(view: ReportView) -> str:
    doubts = story.list_doubts(view)
    if not doubts:
        return ""
    rows = "".join(f"<li><b>{escape(format_title(name))}</b>: {escape(words)}</li>" for name, words in doubts)
    return f'<div class="doubts" id="doubts"><h2>Reasons not to believe this result</h2><ul>{rows}</ul></div>'


def _render_worst(rows: Sequence[NotableRequest]) -> str:
    head = '<h2 id="worst">Requests to look at</h2>'
    if not rows:
        return f"{head}<p>Nothing stands out: no error, contradiction, false safe or slow-down.</p>"
    shown = render_table(WORST_HEAD, [format_worst_row(row) for row in rows], classes={1: "why"})
    answers = "".join(_render_answers(row) for row in rows if row.record.output_text)
    return (
        f"{head}<p class=dim>The gravest first.</p>{shown}<details><summary>Their answers</summary>{answers}</details>"
    )


def format_worst_row(row: NotableRequest) -> tuple[str, ...]:
    record, cold = row.record, row.cold
    return (
        record.item_id,
        "; ".join(row.reasons),
        format_title(record.transform),
        format_number(record.prompt_tokens),
        format_number(record.backend_confirmed_tokens),
        DASH if cold is None or cold.ttft_ms is None else format_milliseconds(cold.ttft_ms),
        DASH if record.ttft_ms is None else format_milliseconds(record.ttft_ms),
        format_number(record.cold_f1, 2),
        format_number(record.cold_kl_topk, 4),
    )


def _render_answers(row: NotableRequest) -> str:
    def quote(words: str | None) -> str:
        return f'<p class="answer">{escape((words or "")[:_ANSWER_CHARS])}</p>'

    cold = f"<p class=dim>cold</p>{quote(row.cold.output_text)}" if row.cold else ""
    return f"<h3>{escape(row.record.item_id)}</h3>{cold}<p class=dim>warm</p>{quote(row.record.output_text)}"


def _render_engines(summaries: Sequence[Mapping[str, Any]]) -> str:
    if not summaries:
        return ""
    caveats = {str(summary.get("caveat")) for summary in summaries if summary.get("caveat")}
    notes = "".join(f"<p class=dim>{escape(words)}</p>" for words in sorted(caveats))
    shown = render_table(ENGINE_HEAD, story.list_engine_rows(summaries))
    return f'<h2 id="engines">What the engines logged</h2>{shown}{notes}'


def _render_absent(view: ReportView) -> str:
    lines = story.list_absent(view)
    if not lines:
        return ""
    items = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<h2 id="absent">Not measured</h2><div class="missing">{items}</div>'


def _render_provenance(view: ReportView) -> str:
    rows = story.list_provenance(view)
    first = [row for row in rows if not row[0].startswith(("config.", "engine.", "environment."))]
    rest = [row for row in rows if row not in first]

    def render_part(part: Sequence[tuple[str, str]]) -> str:
        return render_table(("what", "value"), part, classes={0: "key", 1: "value"})

    more = f"<details><summary>Settings, engine and machine</summary>{render_part(rest)}</details>" if rest else ""
    return f'<h2 id="provenance">Where this comes from</h2>{render_part(first)}{more}'


def render_markdown(view: ReportView, title: str, summaries: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the report: headline, tiles, the numbers of every plot, notable requests and provenance."""
    parts = [f"# {escape_plain(title)}", escape_plain(story.write_headline(view))]
    doubts = story.list_doubts(view)
    if doubts:
        lines = [f"- **{escape_plain(name)}**: {escape_plain(words)}" for name, words in doubts]
        parts += ["## Reasons not to believe this result", "\n".join(lines)]
    parts.append(
        render_markdown_table(("", "", ""), [(tile.value, tile.label, tile.detail) for tile in story.build_tiles(view)])
    )
    for figure in FIGURES:
        found = figure(view)
        if found is not None:
            parts += [f"## {found.title}", found.caption, render_markdown_table(found.head, found.rows)]
    if view.worst:
        rows = [format_worst_row(row) for row in view.worst]
        parts += ["## Requests to look at", render_markdown_table(WORST_HEAD, rows)]
    if summaries:
        parts += ["## What the engines logged", render_markdown_table(ENGINE_HEAD, story.list_engine_rows(summaries))]
    missing = story.list_absent(view)
    if missing:
        parts += ["## Not measured", "\n".join(f"- {line}" for line in missing)]
    parts += ["## Where this comes from", render_markdown_table(("what", "value"), story.list_provenance(view))]
    return "\n\n".join(parts) + "\n"


def render_markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; its cells may hold any text."""
    lines = [_render_row(head), _render_row("---" for _ in head), *(_render_row(row) for row in rows)]
    return "\n".join(lines)


def _render_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(escape_plain(cell) for cell in cells) + " |"


def escape_plain(text: str) -> str:
    """Escape text of a model or a server for a Markdown table."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


LOAD_TAG = "sembench load report"
LOAD_HEAD = (
    "requests a second", "at most under way", "answered", "failed", "answers a second", "TTFT median", "TTFT p99",
    "TPOT median", "whole time p99", "within promises", "prefix cache hits",
)  # fmt: skip


def render_load_html(result: LoadResult, title: str, findings: Sequence[Finding] = ()) -> str:
    """Return the whole page."""
    figures = [found for figure in LOAD_FIGURES if (found := figure(result)) is not None]
    doubts = render_list(finding.to_line() for finding in findings) if findings else ""
    body = [
        render_head(title, _list_load_subtitle(result), write_load_headline(result, findings), LOAD_TAG),
        f'<div class="doubts"><h2>Reasons not to believe this result</h2>{doubts}</div>' if doubts else "",
        render_table(LOAD_HEAD, [format_point(point) for point in result.points]),
        *(render_figure(figure) for figure in figures),
        '<h2 id="provenance">Where this comes from</h2>'
        + render_table(("what", "value"), _list_load_provenance(result), classes={0: "key", 1: "value"}),
    ]
    return render_document(f"{title} · {LOAD_TAG}", body)


def render_load_markdown(result: LoadResult, title: str, findings: Sequence[Finding] = ()) -> str:
    """Return the same as Markdown; plots become tables."""
    parts = [f"# {escape_plain(title)}", escape_plain(write_load_headline(result, findings))]
    if findings:
        lines = [f"- {escape_plain(finding.to_line())}" for finding in findings]
        parts += ["## Reasons not to believe this result", "\n".join(lines)]
    parts.append(render_markdown_table(LOAD_HEAD, [format_point(point) for point in result.points]))
    for figure in LOAD_FIGURES:
        found = figure(result)
        if found is not None:
            parts += [f"## {found.title}", found.caption, render_markdown_table(found.head, found.rows)]
    parts += ["## Where this comes from", render_markdown_table(("what", "value"), _list_load_provenance(result))]
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


def _list_load_subtitle(result: LoadResult) -> tuple[str, ...]:
    count = sum(len(point.requests) for point in result.points)
    when = format_moment(str(result.run.get("timestamp_utc") or ""))
    return ("load", str(result.config.get("model") or ""), f"{count:,} requests", f"{len(result.points)} points", when)


def _list_load_provenance(result: LoadResult) -> list[tuple[str, str]]:
    parts = (("run", result.run), ("config", result.config), ("environment", result.environment))
    return [row for name, part in parts for row in flatten(name, part)]
