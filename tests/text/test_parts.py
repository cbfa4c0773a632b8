"""Prompts in parts: joined they are the prompt again, and passages are what a reader would call passages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.text.chat import list_chat_parts, render_chat
from semblend.text.parts import SPLITTERS, Part, Splitter, join_parts, mark_texts, split_parts

LONG = "A passage that is long enough to be taken for one, number {}."


def passages(text: str, splitter: Splitter = "auto") -> list[str]:
    return [part.text for part in split_parts([Part(text)], splitter) if part.kind == "passage"]


@pytest.mark.parametrize(
    "header",
    [
        "Document {}: ",
        "[{}] ",
        "Passage {}\n",
        "### Source {}\n",
        "Document [{}](Title: x) ",
        "**Doc {}** ",
        "Context #{}: ",
    ],
)
def test_numbered_passages_are_found_and_their_numbers_stay(header: str) -> None:
    bodies = [LONG.format(number) for number in range(3)]
    text = "Read these.\n\n" + "\n".join(header.format(n + 1) + body for n, body in enumerate(bodies)) + "\n\nWhy?"
    found = passages(text)
    assert [body in one for body, one in zip(bodies, found, strict=True)] == [True] * 3
    assert not any("Why?" in one or "Read" in one for one in found)
    assert "1" not in found[0].replace("number 0", "")


def test_tagged_passages_are_found_whatever_their_attributes() -> None:
    bodies = [LONG.format(number) for number in range(3)]
    text = "<documents>\n" + "".join(f'<document index="{n}">\n{b}\n</document>\n' for n, b in enumerate(bodies))
    assert passages(text + "</documents>\nWhy?") == bodies


def test_one_passage_alone_is_text_because_it_cannot_change_places() -> None:
    assert passages(f"Document 1: {LONG}") == []


def test_passages_behind_other_text_are_another_list() -> None:
    text = "".join(f"<doc>{LONG.format(n)}</doc>\n" + ("A turn.\n" if n == 1 else "") for n in range(4))
    groups = [part.group for part in split_parts([Part(text)], "auto") if part.kind == "passage"]
    assert len(groups) == 4
    assert len(set(groups)) == 2


def test_paragraphs_are_passages_only_where_somebody_asks() -> None:
    text = "\n\n".join([("word " * 60).strip(), ("other " * 60).strip(), "Why?"])
    assert passages(text) == []
    assert len(passages(text, "paragraphs")) == 2


def test_marks_win_over_what_text_looks_like() -> None:
    marked = [{"type": "text", "text": LONG.format(n), "semblend": {"commutes": "docs"}} for n in range(2)]
    plain = {"type": "text", "text": f"Document 1: {LONG}\nDocument 2: {LONG}"}
    parts = split_parts(list_chat_parts([{"role": "user", "content": [*marked, plain]}]), "auto")
    assert [(part.group, part.marked) for part in parts if part.kind == "passage"] == [("message 0, docs", True)] * 2
    assert not any(part.kind == "passage" for part in split_parts([Part(plain["text"])], "marked"))


def test_listed_passages_are_marked_where_they_stand() -> None:
    parts = mark_texts([Part(f"Read {LONG} and {LONG}{LONG} now")], [LONG, f"{LONG}{LONG}"])
    assert join_parts(parts) == f"Read {LONG} and {LONG}{LONG} now"
    assert [part.text for part in parts if part.marked] == [LONG, f"{LONG}{LONG}"]


def test_every_tool_is_a_part_and_a_tool_result_is_one() -> None:
    tools = [{"name": "b"}, {"name": "a"}]
    parts = list_chat_parts([{"role": "tool", "content": "42"}], tools=tools)
    assert [part.text for part in parts if part.kind == "tool"] == ['{"name": "b"}', '{"name": "a"}']
    assert [part.text for part in parts if part.kind == "result"] == ["42"]


@given(
    st.lists(
        st.one_of(
            st.text(max_size=60),
            st.sampled_from(["Document 1: ", "\n[2] ", "<doc>", "</doc>\n", "\n\n", LONG, "<document x=1>\n"]),
        ),
        max_size=12,
    ),
    st.sampled_from(SPLITTERS),
)
def test_parts_joined_are_the_prompt_whatever_it_holds(pieces: list[str], splitter: Splitter) -> None:
    text = "".join(pieces)
    assert join_parts(split_parts([Part(text)], splitter)) == text
    messages = [{"role": "user", "content": [{"type": "text", "text": piece} for piece in pieces]}]
    assert join_parts(split_parts(list_chat_parts(messages), splitter)) == render_chat(messages)
