"""The flat index and its dictionary twin hold the same postings through any history."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_align import PlainIndex, walk

from semblend.discover.slots import FlatIndex
from semblend.errors import CapacityError
from semblend.fingerprint import hashes, kernels

KEY = np.uint64(99)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 5), st.integers(0, 3)), max_size=40),
    st.sampled_from([3, 60, 40_000]),
)
@settings(max_examples=150)
def test_both_indexes_answer_alike(steps, vocabulary):
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, vocabulary, 2000).astype(np.int32) for _ in range(4)]
    seeds = [kernels.select_minimizers(text, hashes.DEFAULT_SCHEME) for text in texts]
    flat, plain = FlatIndex(20_000), PlainIndex(20_000)
    present: set[int] = set()
    for step, slot, text in steps:
        if step == "add" and slot not in present:
            assert flat.add(slot, *seeds[text], KEY) == plain.add(slot, *seeds[text], KEY)
            present.add(slot)
        elif step == "remove" and slot in present:
            flat.remove(slot)
            plain.remove(slot)
            present.discard(slot)
        assert flat.used == plain.used
    for _, text_hashes in seeds:
        ours, theirs = flat.probe(text_hashes, KEY), plain.probe(text_hashes, KEY)
        assert np.array_equal(ours > 0, theirs > 0)
        for a, b in zip(ours[ours > 0].tolist(), theirs[theirs > 0].tolist(), strict=True):
            assert list(walk(flat, a))[:16] == list(plain.walk(b))[:16]


def test_the_table_grows_one_bucket_at_a_time_and_keeps_newest_first():
    index = FlatIndex(50_000)
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 1000, 400).astype(np.int32)
    for slot in range(200):
        text = np.concatenate([shared, rng.integers(0, 50_000, 1000).astype(np.int32)])
        index.add(slot, *kernels.select_minimizers(text, hashes.DEFAULT_SCHEME), KEY)
    assert index.state[0] == index.used
    _, shared_hashes = kernels.select_minimizers(shared, hashes.DEFAULT_SCHEME)
    slots = [slot for slot, _ in walk(index, int(index.probe(shared_hashes, KEY)[0]))]
    assert slots == sorted(slots, reverse=True)
    assert slots[0] == 199


def test_removed_postings_are_used_again():
    index = FlatIndex(1000)
    text = np.random.default_rng(3).integers(0, 50_000, 4000).astype(np.int32)
    seeds = kernels.select_minimizers(text, hashes.DEFAULT_SCHEME)
    for _ in range(50):
        index.add(0, *seeds, KEY)
        index.remove(0)
    assert index.used == 0


@pytest.mark.parametrize("make", [FlatIndex, PlainIndex])
def test_a_full_index_refuses_instead_of_overwriting(make):
    text = np.random.default_rng(4).integers(0, 50_000, 4000).astype(np.int32)
    index = make(100)
    with pytest.raises(CapacityError, match="full"):
        index.add(0, *kernels.select_minimizers(text, hashes.DEFAULT_SCHEME), KEY)
    assert index.used == 0
