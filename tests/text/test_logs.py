"""Logs as people have them: text, chats, token ids; a bad line is named, and can be skipped."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import InputError
from semblend.text.chat import render_chat
from semblend.text.log_formats import FORMATS
from semblend.text.logs import LoggedPrompt, PromptLog


def read(tmp_path: Path, *lines: Any, **options: Any) -> list[LoggedPrompt]:
    path = tmp_path / "log.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return list(PromptLog(str(path), **options))


@pytest.mark.parametrize("field", ["prompt", "text", "input"])
@pytest.mark.parametrize("outer", [None, "body", "request"])
def test_text_is_found_under_each_of_its_names(tmp_path: Path, field: str, outer: str | None) -> None:
    inner = {field: "Hello", "model": "m"}
    (one,) = read(tmp_path, {outer: inner, "custom_id": "r1"} if outer else inner | {"custom_id": "r1"})
    assert (one.text, one.model, one.request_id, one.line) == ("Hello", "m", "r1", 1)
    assert one.token_ids is None


@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids", "prompt"])
def test_token_ids_are_taken_as_they_are(tmp_path: Path, field: str) -> None:
    (one,) = read(tmp_path, {field: [5, 6, 7]})
    assert one.token_ids is not None
    assert one.token_ids.tolist() == [5, 6, 7]
    assert one.text is None


def test_a_chat_is_rendered_the_same_whatever_the_shape_of_its_content(tmp_path: Path) -> None:
    plain = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    parts = {"body": {"messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"content": [{"type": "text", "text": "Hi"}], "role": "user"},
    ]}}  # fmt: skip
    responses = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "instructions": "Be brief.",
    }
    texts = {one.text for one in read(tmp_path, plain, parts, responses)}
    assert texts == {"<|system|>\nBe brief.\n<|user|>\nHi"}


def test_tools_images_and_tool_calls_are_part_of_the_prompt() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    }
    image = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:abc"}}, {"type": "text", "text": "?"}],
    }
    text = render_chat([call, image], tools=[{"b": 1, "a": 2}])
    assert text.startswith('<|tools|>\n[{"a": 2, "b": 1}]\n<|assistant|>\ntool_calls: ')
    assert render_chat([image]) == render_chat([json.loads(json.dumps(image))])
    other = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:abd"}}, {"type": "text", "text": "?"}],
    }
    assert render_chat([image]) != render_chat([other])


@pytest.mark.parametrize(
    ("record", "tenant"),
    [({"tenant": "a"}, "a"), ({"tenant_id": 7}, "7"), ({"user": "u"}, "u"), ({"tenant": None}, ""), ({}, "")],
)
def test_the_tenant_is_found_under_its_usual_names(tmp_path: Path, record: dict[str, Any], tenant: str) -> None:
    (one,) = read(tmp_path, {"text": "x"} | record)
    assert one.tenant == tenant


def test_another_tenant_field_can_be_named_and_tenants_can_be_ignored(tmp_path: Path) -> None:
    line = {"text": "x", "user": {"id": 4}, "metadata": {"customer": "acme"}}
    assert read(tmp_path, line, tenant_field="metadata.customer")[0].tenant == "acme"
    assert read(tmp_path, line, tenant_field="metadata.nothing.there")[0].tenant == ""
    assert read(tmp_path, line, tenant_field=None)[0].tenant == ""
    with pytest.raises(InputError, match="line 1, field user: is an object, not a string"):
        read(tmp_path, line)


BAD_LINES = [
    ("{not json", r"log\.jsonl, line 2: not JSON"),
    ("[1, 2]", r"line 2: a list, not an object"),
    ({"question": "?"}, r"line 2: no prompt in it \(fields: question\)"),
    ({"text": ""}, r"line 2, field text: is empty"),
    ({"text": 5}, r"line 2, field text: is a number, not a string"),
    ({"prompt": ["a", "b"]}, r"line 2, field prompt: holds several prompts"),
    ({"prompt": [[1], [2]]}, r"line 2, field prompt: holds several prompts"),
    ({"token_ids": [1, -2]}, r"line 2, field token_ids: token id -2 at index 1"),
    ({"token_ids": []}, r"line 2, field token_ids: token ids are empty"),
    ({"messages": []}, r"line 2, field messages: messages are not a non-empty list"),
    ({"messages": [{"content": "x"}]}, r"line 2, field messages: message 0 has no role"),
    ({"messages": [{"role": "user", "content": 3}]}, r"line 2, field messages: content of message 0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"part 0 of message 0 has no text"),
    ({"text": "x", "tenant": ["a"]}, r"line 2, field tenant: is a list, not a string"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_with_file_line_and_field(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, {"text": "fine"}, line)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_skipping_counts_the_bad_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    bad = [line if isinstance(line, str) else json.dumps(line) for line, _ in BAD_LINES]
    path.write_text("\n".join(['{"text": "first"}', "", *bad, '{"text": "last"}']))
    log = PromptLog(str(path), skip_bad=True)
    assert [one.text for one in log] == ["first", "last"]
    assert log.skipped == len(BAD_LINES)
    assert 0 < len(log.skipped_examples) < len(BAD_LINES)
    assert "line 3" in log.skipped_examples[0]


def test_a_line_beyond_the_limit_is_not_read_into_memory_and_the_next_one_is_still_found(tmp_path: Path) -> None:
    lines = ({"text": "a"}, {"text": "x" * 500}, {"text": "b"})
    with pytest.raises(InputError, match=r"line 2: the line is longer than 100 bytes"):
        read(tmp_path, *lines, max_line_bytes=100)
    assert [one.text for one in read(tmp_path, *lines, max_line_bytes=100, skip_bad=True)] == ["a", "b"]


def test_gzip_and_standard_input_read_like_a_plain_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"text": "one"}\n\n{"text": "two"}'
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(gzip.compress(content))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    for source in (str(packed), "-"):
        assert [(one.line, one.text) for one in PromptLog(source)] == [(1, "one"), (3, "two")]


def test_files_that_cannot_be_read_say_so_in_one_line(tmp_path: Path) -> None:
    half = tmp_path / "half.jsonl.gz"
    half.write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000)[:-20])
    not_gzip = tmp_path / "plain.jsonl.gz"
    not_gzip.write_bytes(b'{"text": "one"}\n')
    with pytest.raises(InputError, match="damaged gzip"):
        list(PromptLog(str(half)))
    with pytest.raises(InputError, match="damaged gzip"):
        list(PromptLog(str(not_gzip)))
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        list(PromptLog(str(tmp_path / "nothing")))
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        list(PromptLog(str(tmp_path)))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["prompt", "text", "messages", "role", "content", "body", "token_ids", "user",
                                         "type", "input", "tools", "system", "timestamp", "id", "conversations", "from",
                                         "value", "blocks", "token_count", "content_hash", "hash_ids", "input_length",
                                         "semblend", "passages", "commutes", "response", "choices", "event", "obj",
                                         "input_ids"]), inner, max_size=4),
                    max_leaves=12), st.sampled_from(FORMATS))  # fmt: skip
def test_no_line_of_json_brings_anything_but_a_prompt_or_an_input_error(value: Any, form: str) -> None:
    log = PromptLog("any", format=form)
    log.found_format = form
    try:
        found = list(log._parse(1, json.dumps(value).encode()))
    except InputError as error:
        message: str | None = error.message
    else:
        message = None
        assert all((one.text is None) != (one.token_ids is None) for one in found)
    assert message is None or message.startswith("any, line 1")
