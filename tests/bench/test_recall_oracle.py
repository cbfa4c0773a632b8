"""The oracle is what every recall figure rests on, so it is held against the plainest possible twin."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import _oracle

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
@settings(max_examples=300, deadline=None)
def test_the_oracle_marks_exactly_the_tokens_that_brute_force_marks(donors, prompt, window):
    oracle = _oracle.SharedRuns([as_tokens(donor) for donor in donors], window)

    assert oracle.covered(as_tokens(prompt)).tolist() == covered_by_brute_force(donors, prompt, window)


@given(prompts=st.lists(PROMPTS, max_size=5), window=WINDOWS)
@settings(max_examples=150, deadline=None)
def test_in_ordered_traffic_only_earlier_prompts_count(prompts, window):
    seen = _oracle.earlier_windows([as_tokens(prompt) for prompt in prompts], window)

    for number, prompt in enumerate(prompts):
        covered = _oracle.spread_windows(seen[number], len(prompt), window)
        assert covered.tolist() == covered_by_brute_force(prompts[:number], prompt, window)


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60), window=st.integers(1, 40))
@settings(deadline=None)
def test_a_window_has_the_same_hash_wherever_it_stands(tokens, window):
    alone = [_oracle.window_hashes(as_tokens(tokens[i : i + window]), window) for i in range(len(tokens) - window + 1)]
    together = _oracle.window_hashes(as_tokens(tokens), window)

    assert together.tolist() == [int(own[0]) for own in alone]


def test_two_windows_under_one_hash_are_told_apart_by_their_tokens(monkeypatch: pytest.MonkeyPatch):
    def all_alike(tokens: np.ndarray, window: int = 32) -> np.ndarray:
        return np.zeros(max(len(tokens) - window + 1, 0), np.uint64)

    monkeypatch.setattr(_oracle, "window_hashes", all_alike)
    oracle = _oracle.SharedRuns([as_tokens([1, 2, 3]), as_tokens([7, 8, 9, 4])], 3)

    assert oracle.covered(as_tokens([5, 8, 9, 4])).tolist() == [False, True, True, True]
    assert not oracle.covered(as_tokens([2, 3, 7])).any(), "a run across two donors is nobody's run"


def test_a_run_of_31_tokens_is_too_short_and_one_of_32_is_not():
    donor = np.arange(100, dtype=np.int32)
    oracle = _oracle.SharedRuns([donor])
    prompt = np.full(60, 999, np.int32)
    prompt[10:41] = donor[50:81]
    assert not oracle.covered(prompt).any()

    prompt[41] = donor[81]
    assert np.flatnonzero(oracle.covered(prompt)).tolist() == list(range(10, 42))
