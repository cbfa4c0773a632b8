"""The page of bench/day.py: what happened in a day, from its result file alone, with the style of our reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from semblend.web.report_style import STYLE
from semblend.web.svg import Drawing, Scale
from semblend.web.tables import render_table

WIDE = 900.0
ROW = 64.0


def render_day(result: Mapping[str, Any]) -> str:
    """The whole page."""
    requests, events, checks = result["requests"], result["events"], result["checks"]
    good = [one for one in requests if one["status"] == 200]
    total = sum(one["prompt_tokens"] for one in good)
    saved = sum(one["exact_tokens"] + one["reused_tokens"] for one in good)
    tables = "".join(_render_table(table) for table in result["tables"])
    told = "".join(f"<li>{escape(note)}</li>" for note in result["notes"])
    wrong = [one for one in checks["answers"] if not one["equal"]]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>A day in production</title><style>{STYLE}</style></head><body><main>
<h1>A day in production, on one machine</h1>
<p class="verdict">{escape(_write_verdict(requests, events, checks, saved / max(1, total)))}</p>
{_render_tiles(requests, checks, saved, total)}
<h2>When</h2>
<figure>{_draw_timeline(requests, events, result["tables"])}
<figcaption>Every mark is a request, at the time when it was sent, on the engine that answered it. Diamonds reused
something, dots nothing; a red dot has no answer. The lower a mark stands in its row, the longer its answer
took.</figcaption></figure>
{tables}
<h2>Answers that differ from cold ones</h2>
{_render_differing(wrong)}
<h2>How it was made</h2>
<ul>{told}<li>{escape(result["provenance"]["command"])}, {escape(result["provenance"]["date"][:10])},
{escape(str(result["provenance"]["cpu_model"]))}, {result["provenance"]["cpu_cores"]} cores</li></ul>
</main></body></html>
"""


def _write_verdict(
    requests: Sequence[Mapping[str, Any]], events: Sequence[Sequence[Any]], checks: Mapping[str, Any], share: float
) -> str:
    lost = sum(one["status"] != 200 for one in requests)
    crossed = len(checks["tenants"]["with_reuse"]) + len(checks["tenants"]["answers_with_a_foreign_code"])
    crashes = sum("killed" in words for _, words in events)
    answered = "every one was answered" if not lost else f"{lost} of them had no answer"
    kept = "nothing crossed from one tenant to another" if not crossed else f"{crossed} CROSSED BETWEEN TENANTS"
    return (
        f"{len(requests)} requests of four tenants went through two routers to three engines, while {crashes} "
        f"processes were killed and came back: {answered}, {kept}, and {100 * share:.0f} % of the prompt tokens were "
        "not computed."
    )


def _render_tiles(requests: Sequence[Mapping[str, Any]], checks: Mapping[str, Any], saved: int, total: int) -> str:
    lost = sum(one["status"] != 200 for one in requests)
    crossed = len(checks["tenants"]["with_reuse"]) + len(checks["tenants"]["answers_with_a_foreign_code"])
    moved = [one["equal"] for one in checks["answers"] if one["reused_tokens"]]
    exact = [one["equal"] for one in checks["answers"] if not one["reused_tokens"]]
    tiles = [
        ("", f"{len(requests)}", "requests", "each accounted for"),
        ("bad" if lost else "good", f"{lost}", "without an answer", "an engine and Redis were killed"),
        ("good", f"{100 * saved / max(1, total):.0f} %", "of prompt tokens not computed", f"{saved:,} of {total:,}"),
        ("bad" if crossed else "good", f"{crossed}", "crossed tenants",
         f"{checks['tenants']['first_questions']} first questions looked at"),
        ("bad" if not all(exact) else "good", f"{sum(exact)} of {len(exact)}", "answers equal to cold ones",
         "of a sample with exact reuse alone"),
        ("", f"{sum(moved)} of {len(moved)}", "answers equal to cold ones", "of a sample with moved KV"),
    ]  # fmt: skip
    cells = (
        f'<li class="tile {tone}"><b>{escape(value)}</b><span>{escape(label)}</span><span>{escape(more)}</span></li>'
        for tone, value, label, more in tiles
    )
    return f'<ul class="tiles">{"".join(cells)}</ul>'


def _draw_timeline(
    requests: Sequence[Mapping[str, Any]], events: Sequence[Sequence[Any]], tables: Sequence[Mapping[str, Any]]
) -> str:
    names = {
        row[0].split(" ")[0]: row[0] for table in tables if table["title"] == "By replica" for row in table["rows"]
    }
    rows = sorted({one["replica"] or "none" for one in requests})
    height = ROW * len(rows) + 60
    last = max([one["at_s"] + one["seconds"] for one in requests] + [at for at, _ in events])
    across = Scale(0, last, 150, WIDE - 12)
    slowest = max(one["seconds"] for one in requests)
    drawing = Drawing(WIDE, height)
    for at, words in events:
        drawing.add_line(across(at), 26, across(at), height - 26, "limit" if "killed" in words else "ceiling")
    for place, (at, words) in enumerate(events):
        late = across(at) > WIDE - 160
        drawing.add_text(across(at) - 4 if late else across(at) + 4, 12 + 11 * (place % 2), words, "tick",
                         "end" if late else "start")  # fmt: skip
    for number, name in enumerate(rows):
        top = 30 + ROW * number
        drawing.add_line(150, top + ROW - 6, WIDE - 12, top + ROW - 6, "grid")
        drawing.add_text(142, top + ROW / 2, names.get(name, name), "name", "end")
        down = Scale(0, slowest, top + 4, top + ROW - 12)
        for one in requests:
            if (one["replica"] or "none") != name:
                continue
            hover = f"{one['tenant']}, {one['kind']}: {one['seconds']:.1f} s, {one['prompt_tokens']} tokens"
            place = (across(one["at_s"]), down(one["seconds"]), 3.5)
            if one["status"] != 200:
                drawing.add_dot(*place, "bad", hover)
            elif one["exact_tokens"] + one["reused_tokens"] > 64:
                drawing.add_diamond(*place, "warm", hover)
            else:
                drawing.add_dot(*place, "cold", hover)
    for at in across.choose_ticks(6):
        drawing.add_text(across(at), height - 8, f"{at / 60:.1f} min", "tick", "middle")
    return drawing.render("requests over time, by engine")


def _render_table(table: Mapping[str, Any]) -> str:
    rows = [tuple(_show(cell, name) for cell, name in zip(row, table["columns"], strict=True)) for row in table["rows"]]
    return f"<h2>{escape(table['title'])}</h2>{render_table(table['columns'], rows)}"


def _show(cell: Any, column: str) -> str:
    if isinstance(cell, float):
        return f"{100 * cell:.0f} %" if column.startswith("share") else f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _render_differing(wrong: Sequence[Mapping[str, Any]]) -> str:
    if not wrong:
        return "<p>None.</p>"
    rows = [(f"{one['tenant']}, {one['kind']}", f"{one['reused_tokens']}", one["answer"], one["cold"]) for one in wrong]
    return render_table(["request", "moved tokens", "answer", "cold answer"], rows, classes={2: "value", 3: "value"})
