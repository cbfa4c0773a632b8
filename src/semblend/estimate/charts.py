"""Charts of the page, each for a wide page and for a phone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semblend.estimate.words import format_count, format_share
from semblend.web.figures import Axis, RowFrame, begin_plot, draw_both, is_narrow, spread_out
from semblend.web.svg import Drawing

_BAR = 18.0


def draw_steps(answer: Mapping[str, Any]) -> tuple[str, str]:
    """One bar for each step, from what the steps before saved to what is saved with it."""

    def draw(width: float) -> Drawing:
        rows = answer["rows"]
        most = 44 if is_narrow(width) else 36
        frame = RowFrame([_shorten(str(row["title"]), most) for row in rows], width, row=_BAR + 8, beside=250.0)
        drawing, scale = frame.begin(0.0, 1.0, format_share, "of all prompt tokens")
        before = 0.0
        for at, row in enumerate(rows):
            middle = frame.find_middle(at)
            after = before + row["saved_share"]
            low, high = sorted((before, after))
            if at:
                drawing.add_bar(scale(0), middle - _BAR / 2, scale(low) - scale(0), _BAR, "step-before")
            kind = "step-prefix" if at == 0 else "step-gain" if after >= before else "step-loss"
            hover = f"{row['title']}: {row['saved_tokens']:+,} tokens"
            drawing.add_bar(scale(low), middle - _BAR / 2, max(1.0, scale(high) - scale(low)), _BAR, kind, hover)
            sign = "+" if at and row["saved_tokens"] > 0 else ""
            drawing.add_text(scale(high) + 6, middle + 4, f"{sign}{format_share(row['saved_share'])}")
            before = after
        return drawing

    return draw_both(draw, "Bars: share of the prompt tokens that each step saves on top of those before it")


def draw_memory(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Two curves over the size of the cache: prompts as they are, and as the steps would send them."""
    curves, whole = answer["curves"], max(1, answer["total"]["prompt_tokens"])
    sizes = curves["cache_tokens"]

    def draw(width: float) -> Drawing:
        narrow = is_narrow(width)
        x = Axis(sizes[0], max(sizes[-1], sizes[0] + 1), format_count, log=True, ticks=sizes[::2] if narrow else sizes)
        words = "tokens of KV in the cache, by ratio"
        drawing, across, up = begin_plot(
            width, 250, x, Axis(0.0, 1.0, format_share), words, left=44, right=16 if narrow else 96
        )
        now = across(answer["options"]["cache_tokens"])
        drawing.add_line(now, up.end, now, up.start, "ceiling")
        drawing.add_text(now + 4, up.end + 10, "now", "tick")
        ends = []
        for name, kind, told in (("as_it_is", "before", "as it is"), ("after_steps", "after", "with the steps")):
            shares = [hits / whole for hits in curves[name]]
            points = [(across(size), up(share)) for size, share in zip(sizes, shares, strict=True)]
            drawing.add_curve(points, f"curve {kind}")
            for (left, down), size, share in zip(points, sizes, shares, strict=True):
                drawing.add_dot(left, down, 4, kind, f"{told}, {size:,} tokens: {format_share(share)}")
            ends.append((points[-1][1], told))
        if not narrow:
            ends.sort()
            for place, (_, told) in zip(spread_out([y for y, _ in ends], 14, up.start), ends, strict=True):
                drawing.add_text(across.end + 10, place + 4, told)
        return drawing

    return draw_both(draw, "Curves: share of the prompt tokens in an exact prefix cache, by its size")


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
