"""A comparison raises no alarm about two equal servers, and finds one that is a fifth slower."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_samples import live_records, result_of

from sembench.result import LoadPoint, LoadRequest, LoadResult, Result
from sembench.scoring.aggregate import summarize_load
from sembench.scoring.compare import compare_loads, compare_results
from sembench.scoring.statistics import compute_beta_share, compute_p_value, compute_t_tail, select_significant

COMPARISONS, LONG = 8, 20


def simulate_server(seed: int, slower: float = 1.0) -> Result:
    """A server whose times, scores and hits vary from request to request and from document to document."""
    rng = random.Random(seed)
    moods: dict[str | None, float] = {}
    records = []
    for record in live_records(12, seed=1):
        mood = moods.setdefault(record.source_id, rng.gauss(0.0, 0.05))
        noise = slower * pow(2.718, rng.gauss(mood, 0.15))
        score = min(max((record.quality_f1 or 0.0) + rng.gauss(0.0, 0.1), 0.0), 1.0)
        close = None if record.cold_f1 is None else min(max(record.cold_f1 + rng.gauss(0.0, 0.05), 0.0), 1.0)
        ttft = (record.ttft_ms or 0.0) * noise
        records.append(
            replace(record, ttft_ms=ttft, latency_ms=ttft + 400 * noise, quality_f1=score, quality_score=score,
                    quality_pass=score > 0.6, cold_f1=close, cold_rouge_l=close)
        )  # fmt: skip
    return result_of(records, aggregate={}, by_transform={}, paired=None)


def list_alarms(found: dict[str, Any]) -> list[str]:
    rows = [
        *found["metrics"],
        *found["negative_controls"],
        *(r for rows in found["by_transform"].values() for r in rows),
    ]
    return [row["metric"] for row in rows if row["verdict"] in ("worse", "better", "changed")]


def test_two_equal_servers_compared_again_and_again_raise_no_alarm(is_long: bool) -> None:
    for at in range(LONG if is_long else COMPARISONS):
        assert list_alarms(compare_results(simulate_server(2 * at), simulate_server(2 * at + 1))) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_is_a_fifth_slower_is_found(seed: int) -> None:
    found = compare_results(simulate_server(100 + seed), simulate_server(200 + seed, slower=1.2))
    verdicts = {row["metric"]: row["verdict"] for row in found["metrics"]}
    assert verdicts["ttft_ms"] == "worse"
    assert verdicts["latency_ms"] == "worse"
    assert verdicts["quality_f1"] == "within noise"


def simulate_load(seed: int, slower: float = 1.0, count: int = 200) -> LoadResult:
    """A load run whose queue has a memory: what is slow for one request is slow for the next."""
    rng = random.Random(seed)
    points = []
    for rate in (2.0, 4.0):
        queue, requests = 0.0, []
        for number in range(count):
            queue = 0.8 * queue + rng.gauss(0.0, 0.1)
            ttft = 100.0 * slower * pow(2.718, queue + rng.gauss(0.0, 0.2))
            tpot = 20.0 * slower * pow(2.718, rng.gauss(0.0, 0.1))
            due = number / rate
            requests.append(
                LoadRequest(
                    number=number, request_id=f"r{number}", due_s=due, finished_s=due + (ttft + 9 * tpot) / 1000,
                    late_ms=0.0, ttft_ms=ttft, tpot_ms=tpot, e2el_ms=ttft + 9 * tpot, output_tokens=10,
                )
            )  # fmt: skip
        slo = {"ttft": 200.0}
        points.append(
            LoadPoint(
                request_rate=rate, max_concurrency=None, duration_s=count / rate, requests=tuple(requests),
                summary=summarize_load(requests, count / rate, slo),
            )
        )  # fmt: skip
    return LoadResult(run={}, config={"slo": {"ttft": 200.0}}, environment={}, points=tuple(points))


def list_load_verdicts(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["metric"], row["verdict"]) for point in found["points"] for row in point["metrics"]}


def test_two_equal_servers_under_load_compared_again_and_again_raise_no_alarm(is_long: bool) -> None:
    for at in range(LONG if is_long else COMPARISONS):
        found = compare_loads(simulate_load(2 * at), simulate_load(2 * at + 1))
        assert not {verdict for _, verdict in list_load_verdicts(found)} & {"worse", "better"}


@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_is_a_fifth_slower_under_load_is_found(seed: int) -> None:
    found = compare_loads(simulate_load(100 + seed), simulate_load(200 + seed, slower=1.2))
    assert ("ttft_ms", "worse") in list_load_verdicts(found)
    assert ("tpot_ms", "worse") in list_load_verdicts(found)


@given(st.floats(0.01, 50), st.integers(1, 60))
def test_the_tail_of_students_t_is_that_of_the_textbook(t: float, freedom: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert compute_t_tail(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-6, abs=1e-12)
    assert compute_t_tail(-t, freedom) == compute_t_tail(t, freedom)


def test_the_ends_of_the_beta_function() -> None:
    assert (compute_beta_share(2, 3, 0.0), compute_beta_share(2, 3, 1.0)) == (0.0, 1.0)
    assert compute_beta_share(1, 1, 0.3) == pytest.approx(0.3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_finds_no_more_than_judging_alone_and_no_less_than_bonferroni(values: list[float]) -> None:
    found = select_significant(values, 0.05)
    assert all(value <= 0.05 for value, shown in zip(values, found, strict=True) if shown)
    assert all(shown for value, shown in zip(values, found, strict=True) if value <= 0.05 / len(values))


def test_documents_count_not_requests() -> None:
    differences = [0.1, 0.12, 0.09, 0.11]
    assert compute_p_value(["a", "b", "c", "d"], differences) == pytest.approx(
        compute_p_value(["a", "b", "c", "d"] * 50, differences * 50)
    )
