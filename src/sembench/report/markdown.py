"""The same report for a pull request or a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sembench.report import story
from sembench.report.charts import FIGURES
from sembench.report.page import ENGINE_HEAD, WORST_HEAD, worst_row
from sembench.report.view import View


def markdown_page(view: View, title: str, summaries: Sequence[Mapping[str, Any]] = ()) -> str:
    """Headline, tiles, the numbers behind every plot, the worst requests and where it all comes from."""
    parts = [f"# {_plain(title)}", _plain(story.headline(view))]
    parts.append(_table(("", "", ""), [(tile.value, tile.label, tile.detail) for tile in story.tiles(view)]))
    for figure in FIGURES:
        found = figure(view)
        if found is not None:
            parts += [f"## {found.title}", found.caption, _table(found.head, found.rows)]
    if view.worst:
        parts += ["## Requests to look at", _table(WORST_HEAD, [worst_row(row) for row in view.worst])]
    if summaries:
        parts += ["## What the engines logged", _table(ENGINE_HEAD, story.engine_rows(summaries))]
    missing = story.absent(view)
    if missing:
        parts += ["## Not measured", "\n".join(f"- {line}" for line in missing)]
    parts += ["## Where this comes from", _table(("what", "value"), story.provenance(view))]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(head), _row("---" for _ in head), *(_row(row) for row in rows)]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text of a model or a server, harmless in a table and as Markdown."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
