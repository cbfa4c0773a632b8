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

from lib.load_picture import draw_load  # noqa: E402
from vllm_load import COLUMNS, describe_overload, read_rows, tabulate  # noqa: E402

KINDS = {"stock": 700.0, "fast": 40.0, "balanced": 120.0, "fast-host": 70.0, "balanced-host": 140.0}
DONOR_BYTES = 30


def make_row(kind: str, name: str, ttft: float) -> dict[str, Any]:
    numbers = {"ttft_p50": ttft, "ttft_max": ttft + 1, "itl_p50": 5.0, "itl_p99": 9.0, "itl_max": 10.0}
    return {"kind": kind, "what": "load", "name": name, "decode_tok_s": 1e5 / ttft, "n": 8, **numbers}


def make_rows() -> list[dict[str, Any]]:
    return [make_row(kind, name, ttft) for kind, ttft in KINDS.items() for name in ("eight at once", "four a second")]


def test_other_lines_of_a_file_of_rows_are_skipped(tmp_path: Path) -> None:
    lines = [
        {"what": "start", "kind": "stock"},
        make_row("stock", "opted out", 1.0),
        make_row("fast", "one a second", 2.0),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_rows(path) == lines[2:]


def test_rows_stand_in_the_order_of_loads_and_what_needs_no_setting_comes_first() -> None:
    shown = ["load", "engine", "donor_device_bytes", "TTFT p50 ms"]
    assert list(COLUMNS[: len(shown)]) == shown
    own = [
        ["stock vLLM", None, 700.0],
        ["balanced", 0, 140.0],
        ["fast", 0, 70.0],
        ["balanced, donors on the GPU", DONOR_BYTES, 120.0],
        ["fast, donors on the GPU", DONOR_BYTES, 40.0],
    ]
    assert [row[:4] for row in tabulate(make_rows(), DONOR_BYTES)] == [
        [load, *row] for load in ("four a second", "eight at once") for row in own
    ]


def test_the_last_measurement_of_a_load_counts() -> None:
    again = [make_row("fast", "one a second", 99.0), make_row("fast", "one a second", 41.0)]
    assert [row[3] for row in tabulate(again, DONOR_BYTES)] == [41.0]


def test_a_load_that_stock_vllm_cannot_keep_up_with_says_for_how_long_it_came() -> None:
    times = {"stock": 16.8, "fast": 6.0}
    rows = [make_row(kind, "four a second", 1.0) | {"n": 24, "every": 0.25, "wall_s": s} for kind, s in times.items()]
    rows += [make_row("stock", "eight at once", 1.0) | {"every": 0.0, "wall_s": 5.0}]
    assert describe_overload(rows) == [
        "four a second: prompts come 2.8 times as fast as stock vLLM computes them, for 6 s; its TTFT grows with every "
        "second that this lasts"
    ]


def test_the_picture_has_a_bar_for_each_figure_and_says_what_needs_a_setting() -> None:
    result = {
        "tables": [{"title": "", "columns": list(COLUMNS), "rows": tabulate(make_rows(), DONOR_BYTES)}],
        "notes": ["prompts that share a & b", "four a second: for 2 s", "ITL: nobody asks"],
        "arguments": {"measured_on": "one GPU"},
    }
    picture = ElementTree.fromstring(draw_load(result))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    bars = [element for element in picture.iter("{http://www.w3.org/2000/svg}rect") if element.get("class") != "ground"]
    assert len(bars) == 2 * 10
    assert texts.count("700") == 2
    assert "Four long prompts a second for 2 s: first token after 140 ms, in stock vLLM after 700 ms" in texts
    assert {"prompts that share a & b", "four a second: for 2 s"} <= set(texts)
    assert texts.count("balanced, donors on the host") == texts.count("fast, donors on the GPU") == 2
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[0] == 250.0
    assert widths[2] == pytest.approx(250.0 * 140 / 700, abs=0.05)
