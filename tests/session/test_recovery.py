"""A kind of prompts whose first reuses were held up is begun again by itself, and one that does not pay stays off."""

from __future__ import annotations

import random

import pytest

from semblend.materialize.gate.gate import MAX_COLD, MAX_SKIPPED, MIN_SKIPPED, RETRY_BUDGET, OutcomeMemory
from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.times import Forecast
from semblend.prompt import Namespace
from semblend.span import Span

PLAN = ReusePlan((Span("d", 50, 10, 4000),), 4200)
ACME = Namespace(tenant="acme")
HELD_UP = 1672 / 740
"""What was measured of the first reuses of a kind while other programs had the GPU (H200, mixed load)."""


class Load:
    """Requests of one kind, ``together`` at once: none of them knows what those beside it take."""

    def __init__(self, share: float, together: int = 1, seed: int = 0) -> None:
        self.memory, self.rng, self.together = OutcomeMemory(), random.Random(seed), together
        self.forecast = Forecast(reuse=1000.0 * share, cold=1000.0, timed=True)
        self.begun: list[bool] = []
        self.cost = 0.0  # of all, in prefills

    def ask(self, count: int, takes: float, noise: float = 0.0) -> list[bool]:
        """Which of so many requests were begun, where a reuse takes so many prefills."""
        told = len(self.begun)
        while len(self.begun) < told + count:
            drawn = [self.memory.judge(PLAN, ACME, self.forecast, "fast").decline is None for _ in range(self.together)]
            for _ in range(sum(drawn)):
                took = takes * self.rng.lognormvariate(-(noise**2) / 2, noise)
                self.cost += took
                self.memory.learn(PLAN, ACME, self.forecast, "fast", took=took * self.forecast.cold)
            self.cost += len(drawn) - sum(drawn)
            self.begun += drawn
        return self.begun[told:]


@pytest.mark.parametrize("share", [0.5, 0.74, 0.85])
@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("held_up", [8, 32, 400])
def test_a_kind_that_was_held_up_is_begun_again_after_the_first_try_that_pays(share, together, held_up):
    load = Load(share, together)
    load.ask(held_up, takes=share * HELD_UP)
    later = load.ask(400, takes=share)
    first = later.index(True)
    assert first <= MAX_SKIPPED
    assert all(later[first + 2 * together :]), "what was tried has paid: the next are begun too"


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_with_the_noise_of_a_busy_engine_it_recovers_too(noise):
    found = []
    for seed in range(20):
        load = Load(0.74, together=8, seed=seed)
        load.ask(32, takes=0.74 * HELD_UP)
        later = load.ask(400, takes=0.74, noise=noise)
        found.append(sum(later[100:]) / 300)
    assert sum(found) / len(found) > 0.9


@pytest.mark.parametrize("takes", [1.2, 1.7, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_kind_that_does_not_pay_stays_off_and_its_tries_are_as_few_as_without_luck(takes, noise):
    """Luck lets a try look good now and then: the row that follows is paid for by a longer wait."""
    prompts, shares, costs = 3000, [], []
    for seed in range(4):
        load = Load(0.74, seed=seed)
        load.ask(50, takes)
        before = load.cost
        shares.append(sum(load.ask(prompts, takes, noise)) / prompts)
        costs.append((load.cost - before) / prompts - 1)
    assert max(shares) < 1.1 / MIN_SKIPPED
    if takes < MAX_COLD:  # what takes longer is counted as that
        assert sum(costs) / len(costs) < RETRY_BUDGET


def test_a_try_that_is_lost_before_it_was_timed_is_followed_by_another():
    load = Load(0.74)
    load.ask(40, takes=0.74 * HELD_UP)
    tried = 0
    for _ in range(3 * MAX_SKIPPED):  # nothing is learned of them
        tried += load.memory.judge(PLAN, ACME, load.forecast, "fast").decline is None
    assert tried >= 3
