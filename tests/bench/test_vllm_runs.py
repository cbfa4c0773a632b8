"""The vLLM benchmarks: what their tables make of rows, what counts as a failure, and that a second run goes on."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import run_gpu  # noqa: E402
import vllm_http  # noqa: E402
import vllm_poison  # noqa: E402
import vllm_shuffle  # noqa: E402
import vllm_users  # noqa: E402
from _vllm_loads import BY_VALUE, LOADS, Load, Seen, summarize  # noqa: E402
from _vllm_runs import Rows  # noqa: E402


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


def make_trial(**changed: Any) -> dict[str, Any]:
    return {"load": "quiet", "fault": "noise", "mode": "fast", "tokens": 24, "equal cold again": 24,
            "equal reused": 24, "equal cold later": 24, "loads": 1, "too early": 0, "reason": "validation_failed",
            **changed}  # fmt: skip


def test_equal_answers_after_a_fault_are_no_failure() -> None:
    assert vllm_poison.find_failures([make_trial(), make_trial(load="busy", mode="balanced")]) == []


@pytest.mark.parametrize(
    "changed",
    [{"equal reused": 23}, {"equal cold later": 0}, {"too early": 1}, {"loads": 0}],
    ids=["a token differs", "a later answer differs", "scheduled too early", "nothing was tested"],
)
def test_whatever_breaks_the_claim_is_a_failure(changed: dict[str, int]) -> None:
    (failure,) = vllm_poison.find_failures([make_trial(**changed), make_trial(mode="balanced")])
    assert failure.startswith("quiet, fast, noise")


def test_under_load_a_second_cold_answer_says_how_many_may_differ() -> None:
    noisy = {"load": "busy", "equal cold again": 20, "equal reused": 3}
    assert vllm_poison.find_failures([make_trial(**noisy, **{"equal cold later": 20})]) == []
    assert vllm_poison.find_failures([make_trial(**noisy | {"equal cold again": 24})])


def test_a_model_whose_answers_no_noise_changes_shows_nothing() -> None:
    assert vllm_poison.find_failures([make_trial(fault="unnoticed")])
    assert not vllm_poison.find_failures([make_trial(fault="unnoticed", **{"equal reused": 0})])


def test_reuse_without_a_fault_may_differ() -> None:
    assert vllm_poison.find_failures([make_trial(fault="none", **{"equal reused": 2})]) == []


# -- the others --------------------------------------------------------------------------------------------------------


def make_queries(shares: list[float], kind: str = "fast") -> list[dict[str, Any]]:
    return [{"kind": kind, "attempt": 1, "query": n, "tokens": 1000, "reused_tokens": int(1000 * share), "ttft_ms": 1.0}
            for n, share in enumerate(shares)]  # fmt: skip


def test_decay_compares_the_last_tenth_with_the_first() -> None:
    assert vllm_shuffle.find_decay(make_queries([0.8] * 20), "fast") == 1.0
    assert vllm_shuffle.find_decay(make_queries([0.8] * 10 + [0.4] * 10), "fast") == 0.5
    assert vllm_shuffle.find_decay([], "fast") is None


def test_only_the_last_attempt_of_a_shuffle_counts() -> None:
    old = make_queries([0.1] * 10)
    new = [row | {"attempt": 2} for row in make_queries([0.9] * 10)]
    assert {line[3] for line in vllm_shuffle.tabulate(old + new)} == {0.9}


def test_users_stand_in_the_order_of_engines_with_medians() -> None:
    base = {"questions": "the same", "blocks": 10, "ttft_p50": 1.0, "ttft_max": 2.0, "outcomes": {"cold_fallback": 1}}
    rows = [{"kind": kind, "total_s": total, **base} for kind, total in (("fast", 1.0), ("fast", 3.0), ("stock", 9.0))]
    assert [line[1:3] + line[6:7] for line in vllm_users.tabulate(rows)] == [["stock vLLM", 1, 9.0], ["fast", 2, 2.0]]


def test_an_http_table_counts_misses_overall_and_not_among_hits() -> None:
    hit = {"ttft_ms": 10.0, "ppl": 2.2, "reused_tokens": 500}
    row = {"model": "m", "dataset": "XSum", "length": 8192, "cold": {"ttft_ms": 100.0, "ppl": 2.0}, "fast": hit,
           "balanced": hit | {"reused_tokens": 0}, "miss": {"ttft_ms": 110.0, "ppl": 2.0}}  # fmt: skip
    fast, balanced = vllm_http.tabulate([row])
    assert fast[4:] == [1, 1, 100.0, 10.0, 10.0, pytest.approx(100 / 60), pytest.approx(1.1)]
    assert balanced[5:9] == [0, 100.0, None, None]


def test_a_gpu_run_leaves_eight_files_and_fits_its_time() -> None:
    assert len({step.rows for step in run_gpu.STEPS} | {"log.txt"}) <= 8
    assert all((BENCH / f"{step.script}.py").exists() for step in run_gpu.STEPS)
    first = [step for step in run_gpu.STEPS if not step.needs_weights][:3]
    assert sum(step.seconds for step in first) < 25 * 60
