"""Times of an engine are learned from its requests, and what does not pay is told in milliseconds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.plan.times import MIN_REUSED, MIN_TIMED, NOTHING, PASSES, Timed, TimeFit, TimeModel, Work

LENGTHS = (500, 2000, 8000, 24000)


def take(work: Work, constant: float = 12.0, row: float = 0.006, key: float = 3e-7, moved: float = 0.0006) -> float:
    """An engine's true time, in ms."""
    return constant + row * work.rows + key * work.keys + moved * work.moved


@given(st.floats(0, 50), st.floats(1e-3, 0.1), st.floats(0, 1e-6))
def test_what_the_parts_of_a_prefill_weigh_is_found_again(constant, row, key):
    fit = TimeFit()
    for tokens in LENGTHS * 3:
        work = Work.of_prefill(tokens)
        fit.note(work, take(work, constant, row, key))
    for tokens in (1000, 12000):
        work = Work.of_prefill(tokens)
        assert fit.expect(work) == pytest.approx(take(work, constant, row, key), rel=0.01)


def test_requests_that_were_held_up_hardly_count():
    rng, fit = random.Random(1), TimeFit()
    for number in range(200):
        work = Work.of_prefill(rng.choice(LENGTHS))
        fit.note(work, take(work) * rng.lognormvariate(0, 0.03) * (5 if number % 7 == 0 else 1))
    for tokens in LENGTHS:
        assert fit.expect(Work.of_prefill(tokens)) == pytest.approx(take(Work.of_prefill(tokens)), rel=0.12)


def test_an_engine_that_became_slower_is_believed():
    fit = TimeFit()
    for slower in (1.0, 3.0):
        for tokens in LENGTHS * 100:
            fit.note(Work.of_prefill(tokens), slower * take(Work.of_prefill(tokens)))
    assert fit.expect(Work.of_prefill(8000)) == pytest.approx(3 * take(Work.of_prefill(8000)), rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 30000), st.floats(-1, 1e4)), min_size=1, max_size=40), st.integers(1, 30000))
def test_no_time_is_expected_to_be_negative_whatever_was_seen(seen, tokens):
    fit = TimeFit()
    fit.note(Work.of_prefill(100), 5.0)
    for one, ms in seen:
        fit.note(Work.of_prefill(one), ms)
    less, more = fit.expect(Work.of_prefill(tokens)), fit.expect(Work.of_prefill(tokens + 1000))
    assert 0 <= less <= more * (1 + 1e-9)


def test_an_engine_that_waits_for_its_launches_below_some_length_is_known_at_every_length():
    """As an H200 does with a 1.5B: 2,048 tokens take as long as 4,096."""
    fit = TimeFit()
    takes = {2048: 24.0, 4096: 26.0, 8192: 56.0, 24576: 214.0}
    for tokens, ms in list(takes.items()) * 20:
        fit.note(Work.of_prefill(tokens), ms)
    for tokens, ms in takes.items():
        assert fit.expect(Work.of_prefill(tokens)) == pytest.approx(ms, rel=0.05)


def test_before_anything_was_timed_rows_are_counted_and_those_of_ours_cost_more():
    model = TimeModel()
    forecast = model.expect("balanced", Work(1000, 0), Work(50, 0), Work(2000, 0))
    assert (forecast.timed, forecast.reuse, forecast.cold) == (False, 1350, 2000)
    assert forecast.describe() == "such prompts cost 0.68 of a prefill"


def test_times_count_once_both_kinds_were_seen_often_enough():
    model, cold, ours = TimeModel(), Work.of_prefill(8000), Work(1000, 4_000_000, 7000)
    for _ in range(MIN_TIMED):
        assert not model.expect("fast", ours, NOTHING, cold).timed
        model.note_cold(cold, take(cold))
    for _ in range(MIN_REUSED):
        assert not model.expect("fast", ours, NOTHING, cold).timed
        model.note_reuse("fast", ours, NOTHING, take(ours))
    forecast = model.expect("fast", ours, NOTHING, cold)
    assert forecast.timed
    assert forecast.reuse == pytest.approx(take(ours), rel=0.01)
    assert not model.expect("balanced", ours, NOTHING, cold).timed, "of another path nothing was seen"


def test_an_engine_that_was_timed_when_it_started_knows_at_once_that_short_prompts_do_not_pay():
    model = TimeModel()
    few, many = Timed(Work.of_prefill(32), 6.0), Timed(Work.of_prefill(4096), 30.0)
    model.warm_up(PASSES, few, many, Timed(Work(0, 0, 4096), 2.0))
    short = model.expect("balanced", Work(150, 150 * 600, 600), NOTHING, Work.of_prefill(700))
    long = model.expect("balanced", Work(2500, 2500 * 12000, 23000), NOTHING, Work.of_prefill(24000))
    assert short.timed
    assert not short.pays
    assert long.pays
    assert short.describe().startswith("reuse is expected to take ")


def test_the_first_slow_requests_do_not_undo_what_was_measured_at_the_start():
    model = TimeModel()
    few, many = Timed(Work.of_prefill(32), 6.0), Timed(Work.of_prefill(4096), 30.0)
    model.warm_up(PASSES, few, many, Timed(Work(0, 0, 4096), 2.0))
    ours, cold = Work(900, 900 * 4000, 8000), Work.of_prefill(8192)
    before = model.expect("balanced", ours, NOTHING, cold).reuse
    model.note_reuse("balanced", ours, NOTHING, 10 * before)
    assert model.expect("balanced", ours, NOTHING, cold).reuse < 2 * before
    for _ in range(60):
        model.note_reuse("balanced", ours, NOTHING, 3 * before)
    assert model.expect("balanced", ours, NOTHING, cold).reuse == pytest.approx(3 * before, rel=0.1), "it is slow"


def test_what_the_engine_prefills_behind_a_reuse_is_not_learned_as_ours():
    model, cold = TimeModel(), [Work.of_prefill(tokens) for tokens in LENGTHS]
    for work in cold * 20:
        model.note_cold(work, take(work))
    ours, tail = Work(100, 100 * 4000, 3900), Work.of_prefill(8000, exact=4000)
    ms = take(ours) + take(tail) - take(NOTHING)
    for _ in range(MIN_REUSED):
        model.note_reuse("fast", ours, tail, ms)
    assert model.expect("fast", ours, NOTHING, cold[2]).reuse == pytest.approx(take(ours), rel=0.02)
    assert model.expect("fast", ours, tail, cold[2]).reuse == pytest.approx(ms, rel=0.02)
