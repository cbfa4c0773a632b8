"""Our eviction policies in SGLang's real tree: victims as the policy says, nothing that is in use, same answers."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import pytest

from semblend.config import EVICTION_POLICIES

OTHERS = [name for name in EVICTION_POLICIES if name != "lru"]
LENGTH = 64


@pytest.fixture(scope="module")
def engine():
    """A scheduler whose tree asks our policies: it needs a process of its own, as `.ci/engines/sglang-cpu` gives it."""
    from conftest import FLAGS, MODEL
    from scheduler_world import SchedulerWorld

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEMBLEND_EVICTION", "lfu")
        return SchedulerWorld(MODEL, **FLAGS)


@pytest.fixture
def world(engine):
    assert type(engine.cache.tree_core.eviction_strategy).__name__ == "PolicyStrategy"
    engine.flush()
    engine.events.clear()
    yield engine
    engine.flush()


def value_by(world, name: str) -> None:
    """Change the policy of a tree that stands; SGLang has bound the strategy that it asked first."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    world.cache.value_leaves(name)
    world.cache.components[ComponentType.FULL].session_ref_eviction_strategy = None


def make_document(number: int, length: int = LENGTH) -> array:
    draw = random.Random(number)
    return array("q", [draw.randrange(100, 30_000) for _ in range(length)])


def put(world, tokens: array, salt: str | None = None) -> None:
    """Insert tokens with slots of their own, as a request does that has computed them."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache = world.cache
    slots = cache.token_to_kv_pool_allocator.alloc(len(tokens))
    cache.insert(InsertParams(key=RadixKey(tokens, salt), value=slots))  # frees those of what it holds already
    cache._note_use(SimpleNamespace(extra_key=salt, cache_salt=None, full_untruncated_fill_ids=tokens), len(tokens))


def evict(world, tokens: int) -> int:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return int(world.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)


def name_blocks(tokens: array, salt: str | None = None) -> list[int]:
    name, names = hash((salt, None)), []
    for begin in range(0, len(tokens) - 15, 16):
        name = hash((name, tokens[begin : begin + 16].tobytes()))
        names.append(name)
    return names


def count_held(world, tokens: array) -> int:
    """Tokens of a document in the tree; asking is no use, but makes SGLang's node recent."""
    return world.exact_hit(list(tokens))


@pytest.mark.parametrize("name", OTHERS)
def test_the_leaf_that_the_policy_values_least_leaves_first_among_equals_the_oldest(world, name):
    value_by(world, name)
    documents = [make_document(number) for number in range(8)]
    draw = random.Random(4)
    for number in [*range(8), *(draw.choice([1, 1, 1, 3, 3, 6]) for _ in range(30))]:
        put(world, documents[number])
    policy = world.cache._strategy._policy
    left = dict(enumerate(documents))
    leaves = {bytes(leaf.key.raw_token_ids()): leaf for leaf in world.cache.tree_core.evictable_device_leaves}
    ages = {number: leaves[bytes(tokens)].last_access_time for number, tokens in left.items()}
    while left:
        worth = {n: (sum(policy.price(name_blocks(t))) / (LENGTH // 16), ages[n]) for n, t in left.items()}
        victim = min(left, key=worth.__getitem__)
        assert evict(world, 1) == LENGTH
        held = {bytes(leaf.key.raw_token_ids()) for leaf in world.cache.tree_core.evictable_device_leaves}
        del left[victim]
        assert held == {bytes(tokens) for tokens in left.values()}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_request_holds_never_leaves_however_little_it_is_worth(world, name):
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    value_by(world, name)
    locked, others = make_document(100), [make_document(number) for number in range(101, 107)]
    put(world, locked)
    for _ in range(4):
        for tokens in others:
            put(world, tokens)
    lock = world.cache.lock(world.cache.match_prefix(MatchPrefixParams(key=RadixKey(locked, None))).last_device_node)
    assert evict(world, 1 << 20) == LENGTH * len(others)
    assert count_held(world, locked) == LENGTH
    world.cache.unlock(lock)
    assert evict(world, 1 << 20) == LENGTH
    assert world.cache.evictable_size() == 0


def test_names_of_blocks_survive_splits_and_salts_have_names_of_their_own(world):
    from semblend.integration.sglang.eviction_strategy import find_blocks

    value_by(world, "lfu")
    whole = make_document(200, 150)
    branches = [
        whole,
        whole[:40] + make_document(201, 50),
        whole[:100] + make_document(202, 30),
        whole[:7] + whole[:20],
    ]
    for tokens in branches:
        put(world, tokens)
        put(world, tokens, salt="other")
    for leaf in list(world.cache.tree_core.evictable_device_leaves):
        node, path = leaf, []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        tokens = array("q", [token for one in reversed(path) for token in one.key.raw_token_ids()])
        names = [name for one in reversed(path) for name in find_blocks(one).names]
        assert names == name_blocks(tokens, leaf.key.extra_key)
    assert name_blocks(whole) != name_blocks(whole, "other")


def test_a_block_that_left_is_forgotten_and_an_emptied_tree_leaves_nothing_behind(world):
    value_by(world, "lfu")
    for number in range(300, 306):
        put(world, make_document(number))
    evict(world, 3 * LENGTH)
    assert len(world.cache._strategy._policy._uses) == 3 * LENGTH // 16
    world.flush()
    assert world.cache._strategy._policy._uses == {}


def test_a_policy_that_fails_leaves_lru_and_one_event(world, monkeypatch):
    value_by(world, "lfu")
    documents = [make_document(number) for number in range(400, 404)]
    for tokens in [*documents, documents[0]]:
        put(world, tokens)
    monkeypatch.setattr(world.cache._strategy._policy, "price", lambda _: [])
    assert evict(world, 2 * LENGTH) == 2 * LENGTH
    assert [count_held(world, tokens) for tokens in documents] == [LENGTH, 0, 0, LENGTH]
    assert [event.fields["where"] for event in world.events if event.kind == "error"] == ["eviction"]


def test_answers_are_those_of_a_cold_engine_whatever_was_evicted_between(world):
    prompts = [world.instruction(number) + world.question(f"Say {number}.") for number in (1, 2, 3)]
    cold = [world.cold(prompt).tokens for prompt in prompts]
    value_by(world, "adaptive")
    for round_ in range(3):
        answers = world.ask(*prompts[: 1 + round_], opt_out=True)
        assert [answer.tokens for answer in answers] == cold[: 1 + round_]
        assert world.cache._strategy._policy is not None
        evict(world, 30)
    assert any(answer.cached for answer in answers)
