"""Renders the report as Markdown, for a pull request or a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sembench.report import story
from sembench.report.charts import FIGURES
from sembench.report.page import ENGINE_HEAD, WORST_HEAD, format_worst_row
from sembench.report.view import ReportView


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
