"""Renders results and load results, as one HTML page that needs no network and no scripts, or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sembench.report import story
from sembench.report.charts import FIGURES, draw_load
from sembench.report.story import flatten
from sembench.report.view import NotableRequest, ReportView
from sembench.result import LoadPoint, LoadResult
from sembench.trust import Finding
from semblend.formatting import DASH, format_milliseconds, format_moment, format_number, format_percent, format_title
from semblend.web.charts import Figure
from semblend.web.report import render_document, render_figure, render_head, render_table, render_tiles

TAG = "sembench report"
ENGINE_HEAD = ("engine", "lines", "donors", "hits", "materializations", "tokens", "errors")
WORST_HEAD = ("request", "why", "transform", "prompt", "confirmed", "cold", "warm", "F1", "KL")
FACTS_HEAD = ("what", "value")
LOAD_TAG = "sembench load report"
LOAD_HEAD = (
    "requests a second", "at most under way", "answered", "failed", "answers a second", "TTFT median", "TTFT p99",
    "TPOT median", "whole time p99", "within promises", "prefix cache hits",
)  # fmt: skip
_ANSWER_CHARS = 400


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a report in both forms."""

    html: str
    markdown: str


@dataclass(frozen=True, slots=True)
class Report:
    """A report: one HTML page that needs no network and no scripts, or Markdown, where plots become tables."""

    title: str
    blocks: Sequence[Block]

    @property
    def html(self) -> str:
        return render_document(self.title, [block.html for block in self.blocks])

    @property
    def markdown(self) -> str:
        return "\n\n".join(block.markdown for block in self.blocks if block.markdown) + "\n"


def build_report(view: ReportView, title: str, summaries: Sequence[Mapping[str, Any]] = ()) -> Report:
    """Return the report of a result: headline, tiles, plots, notable requests and provenance."""
    tiles = story.build_tiles(view)
    blocks = [
        _make_head(title, _list_subtitle(view), story.write_headline(view), TAG),
        *_make_doubts(view.grave),
        Block(
            render_tiles(tiles),
            render_markdown_table(("", "", ""), [(tile.value, tile.label, tile.detail) for tile in tiles]),
        ),
        *_make_figures(figure(view) for figure in FIGURES),
        _make_worst(view.worst),
        *_make_engines(summaries),
        *_make_absent(story.list_absent(view)),
        _make_provenance(story.list_provenance(view)),
    ]
    return Report(f"{title} · {TAG}", blocks)


def build_load_report(result: LoadResult, title: str, findings: Sequence[Finding] = ()) -> Report:
    """Return the report of a load result: headline, a row for each point, plots and provenance."""
    points = [format_point(point) for point in result.points]
    parts = (("run", result.run), ("config", result.config), ("environment", result.environment))
    blocks = [
        _make_head(title, _list_load_subtitle(result), write_load_headline(result, findings), LOAD_TAG),
        *_make_doubts(findings),
        Block(render_table(LOAD_HEAD, points), render_markdown_table(LOAD_HEAD, points)),
        *_make_figures(draw_load(result)),
        _make_provenance([row for name, part in parts for row in flatten(name, part)]),
    ]
    return Report(f"{title} · {LOAD_TAG}", blocks)


# -- blocks of both kinds of report ------------------------------------------------------------------------------------


def _make_section(name: str, title: str, html: str, markdown: str) -> Block:
    return Block(f'<h2 id="{name}">{title}</h2>{html}', f"## {title}\n\n{markdown}")


def _make_head(title: str, subtitle: Sequence[str], headline: str, tag: str) -> Block:
    return Block(render_head(title, subtitle, headline, tag), f"# {escape_plain(title)}\n\n{escape_plain(headline)}")


def _make_doubts(findings: Sequence[Finding]) -> Iterator[Block]:
    if findings:
        head = "Reasons not to believe this result"
        told = [(str(finding.doubt), finding.words) for finding in findings]
        rows = "".join(f"<li><b>{escape(format_title(name))}</b>: {escape(words)}</li>" for name, words in told)
        lines = "\n".join(f"- **{escape_plain(name)}**: {escape_plain(words)}" for name, words in told)
        yield Block(f'<div class="doubts" id="doubts"><h2>{head}</h2><ul>{rows}</ul></div>', f"## {head}\n\n{lines}")


def _make_figures(figures: Iterable[Figure | None]) -> Iterator[Block]:
    for figure in figures:
        if figure is not None:
            numbers = render_markdown_table(figure.head, figure.rows)
            yield Block(render_figure(figure), f"## {figure.title}\n\n{figure.caption}\n\n{numbers}")


def _make_provenance(rows: Sequence[tuple[str, str]]) -> Block:
    first = [row for row in rows if not row[0].startswith(("config.", "engine.", "environment."))]
    rest = [row for row in rows if row not in first]

    def render_part(part: Sequence[tuple[str, str]]) -> str:
        return render_table(FACTS_HEAD, part, classes={0: "key", 1: "value"})

    more = f"<details><summary>Settings, engine and machine</summary>{render_part(rest)}</details>" if rest else ""
    table = render_markdown_table(FACTS_HEAD, rows)
    return _make_section("provenance", "Where this comes from", render_part(first) + more, table)


def render_markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; its cells may hold any text."""
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(map(escape_plain, cells))} |" for cells in lines)


def escape_plain(text: str) -> str:
    """Escape text of a model or a server for a Markdown table."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


# -- a result of single requests ---------------------------------------------------------------------------------------


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


def _make_worst(rows: Sequence[NotableRequest]) -> Block:
    title, nothing = "Requests to look at", "Nothing stands out: no error, contradiction, false safe or slow-down."
    if not rows:
        return _make_section("worst", title, f"<p>{nothing}</p>", nothing)
    cells = [format_worst_row(row) for row in rows]
    shown = render_table(WORST_HEAD, cells, classes={1: "why"})
    answers = "".join(_render_answers(row) for row in rows if row.record.output_text)
    more = f"<details><summary>Their answers</summary>{answers}</details>"
    page = f"<p class=dim>The gravest first.</p>{shown}{more}"
    return _make_section("worst", title, page, render_markdown_table(WORST_HEAD, cells))


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


def _make_engines(summaries: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    if summaries:
        rows = story.list_engine_rows(summaries)
        caveats = {str(summary.get("caveat")) for summary in summaries if summary.get("caveat")}
        notes = "".join(f"<p class=dim>{escape(words)}</p>" for words in sorted(caveats))
        page = render_table(ENGINE_HEAD, rows) + notes
        yield _make_section("engines", "What the engines logged", page, render_markdown_table(ENGINE_HEAD, rows))


def _make_absent(lines: Sequence[str]) -> Iterator[Block]:
    if lines:
        items = "".join(f"<p>{escape(line)}</p>" for line in lines)
        page, plain = f'<div class="missing">{items}</div>', "\n".join(f"- {line}" for line in lines)
        yield _make_section("absent", "Not measured", page, plain)


# -- a load result -----------------------------------------------------------------------------------------------------


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
