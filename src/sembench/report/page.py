"""Renders the report as one HTML page. It needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sembench.report import story
from sembench.report.charts import FIGURES
from sembench.report.view import NotableRequest, ReportView
from sembench.report.words import DASH, format_milliseconds, format_moment, format_number, format_title
from semblend.web.report import render_document, render_figure, render_head, render_tiles
from semblend.web.tables import render_table

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
