"""Prompts become typed blocks: nothing is lost, equal text is equal, and a user can add types."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.traces.segmentation import (
    DEFAULT_RULES,
    Classifier,
    Rule,
    Segmenter,
    TextPiece,
    hash_content,
    load_rules,
)
from semantickv.traces.trace import BLOCK_TYPES
from semblend.errors import InputError

DATA = os.environ.get("SEMBLEND_TEST_DATA")
PIECES = st.lists(
    st.sampled_from(
        ["USER: hi", "CONTEXT:", "\n\n", "\n", " ", "```py\nx = 1\n```\n", "```", "<|assistant|>\n", "word " * 9,
         "Document 3: a", "{{name}}", "<output>ok</output>", "SYSTEM:\n", "é漢字", "\t", "\r\n\r\n", "Traceback"]
    ),
    max_size=25,
).map("".join)  # fmt: skip


def types(*messages: tuple[str, str]) -> list[str]:
    made = [{"role": role, "content": content} for role, content in messages]
    return [block.type for block in Segmenter().cut_messages(made)]


@given(text=PIECES | st.text(max_size=200), role=st.sampled_from(["", "user", "system", "tool", "assistant"]))
@settings(max_examples=150, deadline=None)
def test_the_blocks_of_a_text_joined_are_the_text(text: str, role: str) -> None:
    blocks = Segmenter().cut_text(text, role)
    assert "".join(block.text for block in blocks) == text
    assert all(block.tokens >= 1 and 0 <= block.content_id < 2**63 for block in blocks)


@given(text=PIECES, size=st.integers(8, 64))
@settings(max_examples=60, deadline=None)
def test_cutting_long_blocks_loses_nothing_either(text: str, size: int) -> None:
    blocks = Segmenter(max_block_tokens=size).cut_text(text)
    assert "".join(block.text for block in blocks) == text


def test_roles_and_labels_give_types() -> None:
    assert types(("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("tool", '{"a": 1}')) == [
        "system", "user", "assistant", "tool_output",
    ]  # fmt: skip
    assert types(("user", "CONTEXT: the ferry sails at nine\n\nUSER: when?")) == ["retrieved_context", "user"]


def test_what_a_text_looks_like_decides_where_nobody_says() -> None:
    text = Segmenter().cut_text
    assert [b.type for b in text("```python\nprint(1)\n```\n")] == ["code"]
    assert [b.type for b in text("Traceback (most recent call last):\n  File 'a.py', line 3")] == ["code"]
    assert [b.type for b in text("The plaintiff shall pay, pursuant to section 4.2, what the parties agreed.")] == [
        "legal_evidence"
    ]
    assert [b.type for b in text("Dear {{ name }}, your order {{ number }} is ready.")] == ["template"]
    assert [b.type for b in text("Passage 2: the harbour was built in 1860.")] == ["retrieved_context"]
    assert [b.type for b in text("word " * 200)] == ["retrieved_context"]
    assert [b.type for b in text("nothing special")] == ["other"]


def test_a_label_inside_what_a_tool_said_is_content_not_structure() -> None:
    assert types(("tool", "line one\nUSER: this stands in a log\nSYSTEM: so does this")) == ["tool_output"]
    assert types(("assistant", "CONTEXT: I quote\n\n```\ncode\n```")) == ["assistant"]


@pytest.mark.parametrize(
    "second", ["CONTEXT: Closed on Sundays.\n\n", "CONTEXT: Closed on Sundays.\n\nAnd in May.\n\n"]
)
def test_a_short_section_is_a_block_of_its_own_whatever_follows_it(second: str) -> None:
    first, *_ = Segmenter().cut_text("CONTEXT: Open 9-5.\n\n" + second)
    assert first.text == "CONTEXT: Open 9-5.\n\n"


def test_a_type_given_by_the_sender_wins() -> None:
    message = {"role": "user", "content": "SYSTEM: x", "metadata": {"semantic_type": "invoice"}}
    assert [block.type for block in Segmenter().cut_messages([message])] == ["invoice"]


def test_equal_text_has_equal_hashes_everywhere_and_other_text_has_not() -> None:
    first = Segmenter().cut_text("CONTEXT: the ferry sails at nine\n\nUSER: when?")
    second = Segmenter().cut_text("CONTEXT: the ferry sails at nine\n\nUSER: where?")
    assert first[0].content_id == second[0].content_id
    assert first[1].content_id != second[1].content_id
    assert hash_content("Be brief.") == 0x6DE2872C6DDE7768  # traces of other days and machines must go on matching
    assert hash_content("a") != hash_content("a ")  # a blank more is another token


def test_a_key_changes_every_hash() -> None:
    assert hash_content("short") != hash_content("short", "secret") != hash_content("short", "other")


def test_tool_calls_and_text_parts_are_text_too() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {}}]}
    assert [block.text for block in Segmenter().cut_messages([call, parts])] == ["find({})", "look"]


@pytest.mark.parametrize("messages", [None, [], "text", [1], [{"content": "no role"}]])
def test_messages_that_are_none_are_refused(messages: object) -> None:
    with pytest.raises(InputError):
        Segmenter().cut_messages(messages)


def test_a_user_adds_a_type_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[rule]]\nname = "invoices"\ntype = "invoice"\npattern = "(?m)^Invoice no"\n')
    classifier = Classifier().with_rules(load_rules(file))
    assert classifier.classify(TextPiece("Invoice no 7", role="user")) == "invoice"
    assert "invoice" in classifier.types


def test_a_user_adds_a_label_that_cuts(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[rule]]\ntype = "menu"\nlabels = ["menu:"]\n')
    segmenter = Segmenter(Classifier().with_rules(load_rules(file)))
    assert [block.type for block in segmenter.cut_text("hello\nMENU: soup\n", "user")] == ["user", "menu"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[rule]]\nname='x'\n", "no type"),
        ("[[rule]]\ntype='x'\n", "no condition"),
        ("[[rule]]\ntype='x'\npattern='('\n", "regular expression"),
        ("[[rule]]\ntype='x'\ncolour='red'\n", "colour"),
        ("[[rule]]\ntype='X y'\npattern='a'\n", "no name"),
        ("[[rule]]\ntype='x'\nlabels='a'\n", "labels"),
        ("[[rule]]\ntype='x'\nmin_hits=-1\npattern='a'\n", "min_hits"),
        ("nothing = 1\n", "[[rule]]"),
        ("= broken", "not TOML"),
    ],
)
def test_a_bad_rules_file_is_refused_with_the_field(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=said.replace("[", r"\[")):
        load_rules(file)


def test_the_built_in_rules_give_only_known_types_and_every_one_of_them() -> None:
    assert set(Classifier().types) == set(BLOCK_TYPES)
    assert all(isinstance(rule, Rule) for rule in DEFAULT_RULES)


@pytest.mark.parametrize(
    "text", ["import a\n" * 20_000, "\n" * 200_000, " " * 200_000, "```\n" * 20_000, "{{a " * 50_000, "USER:\n" * 5_000]
)
def test_hostile_text_is_cut_in_time_that_grows_with_its_length_only(text: str) -> None:
    began = time.thread_time()
    blocks = Segmenter().cut_text(text, "user")
    assert "".join(block.text for block in blocks) == text
    assert time.thread_time() - began < 60  # a quadratic rule takes minutes


@pytest.mark.data
@pytest.mark.skipif(not DATA, reason="SEMBLEND_TEST_DATA is not set")
def test_real_agent_prompts_are_cut_without_loss_and_share_their_beginnings() -> None:
    path = Path(str(DATA)) / "agent_traces" / "miniswe.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        inputs = [json.loads(line)["input"] for _, line in zip(range(12), stream, strict=False)]
    cut = [Segmenter().cut_text(text, "user") for text in inputs]
    assert all("".join(b.text for b in blocks) == text for blocks, text in zip(cut, inputs, strict=True))
    assert {"tool_output", "assistant"} <= {block.type for blocks in cut for block in blocks}
    seen = {block.content_id for block in cut[1]}
    assert sum(block.content_id in seen for block in cut[2]) > len(cut[1]) * 0.8
