"""Prefixes that many requests load are computed once: the books alone, by property."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semblend.integration.vllm.scheduler.healing import (
    Healing,
    LoadCost,
    Mark,
    Verdict,
)

PREFIX = 1024
SHARES = st.floats(0.1, 1.5)


def make_cost(name, share=0.25, *, prefix=b"p", tenant="", tokens=PREFIX, marks=4, exact=0):
    """A load of one prefix with ``marks`` marks, that computes ``share`` of its rows."""
    ends = [tokens * (number + 1) // marks for number in range(marks)]
    found = (
        Mark(end, prefix + bytes([number]), share * (end - exact), tokens - exact)
        for number, end in enumerate(ends)
        if end > exact
    )
    return LoadCost(name, tenant, tuple(found))


def nobody(_name):
    return False


def serve(healing, cost, *, is_prefilling=nobody):
    """One request from its first question on to its end; the verdict that it got in the end."""
    verdict = healing.judge(cost, is_prefilling)
    while verdict is Verdict.WAIT:
        verdict = healing.judge(cost, is_prefilling)
    if verdict is Verdict.LOAD:
        healing.note_load(cost)
    healing.forget(cost.request_id)
    return verdict


def run(shares):
    """What requests of one prefix cost together, with the prefix held from its prefill on; and how many loaded."""
    healing, total, loads = Healing(), 0.0, 0
    for number, share in enumerate(shares):
        cost = make_cost(str(number), share)
        if serve(healing, cost) is Verdict.PREFILL:
            return total + cost.marks[-1].price, loads
        total, loads = total + cost.marks[-1].rows, loads + 1
    return total, loads


@given(st.lists(SHARES, min_size=1, max_size=40))
def test_a_prefix_never_costs_twice_what_the_better_of_loading_and_computing_it_would(shares):
    cost, _ = run(shares)
    always_load, compute_once = PREFIX * sum(shares), float(PREFIX)
    assert cost < 2 * min(always_load, compute_once) + 1e-6


@given(SHARES)
def test_a_prefix_is_computed_when_the_next_load_would_bring_its_loads_to_the_price(share):
    _, loads = run([share] * 40)
    assert loads * share < 1 <= (loads + 1) * share + 1e-9
