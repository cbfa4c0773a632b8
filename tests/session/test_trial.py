"""A random share of requests is computed without reuse, and the interval of the comparison holds."""

from __future__ import annotations

import random

import pytest

from semblend.session.trial import BEFORE_FIRST, MIN_OF_AN_ARM, OFF_AFTER, Arm, KindSwitches, Trial, compare


def run_day(seed: int, saving: float, requests: int, share: float) -> Trial:
    """Prompts of many lengths; a reuse takes ``saving`` of the time, with the noise of a busy server."""
    rng = random.Random(seed)
    trial = Trial(share, draw=rng.random)
    for _ in range(requests):
        cold = rng.lognormvariate(4.5, 0.8)
        control = trial.draws_control()
        ms = cold * rng.lognormvariate(0, 0.3) * (1.0 if control else saving) + rng.expovariate(1 / (0.05 * cold))
        trial.note("documents", ms, cold * rng.lognormvariate(0, 0.1), control=control)
    return trial


def find_truth(saving: float) -> float:
    mean = 1.0460278599087169  # of the noise: exp(0.3 ** 2 / 2)
    return (mean * saving + 0.05) / (mean + 0.05)


@pytest.mark.parametrize("saving", [0.5, 1.0, 1.2])
def test_the_interval_covers_the_truth_on_95_of_100_days(saving):
    covered = 0
    for day in range(100):
        found = run_day(day, saving, requests=1000, share=0.06).compare()["documents"]
        assert found.low < found.ratio < found.high
        covered += found.low <= find_truth(saving) <= found.high
    assert covered >= 92, "95 are expected; fewer than 92 come about once in ten times"


def test_nobody_is_drawn_in_the_first_requests_and_then_about_the_share():
    trial = Trial(0.1, draw=random.Random(3).random)
    drawn = [trial.draws_control() for _ in range(BEFORE_FIRST + 2000)]
    assert not any(drawn[:BEFORE_FIRST])
    assert 150 < sum(drawn) < 250
    assert not any(Trial(0.0).draws_control() for _ in range(1000))


def test_few_of_an_arm_say_nothing():
    reused, control = Arm(), Arm()
    for _ in range(100):
        reused.add(0.5, 50)
    for _ in range(MIN_OF_AN_ARM - 1):
        control.add(1.0, 100)
    assert compare("k", reused, control) is None
    control.add(1.1, 100)
    assert compare("k", reused, control).high < 1


def test_what_cannot_be_compared_is_left_out_and_kinds_are_bounded(monkeypatch):
    from semblend.session import trial as module

    monkeypatch.setattr(module, "MAX_KINDS", 3)
    trial = Trial(0.02)
    trial.note("k", float("nan"), 10.0, control=False)
    trial.note("k", 10.0, 0.0, control=False)
    assert not trial._kinds
    for number in range(10):
        trial.note(str(number), 10.0, 10.0, control=False)
    assert list(trial._kinds) == ["7", "8", "9"]


def test_a_kind_whose_plans_differ_is_not_switched_to_and_fro():
    switches = KindSwitches()
    assert {switches.note("halves and wholes", begun=number % 2 == 0) for number in range(100)} == {None}
    for _ in range(OFF_AFTER):
        assert switches.note("slow", begun=True) is None
    told = [switches.note("slow", begun=number % 20 == 19) for number in range(200)]
    assert [one for one in told if one is not None] == [False], "tried now and then, and still off"
    assert [switches.note("slow", begun=True) for _ in range(5)].count(True) == 1
