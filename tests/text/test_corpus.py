"""Documents of a team as they lie on a disk."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import InputError
from semblend.text.corpus import read_corpus, read_retrievals, split_text


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_a_folder_gives_its_text_files_in_order_without_hidden_ones_and_links(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "deep" / "c.txt").write_text("third")
    (tmp_path / ".hidden.txt").write_text("nobody reads it")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "again.txt").write_text("first")
    assert [document.text for document in read_corpus(tmp_path)] == ["first", "second", "third"]


def test_json_lines_carry_text_under_the_usual_names_packed_or_not(tmp_path):
    rows = [{"id": 7, "text": "one"}, {"page_content": "two", "title": "Two"}, {"content": "three"}]
    plain = write_rows(tmp_path / "c.jsonl", rows)
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        found = read_corpus(path)
        assert [document.text for document in found] == ["one", "Two\ntwo", "three"]
        assert found[0].name == "7"


def test_a_log_names_documents_by_id_by_text_or_as_objects_and_strangers_are_left_out(tmp_path):
    documents = read_corpus(write_rows(tmp_path / "c.jsonl", [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}]))
    rows = [{"passages": ["b", "a", "b"]}, {"ctxs": [{"text": "two"}, {"id": "a"}]}, {"docs": ["stranger", 5]}]
    log = write_rows(tmp_path / "log.jsonl", rows)
    assert read_retrievals(log, documents) == [(1, 0), (1, 0)]


@pytest.mark.parametrize("rows", ['{"no": "text"}', "not json", "[1]", ""])
def test_what_cannot_be_read_is_named_with_a_hint(tmp_path, rows):
    path = tmp_path / "c.jsonl"
    path.write_text(rows)
    with pytest.raises(InputError) as caught:
        read_corpus(path)
    assert caught.value.hint


def test_a_folder_that_may_not_be_read_is_named_and_is_not_an_empty_one(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    listed = os.scandir

    def scan(path):  # permissions do not bind root, who runs the tests in a container
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scan)
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(InputError, match=r"cannot read .*closed: Permission denied"):
        read_corpus(tmp_path)


@given(st.text(max_size=200), st.integers(1, 30))
def test_pieces_are_small_enough_and_together_they_are_the_text(text, most):
    pieces = split_text(text, len, most)
    assert "".join(pieces) == text
    assert all(len(piece) <= most for piece in pieces)


def test_a_long_text_is_counted_about_once():
    counted = []

    def count(text):
        counted.append(len(text))
        return len(text.split())

    text = "some words and a few more of them, " * 20_000
    pieces = split_text(text, count, 500)
    assert "".join(pieces) == text
    assert max(len(piece.split()) for piece in pieces) <= 500
    assert sum(counted) < 1.5 * len(text)


def test_a_file_that_is_not_text_is_named_with_a_hint(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "photo.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(InputError, match=r"photo\.txt is not text") as caught:
        read_corpus(tmp_path)
    assert "leave it out" in caught.value.hint
