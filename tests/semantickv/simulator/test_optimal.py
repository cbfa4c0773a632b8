"""The bounds are bounds: found by trying everything, and never beaten."""

from __future__ import annotations

import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.policies import POLICIES
from semantickv.simulator.simulate import build_forest, simulate
from semantickv.traces.trace import Trace, TraceRequest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from lib.upper_bound import compute_upper_bound

REQUESTS = st.lists(st.lists(st.integers(0, 5), max_size=5, unique=True), max_size=30)


def trace_of(requests, tokens=lambda i: 16):
    return Trace.from_requests(
        TraceRequest(str(r), float(r), tuple(ids), tuple(map(tokens, ids)), ("other",) * len(ids))
        for r, ids in enumerate(requests)
    )


def best_by_trying(requests, size, bypass):
    """The most block hits that any choice of what to keep can give: all subsets, all requests."""

    @cache
    def best(r, cached):
        if r == len(requests):
            return 0
        asked = frozenset(requests[r])
        everything = cached | asked
        must = frozenset() if bypass else asked
        return len(asked & cached) + max(
            best(r + 1, frozenset(kept))
            for n in range(min(size, len(everything)) + 1)
            for kept in combinations(sorted(everything), n)
            if must <= frozenset(kept)
        )

    return best(0, frozenset())


@given(
    requests=st.lists(st.lists(st.integers(0, 4), max_size=2, unique=True), max_size=7),
    size=st.integers(2, 4),
    bypass=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_belady_finds_what_trying_everything_finds(requests, size, bypass):
    name = "belady_bypass" if bypass else "belady"
    found = simulate(trace_of(requests), name, Capacity.blocks(size), mode="block").block_hits
    assert found == best_by_trying(tuple(map(tuple, requests)), size, bypass)


@pytest.mark.parametrize("mode", ["prefix", "block"])
@given(requests=REQUESTS, size=st.integers(0, 15))
@settings(max_examples=60, deadline=None)
def test_no_policy_beats_belady_of_the_same_rights(mode, requests, size):
    forest = build_forest(trace_of(requests), mode)
    hits = {name: simulate(forest, name, Capacity.blocks(size)).block_hits for name in POLICIES}
    for name, policy in POLICIES.items():
        assert hits[name] <= hits["belady_bypass"], name
        if not (policy.bypass or policy.refuses):
            assert hits[name] <= hits["belady"], name


@pytest.mark.parametrize("mode", ["prefix", "block"])
@given(requests=REQUESTS, size=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_no_policy_beats_the_bound_for_tokens(mode, requests, size):
    forest = build_forest(trace_of(requests, lambda i: 8 + 24 * (i % 3)), mode)
    bound = compute_upper_bound(forest, Capacity.tokens(size))
    for name in POLICIES:
        result = simulate(forest, name, Capacity.tokens(size))
        assert result.token_hits <= bound.token_hits, name
        assert result.block_hits <= bound.block_hits, name


@given(requests=REQUESTS, size=st.integers(0, 15))
@settings(max_examples=60, deadline=None)
def test_with_blocks_of_one_size_the_token_bound_is_belady(requests, size):
    forest = build_forest(trace_of(requests))
    bound = compute_upper_bound(forest, Capacity.tokens(16 * size))
    assert bound.token_hits == simulate(forest, "belady_bypass", Capacity.blocks(size)).token_hits
