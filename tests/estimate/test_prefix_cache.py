"""The replayed prefix cache holds what a plain LRU cache of each size would hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace
from semblend.errors import InputError
from semblend.estimate.prefix_cache import BlockHasher, PlainPrefixCache, hash_plainly, make_cache

needs_numba = pytest.mark.skipif(make_cache([1]).__class__ is PlainPrefixCache, reason="numba is absent")


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


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
@settings(max_examples=150)
@given(PROMPTS, SIZES)
def test_every_size_hits_what_a_cache_of_that_size_alone_would_hit(
    compiled: bool, prompts: list[tuple[int, ...]], sizes: list[int]
) -> None:
    cache = make_cache(sizes, compiled=compiled)
    found = [cache.replay(chain(*prompt), len(prompt)) for prompt in prompts]
    for at, size in enumerate(sizes):
        assert [hits[at] for hits in found] == count_by_hand(prompts, size)


@needs_numba
@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(20, 200))
def test_both_twins_agree_on_long_streams_where_much_is_evicted(seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    twins = [make_cache([size // 4, size, 2 * size], compiled=compiled) for compiled in (True, False)]
    for _ in range(200):
        keys = chain(*random.integers(0, 4, random.integers(0, 12)).tolist())
        asked = int(random.integers(0, len(keys) + 1))
        held = int(random.integers(0, len(keys) + 1))
        assert twins[0].replay(keys, asked, held) == twins[1].replay(keys, asked, held)


@needs_numba
@given(st.lists(st.integers(0, 2**31 - 1), max_size=80), st.integers(1, 20), st.text(max_size=3))
def test_both_hashes_agree_and_namespaces_differ(ids: list[int], block: int, tenant: str) -> None:
    tokens = np.array(ids, np.int32)
    keys = BlockHasher(block, compiled=True).hash(tokens, Namespace(tenant=tenant))
    assert keys.tolist() == BlockHasher(block, compiled=False).hash(tokens, Namespace(tenant=tenant)).tolist()
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
        make_cache(sizes)
