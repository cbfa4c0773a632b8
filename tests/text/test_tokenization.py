"""The built-in tokenizer gives the same ids everywhere; a real one is opened from disk and never fetched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import InputError, MissingDependencyError
from semblend.text.tokenization import FileTokenizer, StableTokenizer, load_tokenizer

PUBLISHED = [
    925199270,
    1765871395,
    70383889,
    1625113531,
    1173457570,
    1032495173,
    590167253,
    1799114379,
    835374675,
    1590076554,
    998108505,
    2007634855,
    834275301,
    545901799,
    2090085383,
    2088722291,
    1173457570,
    406361832,
    1173457570,
    310523846,
]
ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=[]), max_size=400)  # lone surrogates too


@given(ANY_TEXT)
def test_the_pieces_of_any_text_join_to_the_text_and_there_is_one_id_each(text: str) -> None:
    tokenizer = StableTokenizer()
    pieces = tokenizer.pieces(text)
    assert "".join(pieces) == text
    assert len(tokenizer.encode(text)) == len(pieces)


@given(ANY_TEXT)
def test_ids_are_32_bit_and_never_negative(text: str) -> None:
    ids = StableTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert (ids >= 0).all()


def test_ids_are_the_ones_that_were_published() -> None:
    # These numbers may never change: stores and logs of other machines were written with them.
    text = "Größe: 1234 東京都\n\tdef f(x_1):  # 🦊"
    assert StableTokenizer().encode(text).tolist() == PUBLISHED


def test_another_process_with_another_hash_seed_gives_the_same_ids() -> None:
    code = (
        "from semblend.text.tokenization import StableTokenizer as T;"
        + " print(T().encode('the same words, again').tolist())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert runs.pop().strip() == str(StableTokenizer().encode("the same words, again").tolist())


def test_a_document_has_the_same_ids_behind_another_instruction() -> None:
    tokenizer = StableTokenizer()
    document = "\n\nThe harbour lies at the end of a shallow bay, and its day follows the water."
    alone = tokenizer.encode(document).tolist()
    for instruction in ("Summarise:", "Translate this, please", "1234567", "… ?!"):
        together = tokenizer.encode(instruction + document).tolist()
        assert together[-len(alone) :] == alone


def test_english_is_about_as_dense_as_a_common_vocabulary() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert 2.5 < len(text) / len(StableTokenizer().encode(text)) < 5


def test_a_full_cache_of_pieces_changes_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"word{number}" for number in range(200))
    before = StableTokenizer().encode(text)
    monkeypatch.setattr("semblend.text.tokenization._MAX_CACHED_PIECES", 8)
    assert np.array_equal(StableTokenizer().encode(text), before)


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(["the harbour and the railway and the crane"] * 9, trainer)
    built.enable_truncation(4)
    path = tmp_path / "tokenizer.json"
    built.save(str(path))
    return path


def test_a_tokenizer_file_is_read_whole_even_if_it_asks_for_truncation(tokenizer_file: Path) -> None:
    text = "the harbour and the railway 🦊 東京"
    for name in (str(tokenizer_file), str(tokenizer_file.parent)):
        tokenizer = load_tokenizer(name)
        assert tokenizer.name == name
        assert "".join(tokenizer.pieces(text)) == text
        assert len(tokenizer.encode(text)) == len(tokenizer.pieces(text)) > 4


def test_a_lone_surrogate_is_refused_by_a_real_tokenizer_with_a_hint(tokenizer_file: Path) -> None:
    with pytest.raises(InputError, match="lone surrogates") as caught:
        FileTokenizer(tokenizer_file).encode("\ud800")
    assert "stable" in caught.value.hint


@pytest.mark.parametrize("name", ["no/such-model-anywhere", "../nowhere.json", "a b c", "x" * 300, " "])
def test_an_unknown_tokenizer_is_an_input_error_that_names_the_ways_out(name: str) -> None:
    with pytest.raises(InputError, match="tokenizer") as caught:
        load_tokenizer(name)
    assert "'stable'" in caught.value.hint


def test_a_folder_without_a_tokenizer_and_a_broken_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"is not a readable tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_without_the_tokenizers_package_the_hint_names_the_extra(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError) as caught:
        load_tokenizer(str(tokenizer_file))
    assert caught.value.hint == "pip install 'semblend-suite[tokenizer]'"
