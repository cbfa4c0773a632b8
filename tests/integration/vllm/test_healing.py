"""Prefixes that many requests load are computed once: the books alone, then in the scheduler's half."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.integration.vllm.scheduler.healing import (
    MAX_WAITS,
    MIN_SHARE,
    PrefixAccounts,
    Verdict,
    list_marks,
)
from semblend.integration.vllm.scheduler.records import LoadCost, Mark

PREFIX = 1024
SHARES = st.floats(MIN_SHARE, 1.5)


def make_cost(name, share=0.25, *, prefix=b"p", tenant="", tokens=PREFIX, marks=4):
    """A load of one prefix with ``marks`` marks, that computes ``share`` of its rows."""
    ends = [tokens * (number + 1) // marks for number in range(marks)]
    found = (Mark(end, prefix + bytes([number]), share * end, tokens) for number, end in enumerate(ends))
    return LoadCost(name, tenant, tuple(found))


def nobody(_name):
    return False


def everybody(_name):
    return True


def serve(healing, cost, *, is_prefilling=nobody):
    """One request from vLLM's first question about it to its end; what became of it."""
    verdict = healing.judge(cost, is_prefilling)
    while verdict is Verdict.WAIT:
        verdict = healing.judge(cost, is_prefilling)
    if verdict is Verdict.LOAD:
        healing.note_load(cost)
    healing.forget(cost.request_id)
    return verdict


def count_loads_before_a_prefill(healing, share=0.25, **where):
    for number in range(1000):
        if serve(healing, make_cost(f"r{number}", share, **where)) is Verdict.PREFILL:
            return number
    return None


def sum_costs(shares, evicted=frozenset()):
    """What requests of one prefix cost; it is held from its prefill until the request that finds it ``evicted``."""
    healing, total, held = PrefixAccounts(), 0.0, False
    for number, share in enumerate(shares):
        held = held and number not in evicted
        if held:
            continue
        cost = make_cost(str(number), share)
        held = serve(healing, cost) is Verdict.PREFILL
        total += PREFIX if held else cost.marks[-1].rows
    return total


@given(st.lists(SHARES, min_size=1, max_size=40))
def test_a_prefix_costs_less_than_twice_the_better_of_always_loading_and_computing_it_at_once(shares):
    assert sum_costs(shares) < 2 * min(PREFIX * sum(shares), PREFIX) + 1e-6


@given(st.lists(SHARES, min_size=1, max_size=60), st.frozensets(st.integers(0, 60)))
def test_however_often_it_is_evicted_it_costs_less_than_twice_what_always_loading_would(shares, evicted):
    assert sum_costs(shares, evicted) < 2 * PREFIX * sum(shares) + 1e-6


@given(SHARES)
def test_it_is_computed_when_the_next_load_would_bring_its_loads_to_the_price(share):
    loads = count_loads_before_a_prefill(PrefixAccounts(), share)
    assert loads * share < 1 + 1e-9
    assert (loads + 1) * share > 1 - 1e-9


@given(st.data())
def test_prompts_that_part_somewhere_cost_no_more_than_twice_their_loads(data):
    """Prefixes of a tree, each of two segments at every depth; whatever is computed stays in the cache."""
    paths = data.draw(st.lists(st.tuples(*[st.integers(0, 1)] * 4), min_size=1, max_size=60))
    healing, cached, spent, loads = PrefixAccounts(), set(), 0.0, 0.0
    for number, path in enumerate(paths):
        exact = max((depth for depth in range(5) if path[:depth] in cached), default=0)
        behind = [depth for depth in range(1, 5) if depth > exact]
        marks = tuple(Mark(256 * d, bytes(path[:d]), 0.2 * 256 * (d - exact), 256 * (4 - exact)) for d in behind)
        rows, price = (marks[-1].rows, marks[-1].price) if marks else (0.0, 0.0)
        loads += rows
        if marks and serve(healing, LoadCost(str(number), "", marks)) is Verdict.PREFILL:
            cached |= {path[:depth] for depth in range(1, 5)}
            spent += price
        else:
            spent += rows
    assert spent < 2 * loads + 1e-6


def test_a_load_that_costs_as_much_as_a_prefill_is_never_begun():
    assert count_loads_before_a_prefill(PrefixAccounts(), 1.0) == 0


def test_being_asked_again_and_again_costs_nothing():
    healing = PrefixAccounts()
    for _ in range(50):
        assert healing.judge(make_cost("waits for blocks"), nobody) is Verdict.LOAD


