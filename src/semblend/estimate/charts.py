"""Charts of the page, each for a wide page and for a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from semblend.estimate.words import format_count, format_share
from semblend.web.svg import Drawing, Scale

WIDE, NARROW = 900.0, 360.0
_LEFT, _RIGHT, _ROW, _NAME, _AXIS = 250.0, 64.0, 26.0, 18.0, 40.0


def draw_steps(answer: Mapping[str, Any]) -> tuple[str, str]:
    """One bar for each step, from what the steps before saved to what is saved with it."""
    rows = answer["rows"]
    label = "Bars: share of the prompt tokens that each step saves on top of those before it"
    return _draw_steps(rows, WIDE).render(label), _draw_steps(rows, NARROW).render(label)


def _draw_steps(rows: Sequence[Mapping[str, Any]], width: float) -> Drawing:
    narrow = width < 500
    left, pitch = (4.0 if narrow else _LEFT), _ROW + (_NAME if narrow else 0.0)
    drawing = Drawing(width, pitch * len(rows) + _AXIS)
    scale = Scale(0.0, 1.0, left, width - _RIGHT)
    bottom = pitch * len(rows) + 4
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.add_line(scale(tick), 0, scale(tick), bottom, "grid")
        drawing.add_text(scale(tick), bottom + 14, format_share(tick), "tick", "middle")
    drawing.add_text(scale.end, bottom + 29, "of all prompt tokens", "axis", "end")
    before = 0.0
    for at, row in enumerate(rows):
        top = pitch * at + (_NAME if narrow else 0.0) + 4
        after = before + row["saved_share"]
        title = _shorten(str(row["title"]), 44 if narrow else 36)
        if narrow:
            drawing.add_text(left, top - 4, title, "name")
        else:
            drawing.add_text(left - 12, top + 13, title, "name", "end")
        low, high = sorted((before, after))
        if at:
            drawing.add_bar(scale(0), top, scale(low) - scale(0), _ROW - 8, "step-before")
        kind = "step-prefix" if at == 0 else "step-gain" if after >= before else "step-loss"
        hover = f"{row['title']}: {row['saved_tokens']:+,} tokens"
        drawing.add_bar(scale(low), top, max(1.0, scale(high) - scale(low)), _ROW - 8, kind, hover)
        sign = "+" if at and row["saved_tokens"] > 0 else ""
        drawing.add_text(scale(high) + 6, top + 13, f"{sign}{format_share(row['saved_share'])}", "label")
        before = after
    return drawing


def draw_memory(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Two curves over the size of the cache: prompts as they are, and as the steps would send them."""
    label = "Curves: share of the prompt tokens in an exact prefix cache, by its size"
    return _draw_memory(answer, WIDE).render(label), _draw_memory(answer, NARROW).render(label)


def _draw_memory(answer: Mapping[str, Any], width: float) -> Drawing:
    curves, whole = answer["curves"], max(1, answer["total"]["prompt_tokens"])
    sizes = curves["cache_tokens"]
    drawing = Drawing(width, 250)
    across = Scale(sizes[0], max(sizes[-1], sizes[0] + 1), 44, width - (96 if width > 500 else 16), log=True)
    up = Scale(0.0, 1.0, 200, 12)
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.add_line(across.start, up(tick), across.end, up(tick), "grid")
        drawing.add_text(across.start - 6, up(tick) + 4, format_share(tick), "tick", "end")
    for size in sizes if width > 500 else sizes[::2]:
        drawing.add_text(across(size), 217, format_count(size), "tick", "middle")
    drawing.add_text(across.end, 236, "tokens of KV in the cache, by ratio", "axis", "end")
    now = across(answer["options"]["cache_tokens"])
    drawing.add_line(now, up.end, now, up.start, "ceiling")
    drawing.add_text(now + 4, up.end + 10, "now", "tick")
    ends: list[tuple[float, str]] = []
    for name, kind, words in (
        ("as_it_is", "curve-before", "as it is"),
        ("after_steps", "curve-after", "with the steps"),
    ):
        shares = [hits / whole for hits in curves[name]]
        points = [(across(size), up(share)) for size, share in zip(sizes, shares, strict=True)]
        for (x1, y1), (x2, y2) in pairwise(points):
            drawing.add_line(x1, y1, x2, y2, kind)
        for (x, y), size, share in zip(points, sizes, shares, strict=True):
            drawing.add_dot(x, y, 4, kind, f"{words}, {size:,} tokens: {format_share(share)}")
        ends.append((points[-1][1], words))
    # Two curves that end alike have their names one below the other.
    (lower, first), (upper, second) = ends
    gap = max(0.0, 14.0 - (lower - upper)) / 2
    for y, words in ((lower + gap, first), (upper - gap, second)):
        at_end = (across.end + 10, y + 4) if width > 500 else (across.end, y - 9)
        drawing.add_text(*at_end, words, "label", "start" if width > 500 else "end")
    return drawing


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
