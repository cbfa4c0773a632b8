"""Two ranks of one real vLLM: they decide alike, and answer as one rank does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    found = {}
    for ranks in (1, 2):
        out = folder / f"{ranks}.json"
        script = Path(__file__).with_name("tensor_parallel.py")
        done = subprocess.run(
            [sys.executable, str(script), str(ranks), str(folder / "model"), str(out)],
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        found[ranks] = json.loads(out.read_text(encoding="utf-8"))
    return found


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
def test_a_rank_that_fails_in_a_pass_of_ours_stops_the_engine_with_a_message(tmp_path, rank):
    script = Path(__file__).with_name("failing_rank.py")
    done = subprocess.run(
        [sys.executable, str(script), str(rank), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=280,  # vLLM itself gives up after 300 s
    )
    said = done.stdout + done.stderr
    assert "a donor is kept" in said, said[-3000:]
    assert "answered" not in said
    failed, stopped = (float(re.search(rf"{what} at ([0-9.]+)", said).group(1)) for what in ("failed", "stopped"))
    assert stopped - failed < 10
    assert f"rank {rank} of 2 failed while all of them computed reused KV: MemoryError: no memory left" in said
    assert "(hint: " in said
