"""Manifests: what is written is read back, and what cannot be used says where and why."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sembench.files import hash_file
from sembench.manifests.cases import (
    Case,
    DonorPrompt,
    format_case,
    make_item_id,
    parse_case,
    read_manifest,
    write_manifest,
)
from semblend.errors import InputError

CASE = Case("a1", "fixture", "ferry", "rag_reorder", (DonorPrompt("d1", "donor text"),), "recipient text", "q", ("x",))
texts = st.text(min_size=1, max_size=40).filter(lambda text: text.encode("utf-8", "ignore").decode() == text)


@given(texts, texts, st.lists(texts, max_size=3), st.booleans())
def test_a_case_comes_back_as_it_was_written(donor, recipient, answers, negative):
    case = Case("i", "d", "s", "t", (DonorPrompt("x", donor),), recipient, "q", tuple(answers), negative, {"k": [1]})
    assert parse_case(json.loads(format_case(case))) == case


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.gz", "new/folder/m.jsonl"])
def test_a_manifest_is_streamed_back_packed_or_plain(tmp_path, name):
    path = tmp_path / name
    assert write_manifest(path, [CASE]) == 1
    assert list(read_manifest(path)) == [CASE]
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_keys_are_sorted_and_text_is_not_escaped(tmp_path):
    path = tmp_path / "m.jsonl"
    write_manifest(path, [Case("a", "d", "s", "t", (), "Grüße")])
    line = path.read_text(encoding="utf-8")
    assert list(json.loads(line)) == sorted(json.loads(line))
    assert "Grüße" in line


def test_the_same_cases_packed_twice_give_the_same_checksum(tmp_path):
    sums = set()
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_manifest(tmp_path / name, [CASE])
        sums.add(hash_file(tmp_path / name))
    assert len(sums) == 1


def test_a_packed_file_holds_neither_its_name_nor_a_time_stamp(tmp_path):
    write_manifest(tmp_path / "m.jsonl.gz", [])
    flags, stamp = (tmp_path / "m.jsonl.gz").read_bytes()[3], (tmp_path / "m.jsonl.gz").read_bytes()[4:8]
    assert (flags, stamp) == (0, bytes(4))


def test_a_failed_build_leaves_the_good_manifest_alone(tmp_path):
    path = tmp_path / "m.jsonl"
    write_manifest(path, [CASE])

    def breaking():
        yield CASE
        raise InputError("no more")

    with pytest.raises(InputError):
        write_manifest(path, breaking())
    assert list(read_manifest(path)) == [CASE]
    assert [item.name for item in tmp_path.iterdir()] == ["m.jsonl"]


def _broken(**changes: object) -> str:
    value = json.loads(format_case(CASE)) | changes
    return json.dumps({name: own for name, own in value.items() if own is not ...})


@pytest.mark.parametrize(
    ("line", "field", "what"),
    [
        (_broken(item_id=...), "item_id", "is missing"),
        (_broken(item_id=""), "item_id", "is empty"),
        (_broken(recipient_prompt=7), "recipient_prompt", "is a number, not a string"),
        (_broken(negative_control="no"), "negative_control", "is a string, not true or false"),
        (_broken(answers=["a", 3]), "answers[1]", "is a number, not a string"),
        (_broken(donor_prompts=[{"donor_id": "d"}]), "text", "is missing"),
        (_broken(metadata=[]), "metadata", "is a list, not an object"),
        (_broken(donor_prompts=None), "donor_prompts", "is null, not a list"),
    ],
)
def test_a_bad_line_names_file_line_and_field(tmp_path, line, field, what):
    path = tmp_path / "m.jsonl"
    path.write_text(format_case(CASE) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(InputError) as told:
        list(read_manifest(path))
    assert f"{path} line 2" in told.value.message
    assert f"field {field} {what}" in told.value.message


def test_a_line_that_was_cut_off_says_so(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(format_case(CASE) + "\n" + format_case(CASE)[:50], encoding="utf-8")
    with pytest.raises(InputError, match="line 2 is not JSON") as told:
        list(read_manifest(path))
    assert "cut off" in told.value.hint


def test_a_packed_manifest_that_was_cut_off_says_so(tmp_path):
    path = tmp_path / "m.jsonl.gz"
    whole = gzip.compress((format_case(CASE) + "\n").encode() * 1)
    path.write_bytes(whole[:-12])
    with pytest.raises(InputError, match="ends early"):
        list(read_manifest(path))


def test_an_item_id_used_twice_is_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text((format_case(CASE) + "\n") * 2, encoding="utf-8")
    with pytest.raises(InputError, match=r"line 2: field item_id 'a1' was already used"):
        list(read_manifest(path))


def test_bad_lines_can_be_skipped_and_are_handed_over(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("{}\n" + format_case(CASE) + "\nnot json\n", encoding="utf-8")
    bad: list[InputError] = []
    assert list(read_manifest(path, on_bad=bad.append)) == [CASE]
    assert len(bad) == 2


def test_a_missing_manifest_is_a_mistake_with_a_hint(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        list(read_manifest(tmp_path / "none.jsonl"))


def test_ids_depend_on_every_part_and_on_their_borders():
    assert make_item_id("ab", "c") != make_item_id("a", "bc")
    assert len(make_item_id("x")) == 16


def test_facts_are_read_from_metadata():
    case = Case("a", "d", "s", "t", (), "r", metadata={"planted_fact": "4711", "donor_fact": ""})
    assert (case.planted_fact, case.donor_fact) == ("4711", None)


def test_reading_costs_one_case_at_a_time(tmp_path):
    path = Path(tmp_path / "m.jsonl")
    path.write_text(format_case(CASE) + "\nbroken\n", encoding="utf-8")
    assert next(iter(read_manifest(path))) == CASE  # the broken second line has not been looked at
