"""Policies by name behind one interface, in the radix cache of the embedded engine too."""

from __future__ import annotations

import random
from typing import Any

import pytest

from semblend.config import EVICTION_POLICIES, SemBlendConfig
from semblend.engine.core.radix import RadixCache
from semblend.engine.model.paged_kv import KvPool
from semblend.errors import ConfigError
from semblend.eviction.policy import EvictionPolicy, GuardedPolicy, make_policy

BLOCK = 4
OTHERS = tuple(name for name in EVICTION_POLICIES if name != "lru")


class Failing:
    """Works so many times, then fails at everything."""

    epoch = 0

    def __init__(self, calls: int, price: float = 1.0) -> None:
        self.calls, self.worth = calls, price

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("out of order")

    def use(self, keys: Any, *, told: int = 0, session: int = 0, sizes: Any = None) -> None:
        del keys, told, session, sizes
        self._count()

    def price(self, keys: Any) -> list[float]:
        self._count()
        return [self.worth] * len(keys)

    def forget(self, key: int) -> None:
        del key
        self._count()


def make_pool(blocks: int) -> KvPool:
    return KvPool(layers=1, kv_heads=1, head_dim=2, blocks=blocks + 1, block_tokens=BLOCK)


def serve(pool: KvPool, cache: RadixCache, tokens: list[int], answer: int = 0) -> int:
    """Do as the scheduler does with one request; returns how many of its blocks were cached."""
    known = cache.match("n", tokens)
    for block in known:
        pool.share(block)
    missing = (len(tokens) + answer * BLOCK) // BLOCK - len(known)
    cache.evict(missing - pool.free_blocks)
    blocks = known + pool.allocate(missing, "")
    prompt = len(tokens) // BLOCK
    cache.insert("n", tokens, blocks[:prompt], exact_until=1 << 62)
    if answer:
        whole = [*tokens, *(7 for _ in range(answer * BLOCK))]
        cache.insert("n", whole, blocks, exact_until=1 << 62, offered=prompt)
    pool.free(blocks)
    cache.check()
    return len(known)


def stream(seed: int, requests: int) -> list[list[int]]:
    """Eight documents that come back behind one-off prompts that never do."""
    draw = random.Random(seed)
    made = []
    for r in range(requests):
        document = draw.randrange(8) if r % 3 else 1000 + r
        made.append([document * 50 + place for place in range(6 * BLOCK)] + [r] * BLOCK)
    return made


@pytest.mark.parametrize("name", OTHERS)
def test_every_policy_serves_and_the_tree_stays_whole(name):
    pool = make_pool(24)
    cache = RadixCache(pool, make_policy(name, 24))
    hits = sum(serve(pool, cache, tokens, answer=r % 3) for r, tokens in enumerate(stream(1, 120)))
    assert hits > 0
    assert len(cache) <= 24


def test_adaptive_keeps_what_comes_back_where_lru_does_not():
    found = {}
    for name in ("lru", "adaptive"):
        pool = make_pool(30)
        cache = RadixCache(pool, make_policy(name, 30))
        found[name] = sum(serve(pool, cache, tokens) for tokens in stream(2, 600))
    assert found["adaptive"] > 1.3 * found["lru"]


@pytest.mark.parametrize("calls", [0, 1, 7, 40])
def test_a_policy_that_fails_leaves_an_lru_cache_and_is_reported_once(calls):
    failures: list[BaseException] = []
    pools = make_pool(24), make_pool(24)
    guarded = RadixCache(pools[0], GuardedPolicy(Failing(calls), failures.append))
    plain = RadixCache(pools[1])
    for tokens in stream(3, 80):
        assert serve(pools[0], guarded, tokens) == serve(pools[1], plain, tokens)
    assert [str(error) for error in failures] == ["out of order"]


def test_prices_that_are_no_numbers_count_as_a_failure():
    failures: list[BaseException] = []
    guarded = GuardedPolicy(Failing(9, float("nan")), failures.append)
    assert guarded.price([1, 2]) == [0.0, 0.0]
    assert len(failures) == 1


def test_the_answer_that_follows_a_prompt_is_no_second_use_of_the_prompt():
    policy = make_policy("lfu", 8)
    assert policy is not None
    policy.use([1, 2])
    policy.use([1, 2, 3], told=2)
    assert policy.price([1, 2, 3]) == [1.0, 1.0, 1.0]


def test_lru2_values_the_last_use_but_one_and_forgets_the_oldest_blocks():
    policy = make_policy("lru2", 1)
    assert policy is not None
    policy.use([1])
    policy.use([2])
    policy.use([1])
    assert policy.price([1, 2]) == [1.0, 0.0]
    for key in range(100, 200):
        policy.use([key])
    policy.use([1])
    assert policy.price([1]) == [0.0]


def test_slru_knows_two_segments_and_forgets_what_left():
    policy = make_policy("slru", 8)
    assert policy is not None
    for _ in range(3):
        policy.use([1])
    policy.use([2])
    assert policy.price([1, 2]) == [1.0, 0.0]
    policy.forget(1)
    assert policy.price([1]) == [0.0]


@pytest.mark.parametrize("name", OTHERS)
def test_every_policy_has_the_whole_interface(name):
    policy: EvictionPolicy | None = make_policy(name, 4)
    assert policy is not None
    policy.use([1, 2], told=1, session=9)
    assert len(policy.price([1, 2, 3])) == 3
    policy.forget(1)
    assert isinstance(policy.epoch, int)


def test_an_unknown_policy_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError, match="adaptive"):
        make_policy("best", 4)
    with pytest.raises(ConfigError, match="lru2"):
        SemBlendConfig(eviction="best")
