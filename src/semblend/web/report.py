"""Reports as one HTML file each: tiles, tables, figures. None needs network or scripts; every text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from semblend.formatting import DASH
from semblend.web.charts import Drawing, Figure
from semblend.web.site import read_static, write_icon


class Strong(str):
    """A cell that is written bold."""

    __slots__ = ()


def render_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    classes: Mapping[int, str] | None = None,
    marks: Mapping[int, str] | None = None,
    kind: str = "",
) -> str:
    """Return a table that scrolls inside its box; numbers are aligned to the right.

    ``classes`` are of columns and ``marks`` of rows, by their number; ``kind`` is of the whole table.
    """
    kinds, lines = classes or {}, marks or {}
    kept = [tuple(row) for row in rows]
    numeric = {at for at in range(len(head)) if at and at not in kinds and _are_numbers([row[at] for row in kept])}

    def render_cell(at: int, words: str) -> str:
        column = kinds.get(at) or ("num" if at in numeric else "")
        shown = f"<b>{escape(words)}</b>" if isinstance(words, Strong) else escape(words)
        if column == "key":  # a long name may break where a person would break it
            shown = shown.replace("_", "_<wbr>").replace(".", ".<wbr>")
        return f"<td{_write_class(column)}>{shown}</td>"

    top = "".join(
        f'<th scope="col"{_write_class("num" if at in numeric else "")}>{escape(word)}</th>' if word else "<td></td>"
        for at, word in enumerate(head)
    )
    body = "".join(
        f"<tr{_write_class(lines.get(number, ''))}>{''.join(render_cell(*cell) for cell in enumerate(row))}</tr>"
        for number, row in enumerate(kept)
    )
    inner = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0"><table{_write_class(kind)}>{inner}</table></div>'


def _write_class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _are_numbers(cells: Sequence[str]) -> bool:
    shown = [cell for cell in cells if cell != DASH]
    return bool(shown) and all(cell[:1].isdigit() or cell[:1] in "-+" for cell in shown)


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
Tone = Literal["", "good", "bad"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One important number of a page."""

    value: str
    label: str
    detail: str = ""
    tone: Tone = ""


def render_document(title: str, body: Iterable[str]) -> str:
    """Return a page that needs nothing but itself; the parts of ``body`` are HTML."""
    style = read_static("base.css", "report.css", "chart.css")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title>{write_icon()}<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # half a character of a log is no reason to fail


def render_head(title: str, subtitle: Sequence[str], verdict: str, tag: str = "") -> str:
    """Return the top of a page: what kind of page it is, its title, where it comes from, the sentence to take home."""
    told = " · ".join(word for word in subtitle if word)
    return (
        (f'<p class="tag">{escape(tag)}</p>' if tag else "")
        + f'<h1>{escape(title)}</h1><p class="dim">{escape_unbroken(told)}</p>'
        f'<p class="verdict">{escape_unbroken(verdict)}</p>'
    )


def escape_unbroken(words: str) -> str:
    """Escape text and keep a number and its percent sign on one line."""
    return escape(words).replace(" %", "&nbsp;%")


def render_tiles(tiles: Iterable[Tile]) -> str:
    """Return the important numbers, each in a box."""
    cells = (
        f'<li class="{" ".join(filter(None, ("card tile", tile.tone)))}"><b>{escape_unbroken(tile.value)}</b>'
        + "".join(f"<span>{escape_unbroken(words)}</span>" for words in (tile.label, tile.detail) if words)
        + "</li>"
        for tile in tiles
    )
    return f'<ul class="tiles">{"".join(cells)}</ul>'


def render_figure(figure: Figure) -> str:
    """Return a chart with its title, its legend, its caption and its numbers."""
    legend = "".join(f"<li>{_render_swatch(kind)}{escape(words)}</li>" for kind, words in figure.legend)
    wide, narrow = figure.drawings
    numbers = f"<details><summary>The numbers</summary>{render_table(figure.head, figure.rows)}</details>"
    return (
        f'<h2 id="{figure.name}">{escape(figure.title)}</h2>\n<figure>'
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        + f"<figcaption>{escape_unbroken(figure.caption)}</figcaption></figure>"
        + (numbers if figure.rows else "")
    )


def _render_swatch(kind: str) -> str:
    drawing = Drawing(14, 14)
    if kind in ("ceiling", "limit"):
        drawing.add_line(0, 7, 14, 7, kind)
    elif kind.startswith("curve"):
        drawing.add_curve([(0, 7), (14, 7)], kind)
    elif kind.startswith(("rung-", "band", "step-")):
        drawing.add_bar(0, 2, 14, 10, kind)
    elif kind == "warm":
        drawing.add_diamond(7, 7, 5, kind)
    else:
        drawing.add_dot(7, 7, 5, kind)
    return drawing.render("").replace('role="img" aria-label=""', 'aria-hidden="true"')
