from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.fingerprint import simhash as module
from semblend.fingerprint.hashes import mix64
from semblend.fingerprint.simhash import count_differing_bits, estimate_overlap, hash_grams, make_sketch
from semblend.prompt import as_token_array

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=80)


def plain_simhash(token_ids: list[int]) -> int:
    """The definition, one gram and one bit at a time, in Python integers."""
    grams = {int(h) for h in hash_grams(as_token_array(token_ids))}
    return sum(1 << bit for bit in range(64) if 2 * sum(gram >> bit & 1 for gram in grams) > len(grams))


def plain_gram_hash(gram: list[int]) -> int:
    mask = 2**64 - 1
    factors = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
    value = sum((token + 1) * factor for token, factor in zip(gram, factors, strict=False)) & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


@given(tokens)
def test_hashes_agree_with_plain_integer_arithmetic(token_ids: list[int]) -> None:
    size = min(3, len(token_ids))
    expected = [plain_gram_hash(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    assert hash_grams(as_token_array(token_ids)).tolist() == expected


@given(tokens)
def test_the_simhash_is_the_majority_of_each_bit(token_ids: list[int]) -> None:
    assert make_sketch(as_token_array(token_ids)).simhash == plain_simhash(token_ids)


def test_sketches_are_the_same_on_every_platform() -> None:
    made = make_sketch(as_token_array(range(1000)))
    assert (made.simhash, made.grams, int(made.smallest[0])) == (0xE73D41CC43B8D81D, 998, 0x2999086404FADD)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50), st.integers(0, 2**64 - 1))
def test_both_ways_of_counting_bits_agree_with_python(values: list[int], one: int) -> None:
    array = np.array(values, dtype=np.uint64)
    assert count_differing_bits(one, array).tolist() == [(value ^ one).bit_count() for value in values]
    assert module._count_bits_by_halves(array).tolist() == [value.bit_count() for value in values]


def test_without_bitwise_count_the_distances_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    array = mix64(np.arange(100, dtype=np.uint64))
    expected = count_differing_bits(12345, array)
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert np.array_equal(count_differing_bits(12345, array), expected)


def test_mixing_loses_nothing() -> None:
    assert len(np.unique(mix64(np.arange(100_000, dtype=np.uint64)))) == 100_000


@given(tokens)
def test_a_prompt_overlaps_itself_completely(token_ids: list[int]) -> None:
    made = make_sketch(as_token_array(token_ids))
    assert estimate_overlap(made, made) == 1.0


@given(tokens, tokens)
def test_overlap_is_symmetric_and_a_share(a: list[int], b: list[int]) -> None:
    one, other = make_sketch(as_token_array(a)), make_sketch(as_token_array(b))
    assert estimate_overlap(one, other) == estimate_overlap(other, one)
    assert 0.0 <= estimate_overlap(one, other) <= 1.0


@given(st.lists(st.integers(0, 5), min_size=3, max_size=40), st.lists(st.integers(0, 5), min_size=3, max_size=40))
def test_overlap_of_short_prompts_is_exact(a: list[int], b: list[int]) -> None:
    grams_a, grams_b = ({tuple(x[i : i + 3]) for i in range(len(x) - 2)} for x in (a, b))
    expected = 2 * len(grams_a & grams_b) / (len(grams_a) + len(grams_b))
    assert estimate_overlap(make_sketch(as_token_array(a)), make_sketch(as_token_array(b))) == pytest.approx(expected)


@pytest.mark.parametrize("every", [10, 20, 40])
def test_the_overlap_of_edited_prompts_is_estimated(every: int) -> None:
    original = random_tokens(8000)
    edited = original.copy()
    edited[::every] = 7
    true = 1 - 3 / every  # each edit changes three 3-grams
    estimates = estimate_overlap(make_sketch(original), make_sketch(edited))
    assert estimates == pytest.approx(true, abs=0.15)
    distance = int(
        count_differing_bits(make_sketch(original).simhash, np.array([make_sketch(edited).simhash], dtype=np.uint64))[0]
    )
    assert np.cos(np.pi * distance / 64) == pytest.approx(true, abs=0.3)  # the angle that differing bits stand for


def test_unrelated_prompts_differ_in_about_half_of_the_bits() -> None:
    simhashes = np.array([make_sketch(random_tokens(500, seed)).simhash for seed in range(1, 100)], dtype=np.uint64)
    distances = count_differing_bits(make_sketch(random_tokens(500)).simhash, simhashes)
    assert 30 < distances.mean() < 34
    assert distances.min() > 15


def test_repeating_a_paragraph_changes_little() -> None:
    once = random_tokens(500)
    thrice = np.concatenate([once, once, once])
    assert estimate_overlap(make_sketch(once), make_sketch(thrice)) > 0.95


def test_token_zero_and_order_count() -> None:
    made = [make_sketch(as_token_array(ids)) for ids in ([0, 0, 0], [0, 0], [0], [1, 2, 3], [3, 2, 1])]
    assert len({one.simhash for one in made}) == 5
