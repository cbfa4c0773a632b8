"""The picture of the README: vLLM under load, drawn as SVG from the table of `bench/vllm_load.py`."""

from __future__ import annotations

from typing import Any

from semblend.web.charts import Drawing, write_plain_style

KINDS = {"stock vLLM": "stock", "balanced": "ours-1", "fast": "ours-2"}
"""The mode that a bar is coloured by; of an engine with donors on the GPU the same, in a row that says so."""
LOADS = {"four a second": "four times a second", "eight at once": "eight at once"}
BUSY, RATE = "four a second", 4
PANELS = (("TTFT p50 ms", "Time to first token of the long prompts, p50, ms"),
          ("decode tokens/s", "Tokens a second of those that decode meanwhile"))  # fmt: skip
WIDTH, TOP, BAR, STEP, GROUP = 1000, 96, 20, 26, 44
NAMES, PANEL, GAP, VALUE = 310, 250, 90, 8


def date_note(note: str) -> str:
    """A note of a run before 2026-11-18: what it calls the default, donors in 4 GiB of host memory, was it then."""
    return note.replace("0, the default:", "0:").replace("and the default, 4 GiB, holds", "and 4 GiB hold")


def draw_load(result: dict[str, Any]) -> str:
    """Bars for each load and engine: first token on the left, everybody else's tokens on the right."""
    table = result["tables"][0]
    at = {name: table["columns"].index(name) for name in table["columns"]}
    rows = [row for row in table["rows"] if row[at["load"]] in LOADS]
    kept = (f"{BUSY}:", "donor_device_bytes", "prompts that")
    said = [date_note(note) for note in result["notes"] if note.startswith(kept)]
    drawing = Drawing(WIDTH, TOP + len(rows) * STEP + len(LOADS) * GROUP + 2 + 16 * len(said))
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
            mode = row[at["engine"]].partition(",")[0]
            where = {None: "", 0: ", donors on the host"}.get(row[at["donor_device_bytes"]], ", donors on the GPU")
            words = mode + where
            drawing.add_text(NAMES - 10, y + 15, words, "faded", "end")
            for column, left, _ in panels:
                value, longest = row[at[column]], max(other[at[column]] for other in rows)
                width = PANEL * value / longest
                drawing.add_bar(left, y, max(width, 1), BAR, KINDS[mode])
                drawing.add_text(left + width + VALUE, y + 15, f"{value:,.0f}", "name")
            y += STEP
        y += GROUP - STEP
    for number, note in enumerate(said):
        drawing.add_text(20, y + 4 + 16 * number, note, "tick")
    return drawing.render(headline, write_plain_style()) + "\n"


def _write_headline(rows: list[list[Any]], at: dict[str, int]) -> str:
    """Say in one sentence what the busiest load shows, with what mode balanced does beside stock vLLM."""
    busy = {row[at["engine"]]: row for row in rows if row[at["load"]] == BUSY}
    stock, balanced = busy["stock vLLM"], busy["balanced"]
    seconds = stock[at["arrivals"]] / RATE
    return (
        f"Four long prompts a second for {seconds:.0f} s: first token after {balanced[at['TTFT p50 ms']]:,.0f} ms, "
        f"in stock vLLM after {stock[at['TTFT p50 ms']]:,.0f} ms"
    )
