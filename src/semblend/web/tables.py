"""Tables of a page: they scroll inside their box, and numbers are aligned to the right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

DASH = "–"


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
