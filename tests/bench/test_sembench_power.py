"""The made-up runs by which we say how many hits a verdict needs: they must be judged as real ones are."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the gates come with live runs")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import numpy as np
import sembench_power

QUIET, LOUD = (0.001, -0.002, 0.0015), (0.4, -0.5, 0.3)


def share_that_pass(noise: tuple[float, ...], hits: int, speedup: float, draws: int = 40) -> float:
    rng = np.random.default_rng(1)
    runs = (list(sembench_power.make_records(rng, noise, hits, speedup=speedup)) for _ in range(draws))
    return float(np.mean([not sembench_power.has_doubt(records) for records in runs]))


def test_a_server_that_saves_nothing_seldom_passes_however_many_hits_there_are() -> None:
    assert all(share_that_pass(LOUD, hits, 1.0) <= 0.15 for hits in (3, 8))


def test_more_hits_see_a_speed_up_through_more_noise() -> None:
    assert share_that_pass(QUIET, 3, 1.2) == 1.0
    assert share_that_pass(LOUD, 3, 1.5) < share_that_pass(LOUD, 12, 1.5)


def test_times_scatter_as_the_measured_differences_do() -> None:
    rng = np.random.default_rng(1)
    one, other = (np.log(sembench_power.draw_times(rng, LOUD, 20_000)) for _ in range(2))
    assert float(np.std(one - other)) == pytest.approx(math.sqrt(np.mean(np.square(LOUD))), rel=0.05)


def test_compare_finds_a_server_that_is_much_slower_and_not_one_that_is_equal() -> None:
    rng = np.random.default_rng(1)
    base, equal, slow = (
        list(sembench_power.make_records(rng, QUIET, 8, speedup=1.5, slower=slower)) for slower in (1.0, 1.0, 1.2)
    )
    assert sembench_power.call_worse(base, slow)
    assert not sembench_power.call_worse(base, equal)
