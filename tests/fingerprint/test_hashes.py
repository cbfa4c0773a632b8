"""Which k-grams stand for a prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.fingerprint import hashes, kernels
from semblend.fingerprint.hashes import DEFAULT_SCHEME, HashScheme

prompts = st.builds(
    lambda seed, length, vocabulary: np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32),
    st.integers(0, 2**32),
    st.integers(1, 400),
    st.sampled_from([1, 2, 9, 300, 2**31]),
)


@given(prompts)
@settings(max_examples=100)
def test_the_compiled_and_the_plain_sampler_agree(tokens):
    for ours, theirs in zip(
        kernels.select_minimizers(tokens, DEFAULT_SCHEME), hashes.select_minimizers(tokens), strict=True
    ):
        assert np.array_equal(ours, theirs)


@given(prompts)
@settings(max_examples=100)
def test_every_window_of_kgrams_keeps_one(tokens):
    positions, _ = hashes.select_minimizers(tokens)
    kgrams = len(tokens) - DEFAULT_SCHEME.k + 1
    if kgrams < 1:
        assert len(positions) == 0
        return
    gaps = np.diff(np.concatenate([[-1], positions, [kgrams]]))
    assert gaps.max() <= DEFAULT_SCHEME.window


@given(prompts, prompts, prompts)
@settings(max_examples=100)
def test_a_shared_run_of_the_guaranteed_length_has_a_common_seed(run, before, after):
    run = np.resize(run, DEFAULT_SCHEME.guaranteed_tokens)
    a, b = np.concatenate([before, run, after]), np.concatenate([after, run])

    def seeds_inside(tokens: np.ndarray, start: int) -> set[tuple[int, int]]:
        inside = range(start, start + DEFAULT_SCHEME.window)
        return {(int(p) - start, int(h)) for p, h in zip(*hashes.select_minimizers(tokens), strict=True) if p in inside}

    assert seeds_inside(a, len(before)) & seeds_inside(b, len(after))


def test_about_one_kgram_in_nine_is_kept():
    tokens = np.random.default_rng(0).integers(0, 100_000, 100_000).astype(np.int32)
    positions, _ = kernels.select_minimizers(tokens, DEFAULT_SCHEME)
    assert 0.10 < len(positions) / len(tokens) < 0.12


def test_the_guarantee_follows_from_the_scheme():
    assert HashScheme(k=8, window=9).guaranteed_tokens == 16
