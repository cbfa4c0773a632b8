"""Tables of a page: they scroll inside their box, and numbers are aligned to the right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

DASH = "–"


def render_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, classes: Mapping[int, str] | None = None
) -> str:
    """Return a table that scrolls inside its box; numbers are aligned to the right."""
    kinds = classes or {}
    kept = [tuple(row) for row in rows]
    numeric = {at for at in range(len(head)) if at and at not in kinds and _are_numbers([row[at] for row in kept])}

    def render_cell(at: int, words: str) -> str:
        kind = kinds.get(at) or ("num" if at in numeric else "")
        shown = escape(words)
        if kind == "key":  # a long name may break where a person would break it
            shown = shown.replace("_", "_<wbr>").replace(".", ".<wbr>")
        return f'<td class="{kind}">{shown}</td>' if kind else f"<td>{shown}</td>"

    top = "".join(
        f'<th scope="col"{" class=num" if at in numeric else ""}>{escape(word)}</th>' for at, word in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(render_cell(at, words) for at, words in enumerate(row))}</tr>" for row in kept)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _are_numbers(cells: Sequence[str]) -> bool:
    shown = [cell for cell in cells if cell != DASH]
    return bool(shown) and all(cell[:1].isdigit() or cell[:1] in "-+" for cell in shown)
