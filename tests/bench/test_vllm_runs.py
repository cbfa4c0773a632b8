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
import vllm_mixed  # noqa: E402
import vllm_pays  # noqa: E402
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


# -- does it pay -------------------------------------------------------------------------------------------------------


def row_of(length: int, cold: float, forced: float, *, begun: bool) -> dict[str, object]:
    arms = {"stock:cold": {"ttft_ms": cold}, "forced:balanced": {"ttft_ms": forced}}
    return {"length": length, "arms": arms | {"ours:balanced": {"reused_tokens": 100 if begun else 0}}}


def test_regret_is_what_the_better_choice_would_have_saved() -> None:
    right = [row_of(4096, 100.0, 50.0, begun=True), row_of(2048, 40.0, 60.0, begun=False)]
    assert [line[-2:] for line in vllm_pays.tabulate_regret(right)] == [[0, 0]] * 3
    wrong = [row_of(2048, 40.0, 60.0, begun=True), row_of(2048, 60.0, 40.0, begun=False)]
    ((_, n, begun, cold, forced, by_prompt, by_length), _) = vllm_pays.tabulate_regret(wrong)
    assert (n, begun, cold, forced) == (2, 0.5, 50.0, 50.0)
    assert (by_prompt, by_length) == (pytest.approx(0.4), pytest.approx(0.2))


def test_the_first_requests_after_a_start_are_set_against_later_ones_of_their_kind() -> None:
    def row(number: int, ms: float) -> dict[str, object]:
        arms = {"ours:miss": {"ttft_ms": ms, "number": number}}
        return {"model": "m", "length": 2048, "arms": arms | {"stock:cold": {"ttft_ms": 20.0}}}

    rows = [row(1, 60.0), row(100, 20.0), *(row(100 + number, 20.0) for number in range(1, 5))]
    assert vllm_pays.tabulate_first(rows) == [["ours", 2, 2.0, pytest.approx(2.8), 3.0, 2.0]]
    assert vllm_pays.tabulate_first(rows[:2]) == []


# -- mixed traffic -----------------------------------------------------------------------------------------------------


def test_both_servers_get_the_same_traffic_and_documents_share_no_text() -> None:
    words = {
        "documents": [list(range(5000))],
        "articles": {"a": [list(range(5000, 5400))]},
        "lead": [[1]],
        "ask": [[2]],
    }
    one, other = (vllm_mixed.Traffic(words, 1000, [200, 300], seed=3) for _ in range(2))
    drawn = one.draw(5.0, 60)
    assert drawn == other.draw(5.0, 60)
    assert [request.at_s for request in drawn] == sorted(request.at_s for request in drawn)
    assert {request.kind for request in drawn} == set(vllm_mixed.KINDS)
    assert len(drawn) == pytest.approx(300, rel=0.2)
    pooled = [token for document in one.pool for token in document]
    assert len(pooled) == len(set(pooled)) >= 1000
    chats = [request.tokens for request in drawn if request.kind == "chat"]
    assert any(later[: len(early)] == early for early in chats for later in chats if len(later) > len(early))


def test_a_request_is_in_time_when_its_first_token_and_every_later_one_are() -> None:
    def answer(ttft: float, *gaps: float) -> dict[str, object]:
        return {"kind": "short", "ttft_ms": ttft, "gaps": list(gaps), "prompt": 100, "cached": 25}

    found = vllm_mixed.summarize([answer(400.0, 20.0), answer(400.0, 20.0, 51.0), answer(501.0, 20.0)], asked=4)
    assert (found["in_time"], found["first_in_time"], found["answered"]) == (0.25, 0.5, 3)
    assert (found["gap_max"], found["cached_share"], found["chat_p50"]) == (51.0, 0.25, None)
