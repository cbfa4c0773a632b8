"""The picture of the README: vLLM under load, drawn as SVG from the table of `bench/vllm_load.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from semblend.web.palette import write_plain_style
from semblend.web.svg import Drawing

KINDS = ("stock", "ours-1", "ours-2", "ours-3")  # of the engines, in the order of the table
LOADS = {"one a second": "once a second", "four a second": "four times a second"}
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
    drawing = Drawing(WIDTH, TOP + len(rows) * STEP + len(LOADS) * GROUP + 18)
    headline = _write_headline(rows, at)
    drawing.add_text(20, 34, headline, "title")
    drawing.add_text(20, 54, result["arguments"]["measured_on"], "faded")
    panels = [(column, NAMES + number * (PANEL + GAP), words) for number, (column, words) in enumerate(PANELS)]
    for _, left, words in panels:
        drawing.add_text(left, TOP - 18, words, "faded")
    y = float(TOP)
    for load, words in LOADS.items():
        drawing.add_text(20, y + 14, f"Long prompts arrive {words}", "big")
        y += STEP
        for row in [row for row in rows if row[at["load"]] == load]:
            name = row[at["engine"]]
            drawing.add_text(NAMES - 10, y + 15, name.replace("donors in host memory", "host"), "faded", "end")
            for column, left, _ in panels:
                value, longest = row[at[column]], max(other[at[column]] for other in rows)
                width = PANEL * value / longest
                drawing.add_bar(left, y, max(width, 1), BAR, KINDS[engines.index(name)])
                drawing.add_text(left + width + VALUE, y + 15, f"{value:,.0f}", "name")
            y += STEP
        y += GROUP - STEP
    drawing.add_text(20, y + 4, "; ".join(result["notes"][:1]), "tick")
    return drawing.render(headline, write_plain_style()) + "\n"


def _write_headline(rows: list[list[Any]], at: dict[str, int]) -> str:
    """Say in one sentence what the busiest load shows."""
    busy = {row[at["engine"]]: row[at["TTFT p50 ms"]] for row in rows if row[at["load"]] == list(LOADS)[-1]}
    stock, balanced = busy["stock vLLM"], busy["balanced"]
    return f"Four long prompts a second: first token after {balanced:,.0f} ms instead of {stock:,.0f} ms"
