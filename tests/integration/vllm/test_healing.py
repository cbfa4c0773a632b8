"""Prefixes that many requests load are computed once: the books alone, then in the scheduler's half."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.integration.vllm.scheduler.healing import MAX_WAITS, MIN_SHARE, PrefixAccounts, list_marks
from semblend.integration.vllm.scheduler.records import LoadCost, Mark

PREFIX = 1024
SHARES = st.floats(MIN_SHARE, 1.5)


def make_cost(name, share=0.25, *, prefix=b"p", tenant="", tokens=PREFIX, marks=4):
    """A load of one prefix with ``marks`` marks, that computes ``share`` of its rows."""
    ends = [tokens * (number + 1) // marks for number in range(marks)]
    found = (Mark(end, prefix + bytes([number]), share * end, tokens) for number, end in enumerate(ends))
    return LoadCost(name, tenant, tuple(found))


def everybody(_name):
    return True


def arrive(healing, cost, prompt=None):
    """vLLM has a new request; its prompt is its own unless ``prompt`` names it."""
    keys = [mark.key for mark in cost.marks]
    healing.waiting.add(cost.request_id, cost.tenant, (prompt or cost.request_id).encode(), keys)


def must_wait(healing, cost, computes_next=everybody, exact_tokens=0):
    return healing.must_wait(
        cost.request_id, cost.tenant, [mark.key for mark in cost.marks], exact_tokens, computes_next
    )


def admit(healing, cost):
    """vLLM asks about a request and gives it blocks; whether it is computed. Else it is loaded."""
    computed = healing.must_compute(cost)
    if not computed:
        healing.note_load(cost)
    healing.waiting.remove(cost.request_id)
    return computed


def serve(healing, cost):
    """One request alone, from its arrival to its end; whether it was computed."""
    arrive(healing, cost)
    assert not must_wait(healing, cost)
    computed = admit(healing, cost)
    healing.forget(cost.request_id)
    return computed


def count_loads_before_a_prefill(healing, share=0.25, **where):
    for number in range(1000):
        if serve(healing, make_cost(f"r{number}", share, **where)):
            return number
    return None


def sum_costs(bursts, evicted=frozenset()):
    """What requests of one prefix cost that come in bursts; it is held from its prefill until a burst finds it
    ``evicted``."""
    healing, total, held = PrefixAccounts(), 0.0, False
    for number, shares in enumerate(bursts):
        held = held and number not in evicted
        costs = [make_cost(f"{number}/{index}", share) for index, share in enumerate(shares)]
        for cost in costs:
            arrive(healing, cost)
        for cost in costs:
            if not held:
                held = admit(healing, cost)
                total += PREFIX if held else cost.marks[-1].rows
            healing.forget(cost.request_id)
    return total


def sum_shares(bursts):
    return PREFIX * sum(map(sum, bursts))


BURSTS = st.lists(st.lists(SHARES, min_size=1, max_size=20), min_size=1, max_size=20)


@given(BURSTS)
def test_a_prefix_costs_less_than_twice_the_better_of_always_loading_and_computing_it_at_once(bursts):
    assert sum_costs(bursts) < 2 * min(sum_shares(bursts), PREFIX) + 1e-6


@given(BURSTS, st.frozensets(st.integers(0, 20)))
def test_however_often_it_is_evicted_it_costs_less_than_twice_what_always_loading_would(bursts, evicted):
    assert sum_costs(bursts, evicted) < 2 * sum_shares(bursts) + 1e-6


@given(st.integers(1, 60), SHARES)
def test_a_burst_costs_what_it_would_if_its_size_were_known(users, share):
    assert sum_costs([[share] * users]) == pytest.approx(min(users * share, 1) * PREFIX)


@given(st.integers(1, 60), SHARES)
def test_a_burst_whose_first_request_came_alone_costs_at_most_one_load_and_one_prefill(others, share):
    assert sum_costs([[share], [share] * others]) <= (1 + share if share < 1 else 1) * PREFIX + 1e-6


@given(SHARES)
def test_who_comes_alone_never_waits(share):
    healing = PrefixAccounts()
    cost = make_cost("alone", share)
    arrive(healing, cost)
    assert not must_wait(healing, cost)
    assert admit(healing, cost) == (share >= 1)


@given(SHARES)
def test_it_is_computed_when_the_next_load_would_bring_its_loads_to_the_price(share):
    loads = count_loads_before_a_prefill(PrefixAccounts(), share)
    assert loads * share < 1 + 1e-9
    assert (loads + 1) * share > 1 - 1e-9


@given(st.data())
def test_prompts_that_part_somewhere_cost_no_more_than_twice_their_loads(data):
    """Prefixes of a tree, each of two segments at every depth; whatever is computed stays in the cache."""
    paths = data.draw(st.lists(st.tuples(*[st.integers(0, 1)] * 4), min_size=1, max_size=60))
    at_once = data.draw(st.integers(1, 10))
    healing, cached, spent, loads = PrefixAccounts(), set(), 0.0, 0.0
    for start in range(0, len(paths), at_once):
        names = {f"{start}/{number}": path for number, path in enumerate(paths[start : start + at_once])}
        for name, path in names.items():
            healing.waiting.add(name, "", name.encode(), [bytes(path[:depth]) for depth in range(1, 5)])
        for name, path in names.items():
            exact = max((depth for depth in range(5) if path[:depth] in cached), default=0)
            behind = [depth for depth in range(1, 5) if depth > exact]
            marks = tuple(Mark(256 * d, bytes(path[:d]), 0.2 * 256 * (d - exact), 256 * (4 - exact)) for d in behind)
            rows, price = (marks[-1].rows, marks[-1].price) if marks else (0.0, 0.0)
            loads += 0.2 * 1024  # without a prefill nothing is ever exact
            if marks and admit(healing, LoadCost(name, "", marks)):
                cached |= {path[:depth] for depth in range(1, 5)}
                spent += price
            else:
                spent += rows
            healing.forget(name)
    assert spent < 2 * loads + 1e-6


def test_a_load_that_costs_as_much_as_a_prefill_is_never_begun():
    assert count_loads_before_a_prefill(PrefixAccounts(), 1.0) == 0


def test_being_asked_again_and_again_costs_nothing():
    healing = PrefixAccounts()
    for _ in range(50):
        assert not healing.must_compute(make_cost("waits for blocks"))


def test_only_what_is_shared_counts():
    healing, rng = PrefixAccounts(), random.Random(1)
    for number in range(200):
        shared = make_cost("", 0.1, marks=8, tokens=2048).marks[:1]
        own = [
            dataclasses.replace(mark, key=rng.randbytes(8)) for mark in make_cost("", 0.1, marks=8, tokens=2048).marks
        ]
        cost = LoadCost(str(number), "", (*shared, *own[1:]))
        if serve(healing, cost):
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


@pytest.mark.parametrize("apart", [{"prefix": b"q"}, {"tenant": "another"}])
def test_those_who_wait_for_another_prefix_or_tenant_do_not_count(apart):
    healing = PrefixAccounts()
    for number in range(20):
        arrive(healing, make_cost(str(number), **apart))
    assert not healing.must_compute(make_cost("first"))


def test_equal_prompts_share_a_load_and_count_once():
    healing = PrefixAccounts()
    for number in range(20):
        arrive(healing, make_cost(str(number)), prompt="the same")
    assert not healing.must_compute(make_cost("0"))
    healing.waiting.remove("0")
    arrive(healing, make_cost("a"))
    arrive(healing, make_cost("b"))
    assert not healing.must_compute(make_cost("b")), "three loads: the same, a and b"
    arrive(healing, make_cost("c"))
    assert healing.must_compute(make_cost("b"))


@pytest.mark.parametrize("how", ["admitted", "ended"])
def test_who_waits_no_longer_does_not_count(how):
    healing = PrefixAccounts()
    for number in range(20):
        arrive(healing, make_cost(str(number)))
    for number in range(1, 20):
        (healing.waiting.remove if how == "admitted" else healing.forget)(str(number))
    assert not healing.must_compute(make_cost("0"))


def test_nobody_of_another_prefix_or_tenant_waits():
    healing = PrefixAccounts()
    assert healing.must_compute(make_cost("owner", 1.0))
    assert not must_wait(healing, make_cost("other", prefix=b"q"))
    assert not must_wait(healing, make_cost("tenant", tenant="another"))
    assert must_wait(healing, make_cost("same"))
    assert not must_wait(healing, make_cost("owner", 1.0)), "who computes it waits for nobody"
    assert healing.must_compute(make_cost("owner", 1.0))


@given(st.lists(st.booleans(), max_size=3 * MAX_WAITS))
def test_nobody_waits_for_ever(computing):
    healing = PrefixAccounts()
    healing.must_compute(make_cost("owner", 1.0))
    computing += [True] * (MAX_WAITS + 1)
    waited = [must_wait(healing, make_cost("waits"), lambda _name, now=now: now) for now in computing]
    assert sum(waited) == MAX_WAITS
    assert all(now for now, did in zip(computing, waited, strict=True) if did)


def test_who_finds_more_of_the_prefix_in_each_step_waits_to_its_end():
    healing = PrefixAccounts()
    healing.must_compute(make_cost("owner", 1.0))
    assert all(must_wait(healing, make_cost("waits"), exact_tokens=16 * step) for step in range(3 * MAX_WAITS))
    assert sum(must_wait(healing, make_cost("waits"), exact_tokens=0) for _ in range(2 * MAX_WAITS)) == MAX_WAITS - 1


@given(st.integers(2, 40), SHARES, st.integers(1, 3))
def test_where_the_owner_is_aborted_nobody_waits_for_it_and_another_takes_its_place(users, share, aborts):
    healing = PrefixAccounts()
    costs = [make_cost(str(number), share) for number in range(users)]
    for cost in costs:
        arrive(healing, cost)
    for cost in costs[:aborts]:
        if not admit(healing, cost):
            break
        assert all(must_wait(healing, other) for other in costs if other is not cost)
        healing.forget(cost.request_id)
        costs.remove(cost)
        assert not any(must_wait(healing, other) for other in costs)
        if costs:
            assert healing.must_compute(costs[0]) == (len(costs) * share >= 1 - 1e-9)
    for cost in costs:
        healing.forget(cost.request_id)
    assert not len(healing.waiting)
    assert not healing._waits
    assert not healing._owners


def test_a_prefill_that_came_to_nothing_starts_the_account_again():
    healing = PrefixAccounts()
    assert count_loads_before_a_prefill(healing) == 3
    assert count_loads_before_a_prefill(healing) == 3, "no prefill follows a prefill"


def test_a_name_that_is_used_again_is_another_request():
    healing = PrefixAccounts()
    assert healing.must_compute(make_cost("name", 1.0))
    healing.forget("name")
    assert not healing.must_compute(make_cost("name"))


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
    assert not any(serve(healing, make_cost(str(number))) for number in range(3))


@given(st.integers(0, 4000), st.sampled_from([1, 16, 32, 128, 784]))
def test_marks_are_the_same_for_all_prompts_and_lie_close(blocks, block_tokens):
    marks, longer = list_marks(blocks, block_tokens), list_marks(blocks + 50, block_tokens)
    assert longer[: len(marks)] == marks
    for before, after in zip([0, *marks], marks, strict=False):
        assert (after - before) * block_tokens <= max(256, block_tokens, before * block_tokens / 16)
