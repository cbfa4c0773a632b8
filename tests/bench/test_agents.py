"""Tables and picture of agents come from the rows that were measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import agents
from lib.run_picture import ONE_RUN, draw_run

EDITED_MS = {"a": 90.0, "b": 40.0, "c": 60.0}


def make_run(name: str, edited_ms: float, length: int = 4096) -> list[dict[str, Any]]:
    """Three steps of both arms; the last one is behind an edit, where stock takes 100 ms."""
    rows = []
    for step, what in enumerate(("first", "grown", "edited")):
        for arm in ("stock", "ours"):
            ms = {"stock": 100.0, "ours": edited_ms}[arm] if what == "edited" else 20.0
            rows.append({
                "engine": "vllm", "script": name, "kind": "whole run", "dataset": "d", "length": length, "arm": arm,
                "step": step, "what": what, "tokens": 1000, "ttft_ms": ms, "cached": 0, "answer": "yes",
                "prefill_tokens": 100, "recomputed_tokens": 50, "reused_tokens": 850,
            })  # fmt: skip
    return rows


ROWS = [row for name, ms in EDITED_MS.items() for row in make_run(name, ms)]


def test_the_run_that_is_shown_is_the_middle_one_of_the_longest() -> None:
    name, lines = agents.tabulate_one_run([*ROWS, *make_run("short", 1.0, length=1024)])
    assert name == "c"
    assert [line[1] for line in lines] == ["first", "grown", "edited"]
    assert lines[2][3:7] == [100.0, 60.0, 1000, 150]


def test_without_whole_runs_nothing_is_shown() -> None:
    assert agents.tabulate_one_run([row | {"kind": "cleared"} for row in ROWS]) == ("", [])


def test_tokens_computed_are_what_the_receipts_say_and_for_stock_what_its_cache_did_not_hold() -> None:
    [line] = agents.tabulate_runs(ROWS)
    assert line[:5] == ["vllm", "d", 3, 9, 3]
    assert line[6:9] == [9000, 1350, 0.15]


def test_the_picture_says_what_the_edited_steps_take() -> None:
    columns = ["number", "step", "tokens", "stock ms", "ours ms", "stock computes", "ours computes", "why"]
    table = {"title": f"{ONE_RUN}: c", "columns": columns, "rows": agents.tabulate_one_run(ROWS)[1]}
    drawn = draw_run({"tables": [table], "arguments": {"measured_on": "a machine"}})
    assert "an agent waits 60 ms for the first token, in stock 100 ms" in drawn
    assert drawn.count(">edited<") == 1
    assert "150 of 1,000 tokens computed" in drawn
