"""The page of bench/day.py: what happened in a day, from its result file alone, with the style of our reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from semblend.web.figures import Figure, draw_both, is_narrow
from semblend.web.report import Tile, render_document, render_figure, render_head, render_list, render_tiles
from semblend.web.svg import Drawing, Scale
from semblend.web.tables import render_table

ROW = 64.0


def render_day(result: Mapping[str, Any]) -> str:
    """The whole page."""
    requests, events, checks = result["requests"], result["events"], result["checks"]
    good = [one for one in requests if one["status"] == 200]
    total = sum(one["prompt_tokens"] for one in good)
    saved = sum(one["exact_tokens"] + one["reused_tokens"] for one in good)
    wrong = [one for one in checks["answers"] if not one["equal"]]
    made = result["provenance"]
    how = f"{made['command']}, {made['date'][:10]}, {made['cpu_model']}, {made['cpu_cores']} cores"
    title = "A day in production, on one machine"
    timeline = Figure(
        "when",
        "When",
        draw_both(lambda width: _draw_timeline(result, width), "requests over time, by engine"),
        (
            ("warm", "reused something"),
            ("cold", "reused nothing"),
            ("bad", "no answer"),
            ("limit", "a process is killed"),
            ("ceiling", "it is back"),
        ),
        "Every mark is a request, at the time when it was sent, on the engine that answered it. The lower a mark "
        "stands in its row, the longer its answer took.",
    )
    body = [
        render_head(title, (), _write_verdict(requests, events, checks, saved / max(1, total))),
        render_tiles(_list_tiles(requests, checks, saved, total)),
        render_figure(timeline),
        *(_render_table(table) for table in result["tables"]),
        f"<h2>Answers that differ from cold ones</h2>{_render_differing(wrong)}",
        f"<h2>How it was made</h2>{render_list([*result['notes'], how])}",
    ]
    return render_document(title, body)


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


def _list_tiles(requests: Sequence[Mapping[str, Any]], checks: Mapping[str, Any], saved: int, total: int) -> list[Tile]:
    lost = sum(one["status"] != 200 for one in requests)
    crossed = len(checks["tenants"]["with_reuse"]) + len(checks["tenants"]["answers_with_a_foreign_code"])
    moved = [one["equal"] for one in checks["answers"] if one["reused_tokens"]]
    exact = [one["equal"] for one in checks["answers"] if not one["reused_tokens"]]
    return [
        Tile(f"{len(requests)}", "requests", "each accounted for"),
        Tile(f"{lost}", "without an answer", "an engine and Redis were killed", "bad" if lost else "good"),
        Tile(f"{100 * saved / max(1, total):.0f} %", "of prompt tokens not computed", f"{saved:,} of {total:,}",
             "good"),
        Tile(f"{crossed}", "crossed tenants", f"{checks['tenants']['first_questions']} first questions looked at",
             "bad" if crossed else "good"),
        Tile(f"{sum(exact)} of {len(exact)}", "answers equal to cold ones", "of a sample with exact reuse alone",
             "bad" if not all(exact) else "good"),
        Tile(f"{sum(moved)} of {len(moved)}", "answers equal to cold ones", "of a sample with moved KV"),
    ]  # fmt: skip


def _draw_timeline(result: Mapping[str, Any], width: float) -> Drawing:
    requests, events = result["requests"], result["events"]
    names = {
        row[0].split(" ")[0]: row[0]
        for table in result["tables"]
        if table["title"] == "By replica"
        for row in table["rows"]
    }
    narrow = is_narrow(width)
    left = 12.0 if narrow else 150.0
    rows = sorted({one["replica"] or "none" for one in requests})
    above = 18.0 if narrow else 0.0  # room for a name above its row
    pitch = ROW + above
    height = pitch * len(rows) + 60
    last = max([one["at_s"] + one["seconds"] for one in requests] + [at for at, _ in events])
    across = Scale(0, last, left, width - 12)
    slowest = max(one["seconds"] for one in requests)
    drawing = Drawing(width, height)
    for at, words in events:
        drawing.add_line(across(at), 26, across(at), height - 26, "limit" if "killed" in words else "ceiling")
    for place, (at, words) in enumerate([] if narrow else events):  # a phone has no room for them
        late = across(at) > width - 160
        drawing.add_text(across(at) - 4 if late else across(at) + 4, 12 + 11 * (place % 2), words, "tick",
                         "end" if late else "start")  # fmt: skip
    for number, name in enumerate(rows):
        top = 30 + pitch * number + above
        drawing.add_line(left, top + ROW - 6, width - 12, top + ROW - 6, "grid")
        at = (left, top - 6) if narrow else (left - 8, top + ROW / 2)
        drawing.add_text(*at, names.get(name, name), "name", "start" if narrow else "end")
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
    for at in across.choose_ticks(3 if narrow else 6):
        drawing.add_text(across(at), height - 8, f"{at / 60:.1f} min", "tick", "middle")
    return drawing


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
