"""The learning policy: the compiled class does what its plain twin does, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_adaptive import PlainAdaptive, find_best_rates

from semblend.eviction.adaptive import Adaptive
from semblend.eviction.plan import AdaptivePlan, limit_history


@st.composite
def requests(draw):
    """Requests behind a few documents, some told in two parts, some with a session."""
    made = []
    for r in range(draw(st.integers(1, 60))):
        document, length = draw(st.integers(0, 7)), draw(st.integers(1, 12))
        keys = [document * 100 + place for place in range(length)]
        if draw(st.booleans()):
            keys[-1] = 10**6 + r
        told = draw(st.integers(0, length - 1)) if draw(st.integers(0, 9)) == 0 else 0
        made.append((keys, told, draw(st.integers(0, 3))))
    return made


@given(asks=requests(), capacity=st.sampled_from([1, 7, 40]), history=st.sampled_from([5, 30, 4000]))
@settings(max_examples=20, deadline=None)
def test_the_compiled_class_equals_its_plain_twin(asks, capacity, history):
    plan = AdaptivePlan.build(capacity, history=history, share=0.02)
    plain, fast = PlainAdaptive(capacity, plan=plan, types=2), Adaptive(capacity, plan=plan, types=2)
    known = sorted({key for keys, _, _ in asks for key in keys})
    for keys, told, session in asks:
        for policy in (plain, fast):
            policy.use(keys, told=told, session=session, sizes=[16] * len(keys), types=[key % 2 for key in keys])
        assert fast.price(known) == pytest.approx(plain.price(known), rel=1e-9)
        assert fast.epoch == plain.epoch
    assert fast.returns_by_type == pytest.approx(plain.returns_by_type, rel=1e-9, nan_ok=True)


def test_memory_does_not_grow_with_the_requests():
    policy = Adaptive(8, plan=AdaptivePlan.build(8, history=64))
    rows = policy.state.rows.shape
    for r in range(3000):
        policy.use(list(range(r * 10, r * 10 + 10)))
    assert policy.state.rows.shape == rows
    assert sum(value > 0 for value in policy.price(list(range(30_000)))) <= 64


def test_a_prompt_longer_than_any_before_finds_room():
    policy = Adaptive(8)
    policy.use(list(range(10_000)))
    assert policy.price([0, 9_999, 10_000])[2] == 0.0


def test_a_large_cache_remembers_less_than_its_share():
    assert limit_history(1_000) == 32_000
    assert limit_history(10**9) == 1 << 20


def test_what_comes_back_is_worth_more_than_what_never_does():
    policy = Adaptive(50)
    for r in range(400):
        policy.use([1, 2, 3, 4, 10 + r % 5] if r % 2 else [10**6 + 5 * r + place for place in range(5)])
    hot, cold = policy.price([3, 10**6 + 5 * 398 + 2])
    assert hot > 4 * cold > 0.0


def test_an_empty_request_is_no_use():
    for policy in (Adaptive(4), PlainAdaptive(4)):
        policy.use([])
        assert policy.price([]) == []


@pytest.mark.parametrize("key", [-1, 0, -(2**63), 2**63 - 1])
def test_every_whole_number_of_64_bits_is_a_key(key):
    policy = Adaptive(4)
    policy.use([key])
    assert policy.price(np.array([key], np.int64).tolist())[0] > 0.0


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=12), st.lists(st.floats(0.1, 9.0), min_size=12, max_size=12))
@settings(max_examples=200, deadline=None)
def test_the_best_rate_is_the_best_over_all_times_at_which_one_might_give_up(rates, widths):
    edges = np.cumsum([0.0, *widths[: len(rates)]]).tolist()
    best = find_best_rates(rates, edges)
    for age in range(len(rates)):
        gain, cost, alive, found = 0.0, 0.0, 1.0, 0.0
        for later in range(age, len(rates)):
            expected = rates[later] * (edges[later + 1] - edges[later])
            chance = expected / (1.0 + expected)
            gain += alive * chance
            cost += alive * (edges[later + 1] - edges[later]) * (1.0 - 0.5 * chance)
            alive *= 1.0 - chance
            found = max(found, gain / cost)
        assert best[age] == pytest.approx(found, rel=1e-9)
