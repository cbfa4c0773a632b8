"""Kill a process that writes the store, and use one store from eight threads."""

from __future__ import annotations

from endurance import store_faults


def test_after_kills_at_random_moments_every_donor_is_whole_and_true(is_long):
    kills = 200 if is_long else 25
    assert sum(store_faults.kill_often(kills).values()) == kills


def test_eight_threads_see_no_error_no_stale_span_and_the_budget_holds(is_long):
    result = store_faults.hammer(threads=8, seconds=60 if is_long else 5)
    assert not result.errors
    assert result.most_bytes <= result.budget_bytes
    assert min(result.steps.values()) > 20
