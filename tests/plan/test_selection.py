"""Rules that choose tokens to compute again: one signature, one promise about what comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend import InputError
from semblend.plan.selection import (
    SELECTIONS,
    Scores,
    select_attended,
    select_attended_and_deviating,
    select_by_deviation,
    select_largest,
)


def scores_of(reused, seed=0, share=0.1):
    rng = np.random.default_rng(seed)
    return Scores(reused, rng.random(len(reused)), rng.random(len(reused)), rng_seed=seed, share=share)


positions = st.sets(st.integers(0, 600), max_size=200).map(lambda found: np.array(sorted(found), np.int64))


@pytest.mark.parametrize("name", SELECTIONS)
@given(reused=positions, seed=st.integers(0, 9), share=st.floats(0, 1))
def test_a_rule_returns_some_of_the_reused_tokens_ascending_and_as_many_as_the_share(name, reused, seed, share):
    chosen = SELECTIONS[name](scores_of(reused, seed, share))
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set(chosen.tolist()) <= set(reused.tolist())
    assert len(chosen) == round(share * len(reused))


@pytest.mark.parametrize("name", SELECTIONS)
@given(reused=positions, seed=st.integers(0, 9))
def test_the_same_scores_choose_the_same_tokens_and_all_means_all(name, reused, seed):
    rule = SELECTIONS[name]
    assert rule(scores_of(reused, seed, 0.3)).tolist() == rule(scores_of(reused, seed, 0.3)).tolist()
    assert rule(scores_of(reused, seed, 1.0)).tolist() == reused.tolist()


@given(reused=positions, seed=st.integers(0, 9), less=st.floats(0, 1), more=st.floats(0, 1))
def test_a_larger_share_keeps_what_a_smaller_one_chose(reused, seed, less, more):
    less, more = sorted((less, more))
    for name in ("attended", "attended_and_deviating", "cacheblend", "at_random"):
        few = SELECTIONS[name](scores_of(reused, seed, less))
        assert set(few.tolist()) <= set(SELECTIONS[name](scores_of(reused, seed, more)).tolist())


def test_attention_says_what_matters_deviation_what_changed_and_the_product_both():
    reused = np.array([10, 11, 12])
    scores = Scores(reused, np.array([0.9, 0.5, 0.0]), np.array([0.0, 0.5, 0.9]), share=1 / 3)
    assert [
        rule(scores).tolist() for rule in (select_attended, select_by_deviation, select_attended_and_deviating)
    ] == [[10], [12], [11]]


def test_scores_that_do_not_fit_together_are_refused():
    with pytest.raises(InputError, match="3 positions, 2 masses"):
        Scores(np.arange(3), np.zeros(2), np.zeros(3))
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="share"):
            Scores(np.arange(3), np.zeros(3), np.zeros(3), share=share)


@given(
    st.lists(st.one_of(st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("-inf")]), st.floats(0, 3)), max_size=60),
    st.integers(-2, 70),
)
def test_the_largest_are_those_that_sorting_everything_would_choose(scores, count):
    positions, values = np.arange(len(scores)) * 3, np.array(scores)
    by_score = np.lexsort((positions, -np.nan_to_num(values, nan=-np.inf)))
    assert select_largest(positions, values, count).tolist() == sorted(positions[by_score[: max(0, count)]].tolist())
