"""The tables and the picture of vLLM under load come from its rows and from nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from _load_picture import draw_load  # noqa: E402
from vllm_load import COLUMNS, read_rows, tabulate  # noqa: E402

KINDS = {"stock": 700.0, "fast": 40.0, "balanced": 120.0}


def make_row(kind: str, name: str, ttft: float) -> dict[str, Any]:
    numbers = {"ttft_p50": ttft, "ttft_max": ttft + 1, "itl_p50": 5.0, "itl_p99": 9.0, "itl_max": 10.0}
    return {"kind": kind, "what": "load", "name": name, "decode_tok_s": 1e5 / ttft, "n": 8, **numbers}


def make_rows() -> list[dict[str, Any]]:
    return [make_row(kind, name, ttft) for kind, ttft in KINDS.items() for name in ("four a second", "one a second")]


def test_other_lines_of_a_file_of_rows_are_skipped(tmp_path: Path) -> None:
    lines = [
        {"what": "start", "kind": "stock"},
        make_row("stock", "opted out", 1.0),
        make_row("fast", "one a second", 2.0),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_rows(path) == lines[2:]


def test_rows_stand_in_the_order_of_loads_then_engines() -> None:
    assert [row[:3] for row in tabulate(make_rows())] == [
        ["one a second", "stock vLLM", 700.0],
        ["one a second", "fast", 40.0],
        ["one a second", "balanced", 120.0],
        ["four a second", "stock vLLM", 700.0],
        ["four a second", "fast", 40.0],
        ["four a second", "balanced", 120.0],
    ]


def test_the_last_measurement_of_a_load_counts() -> None:
    again = [make_row("fast", "one a second", 99.0), make_row("fast", "one a second", 41.0)]
    assert [row[2] for row in tabulate(again)] == [41.0]


def test_the_picture_has_a_bar_for_each_figure_and_names_it() -> None:
    result = {
        "tables": [{"title": "", "columns": list(COLUMNS), "rows": tabulate(make_rows())}],
        "notes": ["a & b"],
        "arguments": {"measured_on": "one GPU"},
    }
    picture = ElementTree.fromstring(draw_load(result))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    bars = [element for element in picture.iter("{http://www.w3.org/2000/svg}rect") if element.get("class") != "ground"]
    assert len(bars) == 2 * 6
    assert texts.count("700") == 2
    assert "Four long prompts a second: first token after 120 ms instead of 700 ms" in texts
    assert "a & b" in texts
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[0] == 300.0
    assert widths[2] == pytest.approx(300.0 * 40 / 700, abs=0.05)
