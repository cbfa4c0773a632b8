"""The picture of the README: vLLM under load, drawn as SVG from the table of `bench/vllm_load.py`."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any

INK, FAINT, PAPER = "#22262b", "#6d747d", "#fbfaf7"
COLOURS = ("#8d939c", "#e76f51", "#e9a820", "#f2cf7a")  # of the engines, in the order of the table
LOADS = ("one a second", "four a second")
PANELS = (("TTFT p50 ms", "Time to first token of the long prompts, p50, ms"),
          ("decode tokens/s", "Tokens a second of the requests that decode meanwhile"))  # fmt: skip
WIDTH, TOP, BAR, STEP, GROUP = 1000, 96, 20, 26, 44
NAMES, PANEL, GAP, VALUE = 210, 300, 90, 8


def draw_load(result: dict[str, Any]) -> str:
    """Bars for each load and engine: first token on the left, everybody else's tokens on the right."""
    table = result["tables"][0]
    at = {name: table["columns"].index(name) for name in table["columns"]}
    rows = [row for row in table["rows"] if row[at["load"]] in LOADS]
    measured = Counter(row[at["engine"]] for row in rows)
    engines = [name for name, count in measured.items() if count == len(LOADS)]  # the others have no second bar
    rows = [row for row in rows if row[at["engine"]] in engines]
    parts, y = [], TOP
    for load in LOADS:
        parts.append(
            _text(
                20,
                y + 14,
                f"Long prompts arrive {load.replace('one', 'once').replace('four', 'four times')}",
                bold=True,
            )
        )
        y += STEP
        for row in [row for row in rows if row[at["load"]] == load]:
            parts.append(
                _text(
                    NAMES - 10,
                    y + 15,
                    row[at["engine"]].replace("donors in host memory", "host"),
                    anchor="end",
                    colour=FAINT,
                )
            )
            for number, (column, _) in enumerate(PANELS):
                longest = max(other[at[column]] for other in rows)
                left, width = NAMES + number * (PANEL + GAP), PANEL * row[at[column]] / longest
                colour = COLOURS[engines.index(row[at["engine"]])]
                parts.append(f'<rect x="{left}" y="{y}" width="{max(width, 1):.1f}" height="{BAR}" fill="{colour}"/>')
                parts.append(_text(left + width + VALUE, y + 15, f"{row[at[column]]:,.0f}"))
            y += STEP
        y += GROUP - STEP
    for number, (_, words) in enumerate(PANELS):
        parts.append(_text(NAMES + number * (PANEL + GAP), TOP - 18, words, colour=FAINT))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 18}" font-family="sans-serif">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        _text(20, 34, _headline(rows, at), bold=True, size=19),
        _text(20, 54, result["arguments"]["measured_on"], colour=FAINT),
        *parts,
        _text(20, y + 4, "; ".join(result["notes"][:1]), colour=FAINT, size=11),
        "</svg>",
    ]) + "\n"  # fmt: skip


def _headline(rows: list[list[Any]], at: dict[str, int]) -> str:
    """What the busiest load shows, in one sentence."""
    busy = {row[at["engine"]]: row[at["TTFT p50 ms"]] for row in rows if row[at["load"]] == LOADS[-1]}
    stock, balanced = busy["stock vLLM"], busy["balanced"]
    return f"Four long prompts a second: first token after {balanced:,.0f} ms instead of {stock:,.0f} ms"


def _text(
    x: float, y: float, words: str, *, bold: bool = False, anchor: str = "start", colour: str = INK, size: int = 13
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    look = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"{weight}'
    return f'<text x="{x:.1f}" y="{y}" {look}>{escape(words)}</text>'
