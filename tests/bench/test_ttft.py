"""What the time-to-first-token benchmark derives from its times, and that a second run goes on where one ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import numpy as np
import ttft
from hypothesis import given
from hypothesis import strategies as st
from lib import ttft_cells
from lib import ttft_tables as tables


def cell(**ttft_ms: list[float]) -> dict[str, Any]:
    arms = {arm: {"ttft_ms": values, "wall_ms": values, "cpu_ms": values} for arm, values in ttft_ms.items()}
    return {"tokens": 4096, "tier": "host", "arms": arms, "floor": {"copy_ms": 1.0, "gap_ms": 4.0}}


MS = st.floats(1.0, 1e5)


@given(cold=MS, over=st.floats(0.0001, 1.0), gain=st.floats(0.001, 0.999))
def test_at_the_break_even_hit_rate_the_mean_is_that_of_no_reuse(cold: float, over: float, gain: float) -> None:
    miss, hit = cold * (1 + over), cold * (1 - gain)
    share = tables.break_even(cold, miss, hit)
    assert share is not None
    assert 0 < share < 1
    assert share * hit + (1 - share) * miss == pytest.approx(cold)


def test_a_hit_that_is_slower_than_cold_never_breaks_even_and_a_free_miss_always_does() -> None:
    assert tables.break_even(10.0, 11.0, 10.5) is None
    assert tables.break_even(10.0, 10.0, 5.0) == 0.0


def test_overhead_and_gain_are_taken_within_a_round() -> None:
    slow_minute = cell(cold=[100.0, 1000.0, 100.0], miss=[101.0, 1010.0, 101.0], fast=[10.0, 100.0, 10.0])
    assert tables.overhead(slow_minute) == pytest.approx(np.full(3, 0.01))
    assert tables.times_faster(slow_minute, "fast") == pytest.approx(10.0)
    low, high = tables.interval(tables.overhead(slow_minute))
    assert low == pytest.approx(high) == pytest.approx(0.01)
    assert tables.floor_ms(slow_minute) == 5.0


def test_a_cell_asks_every_arm_and_its_parts_are_what_the_arms_say() -> None:
    model = ttft_cells.load("shape:tiny", "cpu")
    found = ttft_cells.Cell(model, ttft_cells.random_tokens(5000, 3), 400, "host", gated=False).measure(2, 0)
    kinds = ("exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens")
    sums = {arm: {sum(parts) for parts in zip(*(a[k] for k in kinds), strict=True)} for arm, a in found["arms"].items()}
    assert sums == {"cold": {400}, "miss": {400}, "exact": {401}, "fast": {400}, "balanced": {400}}
    assert set(found["arms"]["exact"]["exact_tokens"]) == {400}
    assert set(found["arms"]["miss"]["reused_tokens"]) == {0}
    assert all(found["arms"]["miss"]["lookup_ms"])
    assert min(found["arms"]["fast"]["reused_tokens"]) > min(found["arms"]["balanced"]["reused_tokens"]) > 200
    assert found["floor"]["bytes"] == (400 - 56) * 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, dimensions, float32


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> dict[str, Any]:
    words = ["ttft.py", "--model", "shape:tiny", "--rounds", "1", "--warm-up", "0", "--out", str(out), *more]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(ttft.torch, "set_num_threads", lambda count: None)  # the other tests' threads stay theirs
    assert ttft.main() == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "ttft.json"
    one = run(monkeypatch, out, "--lengths", "200")
    with (tmp_path / "ttft.cells.jsonl").open("a") as file:
        file.write('{"key": {"tokens"')  # a run that was killed while it wrote
        file.write("\n")
    theirs = {"cells": [{"tokens": 200, "cold_ms": [9.0], "exact_ms": [3.0]}, {"tokens": 300, "error": "OOM"}]}
    (tmp_path / "vllm.json").write_text(json.dumps(theirs))
    two = run(monkeypatch, out, "--lengths", "200", "300", "--vllm-json", str(tmp_path / "vllm.json"))
    assert two["cells"][0] == one["cells"][0]
    assert [found["tokens"] for found in two["cells"]] == [200, 300]
    beside = next(table for table in two["tables"] if "vLLM" in table["title"])
    (row,) = beside["rows"]
    said = dict(zip(beside["columns"], row, strict=True))
    assert said["cold / vLLM cold"] == pytest.approx(one["cells"][0]["arms"]["cold"]["ttft_ms"][0] / 9.0)
    assert any("300" in note and "OOM" in note for note in two["notes"])
    other = run(monkeypatch, out, "--lengths", "200", "--again")
    assert other["cells"][0]["arms"]["cold"]["ttft_ms"] != one["cells"][0]["arms"]["cold"]["ttft_ms"]


def test_a_cpu_is_not_asked_for_a_device_tier(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["ttft.py", "--tier", "device"])
    with pytest.raises(SystemExit):
        ttft.main()
    assert "hint: --tier host" in capsys.readouterr().err
