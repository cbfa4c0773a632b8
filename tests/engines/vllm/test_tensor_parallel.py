"""Two ranks of one real vLLM: they decide alike, and answer as one rank does."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def answers(apart, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks") / "model")
    return {ranks: apart("ranks", ranks=ranks, folder=folder) for ranks in (1, 2)}


def test_two_ranks_answer_and_account_as_one_does(answers):
    assert answers[2] == answers[1]


@pytest.mark.parametrize("arm", ["fast", "balanced"])
def test_two_ranks_reuse(answers, arm):
    rows = [row for row in answers[2] if row["arm"] == arm]
    assert all(row["outcome"] == "backend_materialized_reuse" for row in rows)
    assert all(row["reused_tokens"] > 300 for row in rows)
    assert all(
        sum(row[f"{kind}_tokens"] for kind in ("exact", "reused", "recomputed", "prefill")) == 437 for row in rows
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_a_pass_of_ours_stops_the_engine_with_a_message(apart, tmp_path, rank):
    said = apart("failing_rank", rank=rank, folder=str(tmp_path / "model"))
    assert "a donor is kept" in said, said[-3000:]
    assert "answered" not in said
    failed, stopped = (float(re.search(rf"{what} at ([0-9.]+)", said).group(1)) for what in ("failed", "stopped"))
    assert stopped - failed < 10
    assert f"rank {rank} of 2 failed while all of them computed reused KV: MemoryError: no memory left" in said
    assert "(hint: " in said
