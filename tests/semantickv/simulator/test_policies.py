"""Every compiled policy does what its plain twin does, block for block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_policies import PLAIN

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.plain import Block
from semantickv.simulator.policies import POLICIES, find_policy
from semantickv.simulator.simulate import SimulationResult, build_forest, simulate
from semantickv.traces.trace import Trace, TraceRequest

TYPES = ("system", "user", "code", "other")


@st.composite
def traces(draw, repeats: bool = True, unit: bool = False):
    """Small traces with much sharing: few ids, so that prefixes and blocks come back."""
    count = draw(st.integers(1, 40))
    requests = []
    for r in range(count):
        ids = draw(st.lists(st.integers(0, 6), min_size=0, max_size=7, unique=not repeats))
        tokens = tuple(16 if unit else 8 + 8 * (i % 3) for i in ids)
        kinds = tuple(TYPES[i % 4] for i in ids)
        requests.append(
            TraceRequest(str(r), float(r // 2), tuple(ids), tokens, kinds, tenant="ab"[draw(st.integers(0, 1))])
        )
    return Trace.from_requests(requests)


def same(a: SimulationResult, b: SimulationResult) -> None:
    assert np.array_equal(a.hit_tokens_by_request, b.hit_tokens_by_request)
    for field in ("block_hits", "token_hits", "evictions", "evictions_by_type", "regret", "requests_with_a_hit"):
        assert getattr(a, field) == getattr(b, field), field
    assert a.utilization == pytest.approx(b.utilization)
    assert np.array_equal(a.cached_nodes, b.cached_nodes)


@pytest.mark.parametrize("mode", ["prefix", "block"])
@pytest.mark.parametrize("name", POLICIES)
@given(trace=traces(), size=st.integers(0, 24), tokens=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_compiled_policy_equals_its_plain_twin(name, mode, trace, size, tokens):
    capacity = Capacity.tokens(size * 12) if tokens else Capacity.blocks(size)
    forest = build_forest(trace, mode)
    same(simulate(forest, name, capacity), simulate(forest, PLAIN[name], capacity))


@given(trace=traces(), size=st.integers(0, 24), tokens=st.booleans(), mode=st.sampled_from(["prefix", "block"]))
@settings(max_examples=100, deadline=None)
def test_adaptive_learns_the_same_in_both_twins_when_lessons_come_often(trace, size, tokens, mode):
    capacity = Capacity.tokens(size * 12) if tokens else Capacity.blocks(size)
    forest = build_forest(trace, mode)
    fast, slow = (
        simulate(forest, of["adaptive_semantic"], capacity, share=0.01)  # a lesson every twelve blocks
        for of in (POLICIES, PLAIN)
    )
    same(fast, slow)
    assert fast.weights == pytest.approx(slow.weights)


def growing(seed: int, requests: int = 230) -> Trace:
    """Prompts behind a popular root, some long, some coming back soon, late or never: reaches every class and age."""
    rng = np.random.default_rng(seed)
    chats: list[list[int]] = []
    made, fresh = [], 1000
    for r in range(requests):
        back = chats and rng.random() < 0.55
        ids = chats[int(rng.integers(len(chats)))] if back else [0, int(rng.integers(1, 4))]
        more = int(rng.choice([1, 2, 4, 8, 14, 45], p=[0.3, 0.25, 0.2, 0.15, 0.08, 0.02]))
        ids = [*ids, *range(fresh, fresh + more)]
        fresh += more
        chats = [*chats[-12:], ids[: int(rng.integers(2, len(ids) + 1))]]
        tokens, kinds = tuple(8 + i % 5 for i in ids), tuple(TYPES[i % 4] for i in ids)
        made.append(TraceRequest(str(r), float(r), tuple(ids), tokens, kinds))
    return Trace.from_requests(made)


@pytest.mark.parametrize("capacity", [Capacity.blocks(60), Capacity.blocks(250), Capacity.tokens(900)], ids=str)
@pytest.mark.parametrize("mode", ["prefix", "block"])
def test_adaptive_learns_the_same_in_both_twins_over_many_cache_fuls(mode, capacity):
    forest = build_forest(growing(5), mode)
    fast, slow = (simulate(forest, of["adaptive_semantic"], capacity) for of in (POLICIES, PLAIN))
    same(fast, slow)
    assert fast.weights == pytest.approx(slow.weights, rel=1e-9)


@pytest.mark.parametrize("capacity", [Capacity.blocks(60), Capacity.blocks(250), Capacity.tokens(900)], ids=str)
@pytest.mark.parametrize("mode", ["prefix", "block"])
@pytest.mark.parametrize("name", ["lhd", "workload_aware"])
def test_policies_that_count_by_age_learn_the_same_in_both_twins_over_many_cache_fuls(name, mode, capacity):
    forest = build_forest(growing(7), mode)
    same(*(simulate(forest, of[name], capacity) for of in (POLICIES, PLAIN)))


@given(seed=st.integers(0, 99), share=st.floats(0.1, 0.9))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if not policy.offline])
def test_no_policy_knows_what_comes_later(name, seed, share):
    """What a policy does with the first requests does not depend on the rest, nor on how large its blocks are."""
    trace = growing(seed, 120)
    huge = TraceRequest("huge", 1e9, tuple(range(10**6, 10**6 + 50)), (5000,) * 50, ("legal_evidence",) * 50)
    cut = max(1, int(len(trace) * share))
    head = simulate(trace.take_first(cut), name, Capacity.tokens(700)).hit_tokens_by_request
    longer = Trace.from_requests([*trace.iter_requests(), huge, huge])
    assert np.array_equal(head, simulate(longer, name, Capacity.tokens(700)).hit_tokens_by_request[:cut])


def replay(ids, name, size, **options):
    asks = [TraceRequest(str(n), float(n), (i,), (16,), ("other",)) for n, i in enumerate(ids)]
    return simulate(Trace.from_requests(asks), name, Capacity.blocks(size), mode="block", **options)


def test_sieve_keeps_what_was_used_and_moves_nothing():
    # 1 is marked, so the hand passes it and takes 2; then 3 is under the hand
    assert replay([1, 2, 3, 1, 4, 1, 3], "sieve", 3).block_hits == 3


def test_s3fifo_lets_a_scan_pass_and_remembers_who_came_back():
    loop = [1, 2] * 3 + list(range(100, 200)) + [1, 2]
    assert replay(loop, "s3fifo", 10).block_hits == replay(loop, "lru", 10).block_hits + 2


def test_lhd_learns_that_a_loop_larger_than_the_cache_is_worth_keeping_in_part():
    loop = list(range(12)) * 40
    assert replay(loop, "lru", 8).block_hits == 0
    assert replay(loop, "lhd", 8).block_hits > 100


def test_workload_aware_keeps_the_category_that_comes_back():
    made = []
    for n in range(300):
        kind, block = ("system", n // 3 % 6) if n % 3 == 0 else ("user", 1000 + n)
        made.append(TraceRequest(str(n), float(n), (block,), (16,), (kind,)))
    trace = Trace.from_requests(made)
    hits = {name: simulate(trace, name, Capacity.blocks(8)).block_hits for name in ("lru", "workload_aware")}
    assert hits["lru"] == 0
    assert hits["workload_aware"] > 60


def test_tinylfu_refuses_newcomers_that_were_asked_for_no_more_often():
    loop = [1, 2] * 3 + list(range(100, 120)) + [1, 2]
    assert replay(loop, "tinylfu", 2).block_hits == 6
    assert replay(loop, "tinylfu", 2).evictions == 0
    assert replay(loop, "tinylfu", 2).refusals == 20


@pytest.mark.parametrize("of", [POLICIES, PLAIN], ids=["compiled", "plain"])
def test_a_block_that_leaves_with_the_request_that_brought_it_is_refused_not_evicted(of):
    once = replay([1, 1, 1, 2, 3, 1], of["belady_bypass"], 1)
    assert (once.block_hits, once.evictions, once.refusals) == (3, 0, 2)


@pytest.mark.parametrize("of", [POLICIES, PLAIN], ids=["compiled", "plain"])
@pytest.mark.parametrize("name", ["lru", "sieve", "adaptive_semantic"])
def test_a_block_that_grew_gives_only_the_tokens_that_were_computed(name, of):
    asks = [TraceRequest(str(n), n, (7,), (tokens,), ("user",)) for n, tokens in enumerate((100, 512, 100, 512))]
    done = simulate(Trace.from_requests(asks), of[name], Capacity.blocks(4))
    assert done.token_hits == 100 + 100 + 512


def test_lru2_keeps_what_was_used_twice_before_what_was_used_just_now():
    assert replay([1, 1, 2, 3, 1], "lru2", 2).block_hits == 2
    assert replay([1, 1, 2, 3, 1], "lru", 2).block_hits == 1


def test_lfu_all_remembers_the_uses_of_what_was_evicted():
    ids = [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 1, 4, 1]
    assert replay(ids, "lfu_all", 2).block_hits == replay(ids, "lfu", 2).block_hits + 1


def test_slru_lets_a_scan_pass():
    loop = [1, 2] * 2 + list(range(100, 120)) + [1, 2]
    assert replay(loop, "slru", 3).block_hits == 4
    assert replay(loop, "lru", 3).block_hits == 2


def test_tlru_gives_up_the_end_of_a_prompt_first_and_without_a_tail_it_is_lru():
    asks = [TraceRequest(str(n), n, ids, (16,) * len(ids), ("user",) * len(ids)) for n, ids in
            enumerate([(1, 2, 3), (9,), (8,), (1, 2)])]  # fmt: skip
    trace = Trace.from_requests(asks)
    tail = simulate(trace, "tlru", Capacity.blocks(3), tail_tokens=16)
    plain, lru = (
        simulate(trace, "tlru", Capacity.blocks(3), tail_tokens=0),
        simulate(trace, "lru", Capacity.blocks(3)),
    )
    assert plain.block_hits == lru.block_hits
    assert tail.block_hits >= lru.block_hits


def test_lfuda_lets_old_fame_fade_and_lfu_does_not():
    loop = [1] * 50 + [n for i in range(2, 60) for n in (i, i + 1000, i)]
    assert replay([*loop, 1], "lfu", 2).block_hits == 50 - 1 + 1
    assert replay([*loop, 1], "lfuda", 2).block_hits > 50


def test_static_semantic_refuses_user_text_for_a_system_prompt():
    system = TraceRequest("s", 0.0, (1,), (64,), ("system",))
    users = [TraceRequest(str(n), 1.0, (n,), (64,), ("user",)) for n in range(2, 9)]
    trace = Trace.from_requests([system, *users, TraceRequest("e", 2.0, (1,), (64,), ("system",))])
    assert simulate(trace, "static_semantic", Capacity.blocks(1)).block_hits == 1
    assert simulate(trace, "lru", Capacity.blocks(1)).block_hits == 0


def test_adaptive_learns_which_type_comes_back():
    """Documents come back after 40 asks, user text never does: LRU of 30 blocks loses all, adaptive keeps some."""
    requests = []
    for n in range(6000):
        kind, block = ("retrieved_context", n % 20) if n % 2 else ("user", 1000 + n)
        requests.append(TraceRequest(str(n), float(n), (block, 10**6 + n), (16, 16), (kind, "user")))
    trace = Trace.from_requests(requests)
    lru, mine = (simulate(trace, name, Capacity.blocks(12), mode="block") for name in ("lru", "adaptive_semantic"))
    assert lru.block_hits == 0
    assert mine.block_hits > 1000
    assert mine.weights["retrieved_context"] > 5 * mine.weights["user"]


def test_every_policy_has_a_plain_twin():
    assert PLAIN.keys() == POLICIES.keys()
    assert find_policy(PLAIN["lru"]) is PLAIN["lru"]
    assert Block(1, 1, 16, "user", 0, -1).evictable
