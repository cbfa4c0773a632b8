"""The exact prefix cache against a dictionary of prefixes, which is what it means."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.engine.core.radix import RadixCache
from semblend.engine.model.paged_kv import KvPool
from semblend.errors import SemBlendError

BLOCK = 4
FOREVER = 1 << 62


def make_pool(blocks: int = 64) -> KvPool:
    return KvPool(layers=1, kv_heads=1, head_dim=2, blocks=blocks + 1, block_tokens=BLOCK)


def put(pool: KvPool, cache: RadixCache, tokens: list[int], namespace: str = "n", tenant: str = "") -> list[int]:
    """As a sequence does that ran and ended: own blocks, offered, then let go."""
    blocks = pool.allocate(len(tokens) // BLOCK, tenant)
    cache.insert(namespace, tokens, blocks, exact_until=FOREVER)
    pool.free(blocks)
    return blocks


def test_a_prompt_matches_the_full_blocks_it_shares_and_no_more():
    pool = make_pool()
    cache = RadixCache(pool)
    blocks = put(pool, cache, list(range(12)))
    assert cache.match("n", [*range(10), 99, 98, 97]) == blocks[:2]
    assert cache.match("n", list(range(3))) == []
    assert cache.match("n", [5, *range(1, 12)]) == []


def test_namespaces_never_share():
    pool = make_pool()
    cache = RadixCache(pool)
    put(pool, cache, list(range(12)), "a")
    assert cache.match("b", list(range(12))) == []
    assert len(cache.match("a", list(range(12)))) == 3


def test_a_block_beyond_the_exact_part_of_a_sequence_is_refused():
    pool = make_pool()
    cache = RadixCache(pool)
    blocks = pool.allocate(3)
    with pytest.raises(SemBlendError, match="exact only up to 11"):
        cache.insert("n", list(range(12)), blocks, exact_until=11)
    assert len(cache) == 0
    assert cache.insert("n", list(range(12)), blocks[:2], exact_until=11) == 2


def test_blocks_that_are_not_full_are_refused():
    pool = make_pool()
    with pytest.raises(SemBlendError, match="2 blocks for 7 tokens"):
        RadixCache(pool).insert("n", list(range(7)), pool.allocate(2), exact_until=FOREVER)


def test_the_first_of_two_equal_sequences_keeps_its_blocks_in_the_tree():
    pool = make_pool()
    cache = RadixCache(pool)
    first = put(pool, cache, list(range(8)))
    second = pool.allocate(3)
    assert cache.insert("n", list(range(12)), second, exact_until=FOREVER) == 1
    assert cache.match("n", list(range(12))) == [*first, second[2]]
    assert pool.owners(second[0]) == 1  # its own, not the tree's


def test_the_least_recently_used_leaf_goes_first_and_parents_after_their_children():
    pool = make_pool()
    cache = RadixCache(pool)
    put(pool, cache, [1] * 8)
    put(pool, cache, [2] * 8)
    cache.match("n", [1] * 8)
    assert cache.evict(1) == 1
    assert len(cache.match("n", [2] * 8)) == 1
    assert len(cache.match("n", [1] * 8)) == 2
    assert cache.evict(100) == 3
    assert pool.used_blocks == 0
    cache.check()


def test_a_block_in_use_is_not_evicted():
    pool = make_pool()
    cache = RadixCache(pool)
    blocks = put(pool, cache, [1] * 8)
    pool.share(blocks[0])
    pool.share(blocks[1])
    assert cache.evict(5) == 0
    pool.free(blocks)
    assert cache.evict(5) == 2


def test_reset_lets_go_of_everything_but_what_runs():
    pool = make_pool()
    cache = RadixCache(pool)
    blocks = put(pool, cache, [1] * 8)
    pool.share(blocks[0])
    assert cache.reset() == 2
    assert (pool.used_blocks, len(cache)) == (1, 0)
    assert cache.match("n", [1] * 8) == []


def test_check_sees_a_block_that_was_freed_under_the_tree():
    pool = make_pool()
    cache = RadixCache(pool)
    pool.free(put(pool, cache, [1] * 4))
    with pytest.raises(SemBlendError, match="freed under the tree"):
        cache.check()


tokens = st.lists(st.integers(0, 1), max_size=22)
verbs = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("ab"), tokens),
    st.tuples(st.just("match"), st.sampled_from("ab"), tokens),
    st.tuples(st.just("hold"), st.sampled_from("ab"), tokens),
    st.tuples(st.just("let go"), st.just(""), st.just([])),
    st.tuples(st.just("evict"), st.just(""), tokens),
    st.tuples(st.just("reset"), st.just(""), st.just([])),
)


@settings(max_examples=150)
@given(st.lists(verbs, max_size=40))
def test_it_answers_as_a_dictionary_of_prefixes_would(steps):
    pool = make_pool(400)
    cache = RadixCache(pool)
    known: dict[tuple[str, tuple[int, ...]], int] = {}  # a namespace and a prefix of whole blocks -> its last block
    held: list[list[int]] = []

    def prefixes(namespace, tokens):
        return [(namespace, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    for verb, namespace, prompt in steps:
        if verb == "put":
            blocks = put(pool, cache, prompt, namespace)
            for prefix, block in zip(prefixes(namespace, prompt), blocks, strict=True):
                known.setdefault(prefix, block)
        elif verb in ("match", "hold"):
            expected = []
            for prefix in prefixes(namespace, prompt):
                if prefix not in known:
                    break
                expected.append(known[prefix])
            assert cache.match(namespace, prompt) == expected
            if verb == "hold":
                held.append([pool.share(block) for block in expected])
        elif verb == "let go" and held:
            pool.free(held.pop())
        elif verb == "evict":
            free = pool.free_blocks
            freed = cache.evict(len(prompt))
            assert pool.free_blocks == free + freed
            in_use = {block for blocks in held for block in blocks}
            assert freed == len(prompt) or set(cache.blocks()) <= in_use  # it gave all it could
            alive = set(cache.blocks())
            assert alive >= in_use & set(known.values())
            known = {prefix: block for prefix, block in known.items() if block in alive}
        elif verb == "reset":
            cache.reset()
            known = {}
        cache.check()
        assert sorted(cache.blocks()) == sorted(known.values())
        for name, prefix in known:  # a prefix is known only together with everything before it
            assert len(prefix) == BLOCK or (name, prefix[:-BLOCK]) in known
    cache.reset()
    for blocks in held:
        pool.free(blocks)
    assert pool.used_blocks == 0


def test_the_tenant_that_holds_most_gives_first_and_its_oldest_leaf_first():
    pool = make_pool()
    cache = RadixCache(pool)
    put(pool, cache, [1] * 8, "quiet", tenant="quiet")
    put(pool, cache, [2] * 12, "loud", tenant="loud")
    put(pool, cache, [3] * 12, "loud", tenant="loud")
    assert cache.evict(3) == 3
    assert [len(cache.match("loud", [first] * 12)) for first in (2, 3)] == [0, 3]
    assert cache.evict(1) == 1
    assert pool.held.to_dict() == {"quiet": 2, "loud": 2}
    cache.check()


def test_others_keep_what_is_to_be_spared_and_the_one_that_asks_gives_its_own():
    pool = make_pool()
    cache = RadixCache(pool)
    put(pool, cache, [1] * 16, "quiet", tenant="quiet")
    put(pool, cache, [2] * 8, "loud", tenant="loud")
    assert cache.evict(10, "loud", spare=3) == 3  # one above the three of its neighbour, and both of its own
    assert pool.held.to_dict() == {"quiet": 3}
    assert cache.evict(10, "loud", spare=3) == 0
    assert cache.evict(10, "loud") == 3


def test_blocks_of_running_sequences_count_and_stay():
    pool = make_pool()
    cache = RadixCache(pool)
    running = pool.allocate(6, "loud")
    put(pool, cache, [1] * 16, "quiet", tenant="quiet")
    put(pool, cache, [2] * 4, "loud", tenant="loud")
    assert cache.evict(2) == 2  # loud holds seven, but can give one only
    assert pool.held.to_dict() == {"quiet": 3, "loud": 6}
    pool.free(running)
    pool.check()
