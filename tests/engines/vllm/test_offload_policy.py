"""Our eviction policies behind the interface of vLLM's CPU offload. No engine is started."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: .ci/engines/vllm-cpu runs these tests")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies import base
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from semblend.errors import ConfigError
from semblend.integration.vllm.offload_spec import replace_policy

Status = getattr(base, "ChunkStatus", None) or base.BlockStatus  # its name from vLLM 0.32 on, and before
MODULE = "semblend.integration.vllm.offload_policy"
NAMES = ("Adaptive", "Lfu", "Slru", "Lru2")


def make(name: str, capacity: int) -> CachePolicy:
    return CachePolicyFactory.get_cache_policy_cls(name, MODULE)(cache_capacity=capacity)


def key(number: int) -> OffloadKey:
    return OffloadKey(number.to_bytes(8, "big") + bytes(4))  # the last four name the group


def serve(policy: CachePolicy, number: int, keys: list[OffloadKey], capacity: int, held: set[OffloadKey]) -> int:
    """Do as the offloading manager does with one request; returns how many of its chunks were there."""
    context = ReqContext(req_id=f"r{number}")
    hits = [one for one in keys if policy.get(one) is not None]
    policy.touch(keys, context)
    new = [one for one in keys if policy.get(one) is None]
    if hasattr(policy, "on_store_miss"):
        policy.on_store_miss(new, context)
    too_many = len(held) + len(new) - capacity
    if too_many > 0:
        gone = policy.evict(too_many, set(keys))
        if gone is None:
            return len(hits)
        assert len(gone) == too_many
        assert not {one for one, _ in gone} & set(keys)
        held.difference_update(one for one, _ in gone)
    for one in new:
        policy.insert(one, Status(len(held)))
    for one in new:
        chunk = policy.get(one)
        assert chunk is not None
        chunk.ref_cnt = 0
        policy.mark_evictable(one)
    held.update(new)
    policy.touch(keys, context)
    if hasattr(CachePolicy, "on_request_finished"):
        policy.on_request_finished([keys], set(new), set(hits), context)
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
    return [serve(policy, number, keys, capacity, held) for number, keys in enumerate(stream(seed, requests))]


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
        policy.insert(key(number), Status(number))
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


def test_a_request_is_one_use_however_often_vllm_names_its_chunks(monkeypatch):
    policy = make("Adaptive", 30)
    heard: list[tuple[int, int]] = []
    monkeypatch.setattr(policy._policy, "use", lambda keys, *, told=0: heard.append((len(keys), told)))
    keys, context = [key(number) for number in range(6)], ReqContext(req_id="r")
    policy.touch(keys[:4], context)
    policy.touch(keys[:4], context)
    policy.touch(keys, context)
    if hasattr(CachePolicy, "on_request_finished"):
        policy.on_request_finished([keys], set(), set(), context)
        assert heard == [(6, 0)]
    else:
        assert heard == [(4, 0), (6, 4)]


def test_vllms_own_manager_takes_our_policy_where_it_has_no_path_for_one():
    manager = replace_policy(CPUOffloadingManager(30), "Adaptive", 30)
    found = 0
    for number, keys in enumerate(stream(4, 300)):
        context = ReqContext(req_id=f"r{number}")
        manager.on_new_request(context)
        found += sum("HIT" in str(manager.lookup(one, context)) for one in keys)
        manager.touch(keys, context)
        stored = manager.prepare_store(keys, context)
        assert stored is not None
        manager.complete_store(stored.keys_to_store, context)
        manager.on_request_finished(context)
    assert found > 300
    with pytest.raises(ConfigError, match="lru"):
        replace_policy(manager, "lru", 30)
