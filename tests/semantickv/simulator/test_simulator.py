"""The simulator against models of a few lines, and the rules that hold for every policy."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.plain import Block, PlainPolicy
from semantickv.simulator.policies import POLICIES, Policy
from semantickv.simulator.simulate import build_forest, simulate
from semantickv.traces.trace import Trace, TraceRequest
from semblend.errors import InputError


def trace_of(requests, tenants=None):
    return Trace.from_requests(
        TraceRequest(
            str(r), float(r), tuple(ids), (16,) * len(ids), ("other",) * len(ids), tenant=tenants[r] if tenants else "t"
        )
        for r, ids in enumerate(requests)
    )


def singles(ids):
    return trace_of([[i] for i in ids])


def textbook(kind, ids, size):
    """FIFO, LRU and LFU as in a textbook: one object at a time."""
    cache, counts, hits = OrderedDict(), {}, 0
    for now, i in enumerate(ids):
        if i in cache:
            hits += 1
            if kind != "fifo":
                cache.move_to_end(i)
            counts[i] += 1
            continue
        if size == 0:
            continue
        if len(cache) >= size:
            victim = min(cache, key=lambda j: (counts[j], list(cache).index(j))) if kind == "lfu" else next(iter(cache))
            del cache[victim], counts[victim]
        cache[i], counts[i] = now, 1
    return hits


@pytest.mark.parametrize("kind", ["fifo", "lru", "lfu"])
@pytest.mark.parametrize("mode", ["prefix", "block"])
@given(ids=st.lists(st.integers(0, 9), max_size=120), size=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_a_classic_policy_does_what_the_textbook_says(kind, mode, ids, size):
    assert simulate(singles(ids), kind, Capacity.blocks(size), mode=mode).block_hits == textbook(kind, ids, size)


@given(requests=st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=40), size=st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_prefix_lru_equals_a_model_that_touches_the_end_of_a_prompt_first(requests, size):
    cache, hits = OrderedDict(), 0
    for ids in requests:
        path = [tuple(ids[: n + 1]) for n in range(len(ids))]
        for prefix in path:
            if prefix not in cache:
                break
            hits += 1
        for prefix in reversed(path):
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > size:
            cache.popitem(last=False)
    assert simulate(trace_of(requests), "lru", Capacity.blocks(size)).block_hits == hits


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_behind_a_changed_beginning_hits_in_block_mode_only(name):
    trace = trace_of([[1, 2, 3], [9, 2, 3]])
    assert simulate(trace, name, Capacity.blocks(10), mode="prefix").block_hits == 0
    expected = 0 if name == "none" else 2
    assert simulate(trace, name, Capacity.blocks(10), mode="block").block_hits == expected


@pytest.mark.parametrize("name", POLICIES)
def test_a_tenant_never_hits_what_another_one_cached(name):
    trace = trace_of([[1, 2], [1, 2]], tenants=["a", "b"])
    assert simulate(trace, name, Capacity.blocks(10)).block_hits == 0
    assert simulate(trace, name, Capacity.blocks(10), share_tenants=True).block_hits == 2


@pytest.mark.parametrize("name", POLICIES)
def test_an_endless_cache_hits_all_that_comes_back(name):
    result = simulate(trace_of([[1, 2], [1, 3], [1, 2]]), name, Capacity.blocks(100))
    assert (result.block_hits, result.evictions, result.regret) == (3, 0, 0)
    assert result.simulated is True


def test_regret_counts_misses_of_blocks_that_were_evicted():
    assert simulate(trace_of([[1], [2], [1]]), "lru", Capacity.blocks(1)).regret == 1


def test_a_request_larger_than_the_cache_keeps_its_beginning():
    assert simulate(trace_of([[1, 2, 3, 4], [1, 2, 3, 4]]), "fifo", Capacity.blocks(2)).block_hits == 2


def test_a_policy_of_your_own_is_a_few_lines():
    class MostRecentFirst(PlainPolicy):
        def priority(self, block: Block) -> float:
            return -block.used

    mine = Policy("mru", "the last used goes first", MostRecentFirst)
    result = simulate(singles([1, 2, 3, 1, 2]), mine, Capacity.blocks(2))
    assert (result.policy, result.block_hits) == ("mru", 1)  # 2 goes for 3; 1 is still there


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(InputError, match=r"unknown policy 'lur'.*lru"):
        simulate(singles([1]), "lur", Capacity.blocks(1))


def test_bytes_of_a_model_become_tokens():
    assert Capacity.bytes(57344 * 10, model="qwen2.5-7b") == Capacity(
        "tokens", 10, "573440 bytes of qwen2.5-7b bf16 KV"
    )
    with pytest.raises(InputError, match="unknown model"):
        Capacity.bytes(1, model="gpt")


@pytest.mark.data
def test_the_published_figures_of_the_conversation_trace_come_out():
    data = os.environ.get("SEMBLEND_TEST_DATA")
    if not data:
        pytest.skip("SEMBLEND_TEST_DATA is not set")
    trace = Trace.read(Path(data) / "traces" / "mooncake_conversation_first_half.jsonl.gz")
    forest = build_forest(trace)
    rates = [simulate(forest, "lru", Capacity.blocks(n)).block_hit_rate for n in (1_000, 5_000, 10_000, 20_000, 10**9)]
    assert [round(100 * rate, 2) for rate in rates] == [4.34, 11.28, 20.85, 27.97, 34.56]
    for n in (1_000, 5_000):
        low, mine, high = (
            simulate(forest, name, Capacity.blocks(n)).block_hit_rate
            for name in ("lru", "adaptive_semantic", "belady_bypass")
        )
        assert mine - low >= 0.15 * (high - low)
