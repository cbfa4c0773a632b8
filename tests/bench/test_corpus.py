"""The corpus is the ground under every recall figure: it must not move, and its classes must be what they say."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from lib import corpus as corpus_module
from lib import transforms as transforms
from lib.oracle import SharedRuns

from semblend.text.tokenization import load_tokenizer

DATA = os.environ.get("SEMBLEND_TEST_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="SEMBLEND_TEST_DATA is not set")
TEXTS = st.text(alphabet="ab \n", max_size=200)


@pytest.fixture(scope="module")
def corpus() -> corpus_module.Corpus:
    return corpus_module.build_corpus(Path(str(DATA)), load_tokenizer("stable"), seed=20, per_class=4)


@given(text=TEXTS)
def test_the_words_of_a_text_are_the_text(text):
    assert "".join(transforms.words(text)) == text.rstrip()


@given(text=TEXTS, length=st.integers(1, 50), seed=st.integers(0, 9))
def test_a_window_is_found_in_its_text_word_for_word(text, length, seed):
    assert transforms.window(text, length, random.Random(seed)) in text


@given(pieces=st.lists(st.text(max_size=3), min_size=2, max_size=8, unique=True), seed=st.integers(0, 9))
def test_a_new_order_keeps_every_piece_and_is_never_the_old_order(pieces, seed):
    shuffled = transforms.reordered(pieces, random.Random(seed))

    assert sorted(shuffled) == sorted(pieces)
    assert shuffled != pieces


@given(seed=st.integers(0, 1000))
@settings(max_examples=30)
def test_about_one_word_in_so_many_is_edited(seed):
    text = " ".join(f"w{number}" for number in range(6_000))
    before, after = set(text.split()), transforms.edited(text, 120, random.Random(seed)).split()
    kept = [word for word in dict.fromkeys(after) if word in before]

    # About 50 edits, of which two thirds remove a word from its place.
    assert 5_920 <= len(kept) < 6_000
    assert 5_950 <= len(after) <= 6_050


def test_a_twin_with_other_facts_keeps_no_number_no_name_and_no_polarity():
    text = "In May the plant in Norway was closed, and 120 people were not told."

    twin = transforms.other_facts(text, ["Chile", "Kenya"], random.Random(3))

    assert "120" not in twin
    assert "Norway" not in twin
    assert "was not closed" in twin
    assert "were told" in twin


@needs_data
@pytest.mark.slow
def test_the_same_seed_makes_the_same_corpus(corpus):
    again = corpus_module.build_corpus(Path(str(DATA)), load_tokenizer("stable"), seed=20, per_class=4)

    def ids(built: corpus_module.Corpus) -> list[tuple[str, bytes]]:
        return [(query.query_id, query.tokens.tobytes()) for query in built.queries]

    assert ids(again) == ids(corpus)
    assert [donor.donor_id for donor in again.donors] == [donor.donor_id for donor in corpus.donors]


def test_another_seed_makes_other_choices():
    first, second = (corpus_module.Builder(load_tokenizer("stable"), seed, 4) for seed in (20, 21))

    assert first.rng("reorder").random() != second.rng("reorder").random()
    assert first.rng("reorder").random() == first.rng("reorder").random()


@needs_data
def test_the_store_is_large_and_the_lengths_run_from_short_to_very_long(corpus):
    lengths = [len(prompt.tokens) for prompt in (*corpus.donors, *corpus.queries)]

    assert len(corpus.donors) >= 600
    assert len({donor.donor_id for donor in corpus.donors}) == len(corpus.donors)
    assert min(lengths) >= 64
    assert min(lengths) < 100
    assert max(len(donor.tokens) for donor in corpus.donors) > 100_000
    assert max(len(query.tokens) for query in corpus.queries) > 100_000


@needs_data
def test_every_class_is_there_and_its_gold_donors_are_in_the_store(corpus):
    ids = {donor.donor_id for donor in corpus.donors}

    assert len(corpus.kinds) == 11
    for query in corpus.queries:
        assert set(query.gold) <= ids
        assert bool(query.gold) == (query.kind != "unrelated")


@needs_data
def test_unrelated_prompts_share_nothing_and_the_others_share_what_their_class_says(corpus):
    oracle = corpus.oracle()
    share: dict[str, list[float]] = {}
    for query in corpus.queries:
        share.setdefault(query.kind, []).append(float(oracle.covered(query.tokens).mean()))

    assert max(share["unrelated"]) == 0.0
    for kind in ("instruction_change", "reorder", "multi_donor", "contained", "repeated", "shared_preamble"):
        assert np.median(share[kind]) > 0.85, kind
    assert np.median(share["light_edit"]) > 0.7
    assert np.median(share["heavy_edit"]) < np.median(share["light_edit"])
    assert np.median(share["template_trap"]) < np.median(share["light_edit"]), "facts stand close to each other"


@needs_data
def test_a_capped_corpus_keeps_the_gold_donors_of_its_queries(corpus):
    small = corpus.capped(donors=100, per_class=2)

    assert len(small.donors) == 100
    assert {query.kind for query in small.queries} == set(corpus.kinds)
    kept = {donor.donor_id for donor in small.donors}
    assert all(set(query.gold) <= kept for query in small.queries)
    oracle = SharedRuns([donor.tokens for donor in small.donors])
    assert not any(oracle.windows(query.tokens).any() for query in small.queries if query.kind == "unrelated")
