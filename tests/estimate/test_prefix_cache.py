"""The replayed prefix cache holds what a plain LRU cache of each size would hold."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace
from semblend.errors import InputError
from semblend.estimate.prefix_cache import BlockHasher, KeyArray, PrefixCache
from semblend.prompt import TokenArray

_MASK = 2**64 - 1


class PlainPrefixCache:
    """The specification: one ordered dictionary for each size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._caches = [(size, OrderedDict[int, None]()) for size in sizes]

    def replay(self, keys: KeyArray, asked: int, held: int | None = None) -> list[int]:
        names = keys.tolist()
        held = len(names) if held is None else held
        return [self._replay_one(size, cache, names[:asked], names[:held]) for size, cache in self._caches]

    def _replay_one(self, size: int, cache: OrderedDict[int, None], asked: list[int], held: list[int]) -> int:
        hits = next((number for number, name in enumerate(asked) if name not in cache), len(asked))
        for name in reversed(held):
            cache[name] = None
            cache.move_to_end(name)
            if len(cache) > size:
                cache.popitem(last=False)
        return hits


def hash_plainly(tokens: TokenArray, block_tokens: int, seed: int) -> KeyArray:
    """What `kernels.hash_blocks` computes."""
    keys, key = [], seed
    for number, token in enumerate(tokens[: len(tokens) // block_tokens * block_tokens].tolist(), start=1):
        mixed = (key + token + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        key = mixed ^ (mixed >> 31)
        if number % block_tokens == 0:
            keys.append(key)
    return np.array(keys, np.uint64)


def chain(*ids: int) -> np.ndarray:
    """Keys of a prompt: each stands for itself and those before it."""
    return np.array([hash(ids[: number + 1]) & 0xFFFF_FFFF for number in range(len(ids))], np.uint64)


def count_by_hand(prompts: list[tuple[int, ...]], size: int) -> list[int]:
    """Hits in blocks, from prefixes in a list that is searched from end to end."""
    held: list[tuple[int, ...]] = []
    found = []
    for prompt in prompts:
        prefixes = [prompt[: end + 1] for end in range(len(prompt))]
        hits = 0
        while hits < len(prefixes) and prefixes[hits] in held:
            hits += 1
        found.append(hits)
        for prefix in reversed(prefixes):
            if prefix in held:
                held.remove(prefix)
            held.append(prefix)
        held = held[-size:]
    return found


PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=7).map(tuple), max_size=30)
SIZES = st.lists(st.integers(1, 24), min_size=1, max_size=4, unique=True).map(sorted)


@pytest.mark.parametrize("kind", [PrefixCache, PlainPrefixCache])
@settings(max_examples=150)
@given(PROMPTS, SIZES)
def test_every_size_hits_what_a_cache_of_that_size_alone_would_hit(
    kind: type[PrefixCache | PlainPrefixCache], prompts: list[tuple[int, ...]], sizes: list[int]
) -> None:
    cache = kind(sizes)
    found = [cache.replay(chain(*prompt), len(prompt)) for prompt in prompts]
    for at, size in enumerate(sizes):
        assert [hits[at] for hits in found] == count_by_hand(prompts, size)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(20, 200))
def test_both_twins_agree_on_long_streams_where_much_is_evicted(seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    twins = [kind([size // 4, size, 2 * size]) for kind in (PrefixCache, PlainPrefixCache)]
    for _ in range(200):
        keys = chain(*random.integers(0, 4, random.integers(0, 12)).tolist())
        asked = int(random.integers(0, len(keys) + 1))
        held = int(random.integers(0, len(keys) + 1))
        assert twins[0].replay(keys, asked, held) == twins[1].replay(keys, asked, held)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=80), st.integers(1, 20), st.text(max_size=3))
def test_both_hashes_agree_and_namespaces_differ(ids: list[int], block: int, tenant: str) -> None:
    tokens = np.array(ids, np.int32)
    namespace = Namespace(tenant=tenant)
    keys = BlockHasher(block).hash(tokens, namespace)
    seed = int.from_bytes(hashlib.blake2b(namespace.digest.encode(), digest_size=8).digest(), "big")
    assert keys.tolist() == hash_plainly(tokens, block, seed).tolist()
    assert len(keys) == len(ids) // block
    other = BlockHasher(block).hash(tokens, Namespace(tenant=tenant + "x"))
    assert not set(keys.tolist()) & set(other.tolist())


def test_a_key_depends_on_everything_before_it() -> None:
    one, two = (hash_plainly(np.array([first, 2, 3, 4], np.int32), 2, 0) for first in (1, 9))
    assert one[0] != two[0]
    assert one[1] != two[1]


@pytest.mark.parametrize("sizes", [[], [0], [2, 1], [3, 3]])
def test_sizes_grow(sizes: list[int]) -> None:
    with pytest.raises(InputError, match="growing numbers of blocks"):
        PrefixCache(sizes)
