"""Rules that choose tokens to compute again: one signature, one promise about what comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend import InputError
from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.selection import (
    SELECTIONS,
    Scores,
    keep_in_order,
    leave_out_repetitions,
    select_largest,
)
from semblend.span import Span


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
    rules = ("attended", "cacheblend", "attended_and_deviating")
    assert [SELECTIONS[name](scores).tolist() for name in rules] == [[10], [12], [11]]


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


def lay_out(*pieces):
    """Spans of ``(donor, donor_start, length)``, one behind the other in the prompt."""
    at, spans = 0, []
    for donor, start, length in pieces:
        spans.append(Span(donor, start, at, length))
        at += length
    return tuple(spans)


def test_what_stands_before_its_predecessors_is_left_out():
    first, *others = lay_out(("d", 500, 50), ("d", 0, 200), ("d", 300, 100))
    assert keep_in_order([first, *others], most_share=0.2) == tuple(others)


def test_a_passage_in_place_before_the_one_that_moved_is_kept():
    head, moved, rest = lay_out(("d", 0, 50), ("d", 400, 50), ("d", 50, 350))
    assert keep_in_order([head, moved, rest], most_share=0.2) == (head, rest)


def test_where_much_moved_ahead_nothing_is_left_out():
    spans = lay_out(("d", 500, 101), ("d", 0, 399))
    assert keep_in_order(spans, most_share=0.2) == spans


def test_the_orders_of_two_donors_do_not_concern_each_other():
    spans = lay_out(("a", 500, 10), ("b", 0, 200), ("a", 600, 200), ("b", 300, 100))
    assert keep_in_order(spans, most_share=0.2) == spans


pieces = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 900), st.integers(1, 90)), min_size=1, max_size=12)


@given(pieces, st.floats(0, 0.99))
def test_what_is_kept_is_in_its_donors_orders_unless_too_much_would_be_left_out(pieces, share):
    spans = lay_out(*pieces)
    in_order = tuple(
        span
        for place, span in enumerate(spans)
        if all(span.donor_start <= later.donor_start for later in spans[place:] if later.donor_id == span.donor_id)
    )
    left_out = sum(span.length for span in spans) - sum(span.length for span in in_order)
    kept = keep_in_order(spans, share)
    assert kept in (spans, in_order)
    assert kept[-1] == spans[-1]
    slack = 1e-9 * sum(span.length for span in spans)
    if left_out < share * sum(span.length for span in spans) - slack:
        assert kept == in_order
    if left_out > share * sum(span.length for span in spans) + slack:
        assert kept == spans


def plan_of(*spans):
    return ReusePlan(spans, spans[-1].target_end + 10)


def test_what_an_agent_repeats_of_its_history_is_left_out_and_the_history_is_in_order_again():
    history, name, kept, result = lay_out(("d", 500, 400), ("d", 520, 32), ("d", 950, 300), ("d", 0, 60))
    plan = leave_out_repetitions(plan_of(history, name, kept, result))
    assert (plan.spans, plan.moved_back) == ((history, kept), 60)


def test_of_two_copies_the_longer_one_stays_wherever_it_stands():
    summary, history = lay_out(("d", 700, 40), ("d", 500, 400))
    plan = leave_out_repetitions(plan_of(summary, history))
    assert (plan.spans, plan.moved_back) == ((history,), 0)


def test_a_passage_that_moved_ahead_is_no_repetition():
    plan = plan_of(*lay_out(("d", 900, 100), ("d", 0, 400)))
    assert leave_out_repetitions(plan) is plan


@given(pieces, st.floats(0, 0.99))
def test_repetitions_left_out_leave_no_donor_token_mostly_twice_and_most_of_what_was_there_once(pieces, share):
    spans = lay_out(*pieces)
    kept = leave_out_repetitions(plan_of(*spans), share).spans
    assert set(kept) <= set(spans)
    assert list(kept) == sorted(kept, key=lambda span: span.target_start)
    longest = max(span.length for span in spans)
    assert sum(span.length for span in kept) >= (1 - share) * longest - 1e-6
