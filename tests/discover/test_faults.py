"""Killed and pulled at: bench/faults.py does the same for longer."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import faults


def test_after_25_kills_at_random_moments_every_donor_is_whole_and_true():
    assert sum(faults.kill_often(25).values()) == 25


def test_eight_threads_see_no_error_no_stale_span_and_the_budget_holds():
    result = faults.hammer(threads=8, seconds=5)
    assert not result.errors
    assert result.most_bytes <= result.budget_bytes
    assert min(result.steps.values()) > 20