def test_only_what_is_shared_counts():
    healing, rng = PrefixAccounts(), random.Random(1)
    for number in range(200):
        shared = make_cost("", 0.1, marks=8, tokens=2048).marks[:1]
        own = [
            dataclasses.replace(mark, key=rng.randbytes(8)) for mark in make_cost("", 0.1, marks=8, tokens=2048).marks
        ]
        cost = LoadCost(str(number), "", (*shared, *own[1:]))
        if serve(healing, cost) is Verdict.PREFILL:
            break
    paid = number * shared[0].rows + own[-1].rows
    assert paid >= 2048 - 1e-6, "the loads of the first eighth have paid for the whole prompt that is computed"
    assert number > 50


@pytest.mark.parametrize("apart", [{"prefix": b"q"}, {"tenant": "another"}])
def test_namespaces_and_prefixes_have_accounts_of_their_own(apart):
    healing = PrefixAccounts()
    for number in range(3):
        serve(healing, make_cost(str(number)))
    assert count_loads_before_a_prefill(healing, **apart) == 3
    assert count_loads_before_a_prefill(healing) == 0, "and this one is due"


def test_nobody_of_another_prefix_or_tenant_waits():
    healing = PrefixAccounts()
    assert healing.judge(make_cost("owner", 1.0), nobody) is Verdict.PREFILL
    assert healing.judge(make_cost("other", prefix=b"q"), everybody) is Verdict.LOAD
    assert healing.judge(make_cost("tenant", tenant="another"), everybody) is Verdict.LOAD
    assert healing.judge(make_cost("same"), everybody) is Verdict.WAIT
    assert healing.judge(make_cost("owner", 1.0), everybody) is Verdict.PREFILL, "who computes it waits for nobody"


@given(st.lists(st.booleans(), max_size=3 * MAX_WAITS), st.integers(0, 3))
def test_nobody_waits_for_ever(computing, times):
    healing = PrefixAccounts()
    healing.judge(make_cost("owner", 1.0), nobody)
    computing += [True] * (times * MAX_WAITS)
    verdicts = [healing.judge(make_cost("waits"), lambda _name, now=now: now) for now in computing]
    assert Counter(verdicts)[Verdict.WAIT] == min(sum(computing), MAX_WAITS)
    assert all((verdict is Verdict.WAIT) <= now for verdict, now in zip(verdicts, computing, strict=True))
    assert healing.judge(make_cost("waits"), nobody) is Verdict.LOAD


def test_a_prefill_that_came_to_nothing_starts_the_account_again():
    healing = PrefixAccounts()
    assert count_loads_before_a_prefill(healing) == 3
    assert count_loads_before_a_prefill(healing) == 3, "no prefill follows a prefill"


def test_a_name_that_is_used_again_is_another_request():
    healing = PrefixAccounts()
    assert healing.judge(make_cost("name", 1.0), nobody) is Verdict.PREFILL
    healing.forget("name")
    assert healing.judge(make_cost("name"), nobody) is Verdict.LOAD


def test_memory_is_bounded_and_a_tenant_pushes_out_its_own():
    healing = PrefixAccounts(most_tenants=3, most_accounts=8)
    for _ in range(3):
        serve(healing, make_cost("kept", tenant="quiet"))
    for number in range(100):
        serve(healing, make_cost(str(number), prefix=str(number).encode(), tenant="noisy"))
    assert len(healing) == 12
    assert count_loads_before_a_prefill(healing, tenant="quiet") == 0
    for number in range(100):
        serve(healing, make_cost(str(number), tenant=str(number)))
    assert len(healing) == 12


def test_a_prompt_with_more_marks_than_there_is_room_for_is_loaded():
    healing = PrefixAccounts(most_accounts=2)
    assert [serve(healing, make_cost(str(number))) for number in range(3)] == [Verdict.LOAD] * 3


@given(st.integers(0, 4000), st.sampled_from([1, 16, 32, 128, 784]))
def test_marks_are_the_same_for_all_prompts_and_lie_close(blocks, block_tokens):
    marks, longer = list_marks(blocks, block_tokens), list_marks(blocks + 50, block_tokens)
    assert longer[: len(marks)] == marks
    for before, after in zip([0, *marks], marks, strict=False):
        assert (after - before) * block_tokens <= max(256, block_tokens, before * block_tokens / 16)
