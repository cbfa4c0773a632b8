"""The oracle is what every recall figure rests on, so it is held against the plainest possible twin."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import recall
from lib import oracle as oracles
from lib.scoring import Score, score

# Few different ids and few tokens: repeats, overlaps and near misses come up all the time.
PROMPTS = st.lists(st.integers(0, 2), min_size=0, max_size=40)
WINDOWS = st.integers(1, 9)


def covered_by_brute_force(donors: list[list[int]], prompt: list[int], window: int) -> list[bool]:
    covered = [False] * len(prompt)
    for start in range(len(prompt) - window + 1):
        wanted = prompt[start : start + window]
        if any(donor[i : i + window] == wanted for donor in donors for i in range(len(donor) - window + 1)):
            covered[start : start + window] = [True] * window
    return covered


def as_tokens(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


@given(donors=st.lists(PROMPTS, max_size=4), prompt=PROMPTS, window=WINDOWS)
@settings(max_examples=100, deadline=None)
def test_the_oracle_marks_exactly_the_tokens_that_brute_force_marks(donors, prompt, window):
    oracle = oracles.SharedRuns([as_tokens(donor) for donor in donors], window)

    assert oracle.covered(as_tokens(prompt)).tolist() == covered_by_brute_force(donors, prompt, window)


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60), window=st.integers(1, 40))
@settings(deadline=None)
def test_a_window_has_the_same_hash_wherever_it_stands(tokens, window):
    alone = [oracles.window_hashes(as_tokens(tokens[i : i + window]), window) for i in range(len(tokens) - window + 1)]
    together = oracles.window_hashes(as_tokens(tokens), window)

    assert together.tolist() == [int(own[0]) for own in alone]


def test_two_windows_under_one_hash_are_told_apart_by_their_tokens(monkeypatch: pytest.MonkeyPatch):
    def all_alike(tokens: np.ndarray, window: int = 32) -> np.ndarray:
        return np.zeros(max(len(tokens) - window + 1, 0), np.uint64)

    monkeypatch.setattr(oracles, "window_hashes", all_alike)
    oracle = oracles.SharedRuns([as_tokens([1, 2, 3]), as_tokens([7, 8, 9, 4])], 3)

    assert oracle.covered(as_tokens([5, 8, 9, 4])).tolist() == [False, True, True, True]
    assert not oracle.covered(as_tokens([2, 3, 7])).any(), "a run across two donors is nobody's run"


def test_a_run_of_31_tokens_is_too_short_and_one_of_32_is_not():
    donor = np.arange(100, dtype=np.int32)
    oracle = oracles.SharedRuns([donor])
    prompt = np.full(60, 999, np.int32)
    prompt[10:41] = donor[50:81]
    assert not oracle.covered(prompt).any()

    prompt[41] = donor[81]
    assert np.flatnonzero(oracle.covered(prompt)).tolist() == list(range(10, 42))


def scored(spans: list[tuple[str, int, int, int]], kind: str = "reorder") -> Score:
    """A query of 100 tokens whose first 40 a donor holds at the same place."""
    query = np.arange(100, dtype=np.int32)
    donor = np.concatenate([query[:40], np.full(20, 7, np.int32)])
    covered = oracles.SharedRuns([donor]).covered(query)
    return score("q", kind, query, covered, spans, {"d": donor}, cpu_ms=1.0)


def test_a_right_span_is_recovered_and_breaks_no_promise():
    result = scored([("d", 0, 0, 40)])

    assert (result.oracle_tokens, result.recovered_tokens, result.wrong_tokens) == (40, 40, 0)
    assert recall.failures([result]) == []


@pytest.mark.parametrize(
    ("spans", "wrong"),
    [
        ([("d", 0, 0, 41)], 1),  # one token too far
        ([("d", 1, 0, 39)], 39),  # shifted by one
        ([("d", 30, 90, 20)], 20),  # beyond the end of the query
        ([("nobody", 0, 0, 40)], 40),  # a donor that nobody registered
        ([("d", -1, 0, 10)], 10),
    ],
)
def test_every_wrong_token_is_counted_and_fails_the_run(spans, wrong):
    result = scored(spans)

    assert result.wrong_tokens == wrong
    assert any("does not hold" in line for line in recall.failures([result]))


def test_a_missed_run_an_overlap_and_reuse_of_the_unrelated_each_fail_the_run():
    assert any("below" in line for line in recall.failures([scored([("d", 0, 0, 39)])]))
    assert any("overlap" in line for line in recall.failures([scored([("d", 0, 0, 40), ("d", 0, 0, 32)])]))
    assert any("unrelated" in line for line in recall.failures([scored([("d", 0, 0, 40)], kind="unrelated")]))
