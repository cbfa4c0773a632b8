"""The vLLM benchmarks: what their tables make of rows, what counts as a failure, and that a second run goes on."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import vllm_http  # noqa: E402
from lib.vllm_loads import BY_VALUE, LOADS, Load, Seen, summarize  # noqa: E402
from lib.vllm_runs import Rows  # noqa: E402


def test_a_second_run_finds_the_rows_of_the_first_and_not_the_line_that_was_cut(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "deep" / "rows.jsonl")
    rows.add({"kind": "fast", "number": 1})
    with rows.path.open("a") as file:
        file.write('{"kind": "fa')
    again = Rows(rows.path)
    assert again.find(kind="fast", number=1) == [{"kind": "fast", "number": 1}]
    assert again.find(kind="fast", number=2) == []


def test_the_rows_behind_a_cut_line_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"number": 1}\n{"numb')
    Rows(path).add({"number": 2})
    assert [row["number"] for row in Rows(path).rows] == [1, 2]


# -- load --------------------------------------------------------------------------------------------------------------


def test_every_load_is_measured_once_and_has_a_place_in_the_table() -> None:
    assert sorted(BY_VALUE) == sorted(load.name for load in LOADS)


def test_arrivals_at_random_moments_come_at_the_same_rate_and_in_order() -> None:
    load = Load("", 4000, 0.25, poisson=True)
    times = load.draw_times(random.Random(1))
    assert times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(0.25, rel=0.1)
    assert len({round(b - a, 6) for a, b in pairwise(times)}) > 3900


def test_what_is_in_time_counts_a_late_arrival_and_a_long_gap_once_each() -> None:
    row = summarize(Load("", 4, 1.0), Seen([0.005] * 98 + [0.051, 0.9], [40.0, 499.0, 501.0], [True], 2.0))
    assert (row["good_share"], row["good_tok_s"], row["decode_tok_s"]) == (0.5, 49.0, 50.0)
    assert (row["itl_max"], row["ttft_max"], row["served"], row["n"]) == (900.0, 501.0, 3, 4)


def test_a_load_in_which_nobody_was_served_still_has_a_row() -> None:
    row = summarize(Load("", 4, 1.0), Seen(wall_s=1.0))
    assert (row["ttft_p50"], row["itl_max"], row["good_share"]) == (None, None, 0.0)


# -- poison ------------------------------------------------------------------------------------------------------------


def test_an_http_table_counts_misses_overall_and_not_among_hits() -> None:
    hit = {"ttft_ms": 10.0, "ppl": 2.2, "reused_tokens": 500}
    row = {"model": "m", "dataset": "XSum", "length": 8192, "cold": {"ttft_ms": 100.0, "ppl": 2.0}, "fast": hit,
           "balanced": hit | {"reused_tokens": 0}, "miss": {"ttft_ms": 110.0, "ppl": 2.0}}  # fmt: skip
    fast, balanced = vllm_http.tabulate([row])
    assert fast[4:] == [1, 1, 100.0, 10.0, 10.0, pytest.approx(100 / 60), pytest.approx(1.1)]
    assert balanced[5:9] == [0, 100.0, None, None]
