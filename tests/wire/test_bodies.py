"""Bodies as models: lists and names end at their limits, the first mistake is named, unknown wishes of ours are not dropped."""  # noqa: E501

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="bodies are pydantic models")

from semblend.wire.body import LONGEST_NAME
from semblend.wire.chat import MAX_MESSAGES, MAX_PARTS, ChatRequest
from semblend.wire.completions import MAX_PROMPTS, CompletionRequest
from semblend.wire.errors import ApiError
from semblend.wire.generate import GenerateRequest
from semblend.wire.options import (
    LONGEST_STOP,
    MAX_BIASES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOKENS,
)

HI = {"role": "user", "content": "Hi"}
BASES: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": [HI]},
    CompletionRequest: {"prompt": "Hi"},
    GenerateRequest: {"text": "Hi"},
}


def parse(kind: Any, **fields: Any) -> Any:
    return kind.parse(json.dumps(BASES[kind] | fields), most_n=4)


LIMITS: list[tuple[Any, str, Any, int]] = [
    (ChatRequest, "messages", lambda n: [HI] * n, MAX_MESSAGES),
    (ChatRequest, "messages", lambda n: [{"role": "user", "content": [{"text": "x"}] * n}], MAX_PARTS),
    (ChatRequest, "model", lambda n: "m" * n, LONGEST_NAME),
    (ChatRequest, "user", lambda n: "u" * n, LONGEST_NAME),
    (ChatRequest, "cache_salt", lambda n: "s" * n, LONGEST_NAME),
    (ChatRequest, "stop", lambda n: ["x"] * n, MAX_STOPS),
    (ChatRequest, "stop", lambda n: "x" * n, LONGEST_STOP),
    (ChatRequest, "stop", lambda n: ["x" * n], LONGEST_STOP),
    (ChatRequest, "stop_token_ids", lambda n: list(range(n)), MAX_STOP_TOKENS),
    (ChatRequest, "logit_bias", lambda n: {str(token): 1 for token in range(n)}, MAX_BIASES),
    (CompletionRequest, "prompt", lambda n: ["x"] * n, MAX_PROMPTS),
    (CompletionRequest, "prompt", lambda n: [[1]] * n, MAX_PROMPTS),
    (CompletionRequest, "prompt", lambda n: [1] * n, MAX_TOKENS),
    (CompletionRequest, "prompt", lambda n: [[1] * n], MAX_TOKENS),
    (GenerateRequest, "rid", lambda n: "r" * n, LONGEST_NAME),
]


@pytest.mark.parametrize(("kind", "name", "make", "most"), LIMITS)
def test_a_list_or_a_name_ends_at_its_limit(kind, name, make, most):
    parse(kind, **{name: make(most)})
    with pytest.raises(ApiError, match=f"more than {most}") as caught:
        parse(kind, **{name: make(most + 1)})
    assert caught.value.status == 400
    assert caught.value.param.startswith(name)
    assert caught.value.hint


@pytest.mark.parametrize("kind", BASES)
def test_an_unknown_field_is_ignored_but_not_one_of_ours(kind):
    parse(kind, some_new_option={"a": [1, 2]}, semblend={})
    for ours in ({"qualty": "fast"}, {f"x{n}": 1 for n in range(2000)} | {"quality": "fast"}):
        with pytest.raises(ApiError, match="is unknown") as caught:
            parse(kind, semblend=ours)
        assert caught.value.param in ("semblend.qualty", "semblend.x0")
        assert caught.value.hint == "known are quality, reuse, forget, edit, keep, passages, scores"


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize(
    ("edit", "base"),
    [
        ({"base": "r1", "ranges": [{"start": 1, "end": 2, "action": "delete"}]}, "r1"),
        ({"base": 7}, ""),
        ({"base": "x" * 300}, ""),
        ({}, ""),
        (None, ""),
    ],
)
def test_a_declared_edit_names_its_base_and_an_unreadable_one_costs_nothing(kind, edit, base):
    assert parse(kind, semblend={"edit": edit}).reuse.base == base


def test_stop_tokens_are_a_set():
    assert parse(ChatRequest, stop_token_ids=[5, 7, 5, 5]).sampling.stop_token_ids == frozenset({5, 7})


@pytest.mark.parametrize("kind", BASES)
def test_null_counts_as_absent(kind):
    names = ("stream", "semblend", "cache_salt", "tools", "stop", "n", "temperature", "logit_bias", "stop_token_ids")
    assert parse(kind, **dict.fromkeys(names)) == parse(kind)


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"day": 9}'}}


def test_an_assistants_calls_reach_the_chat_template_with_their_arguments_as_objects():
    turns = [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "done"}]
    asked, called, result = parse(ChatRequest, messages=turns).messages
    assert called == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"day": 9}}}],
    }
    assert (asked["role"], result) == ("user", {"role": "tool", "content": "done"})


DEEP = '{"a":' * 300 + "1" + "}" * 300


@pytest.mark.parametrize("arguments", ["", "not json", "[" * 100_000, DEEP, '"text"', "9" * 5_000])
def test_arguments_that_are_no_object_are_kept_as_they_are(arguments):
    call = CALL | {"function": {"name": "find", "arguments": arguments}}
    (turn,) = parse(ChatRequest, messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert turn["tool_calls"][0]["function"]["arguments"] == arguments


MISTAKES: list[tuple[Any, dict[str, Any], str, str]] = [
    (CompletionRequest, {"prompt": [1, 2, "a"]}, "prompt", "holds 'a' at index 2, not a token id"),
    (CompletionRequest, {"prompt": [[1, "a"]]}, "prompt[0]", "holds 'a' at index 1, not a token id"),
    (CompletionRequest, {"prompt": [[1], [2, 2**31]]}, "prompt[1]", f"holds {2**31} at index 1, not a token id"),
    (CompletionRequest, {"prompt": ["a", ""]}, "prompt[1]", "is empty"),
    (CompletionRequest, {"prompt": None}, "prompt", "is None"),
    (CompletionRequest, {"stop_token_ids": [1, True]}, "stop_token_ids", "holds True at index 1, not a token id"),
    (CompletionRequest, {"stop": [1]}, "stop", "holds 1 at index 0, not a string"),
    (CompletionRequest, {"n": 5}, "n", "is 5, outside [1, 4]"),
    (CompletionRequest, {"seed": 10**40}, "seed", "outside"),
    (ChatRequest, {"messages": [HI, {"role": "user", "content": [{"text": 5}]}]}, "messages[1].content[0].text", "5"),
    (ChatRequest, {"messages": [HI | {"tool_calls": [1]}]}, "messages[0].tool_calls[0]", "not"),
    (ChatRequest, {"messages": [HI | {"tool_calls": [CALL]}]}, "messages[0].tool_calls", "message of role user"),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "is missing"),
    (ChatRequest, {"messages": [HI | {"content": None}]}, "messages[0].content", "is missing"),
    (ChatRequest, {"temperature": "x", "n": "y"}, "n", "is 'y', not a whole number"),
    (GenerateRequest, {"sampling_params": {"n": 0}}, "sampling_params.n", "is 0"),
    (GenerateRequest, {"sampling_params": {"tools": [1]}}, "sampling_params.tools", "not supported"),
    (GenerateRequest, {"tool_choice": "required", "tools": []}, "tool_choice", "not supported"),
]


@pytest.mark.parametrize(("kind", "fields", "param", "words"), MISTAKES)
def test_the_first_mistake_is_named_with_its_value_and_a_way_out(kind, fields, param, words):
    with pytest.raises(ApiError) as caught:
        parse(kind, **fields)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert words in error.message
    assert error.hint


def test_a_mistake_in_a_large_body_is_named_without_its_value():
    with pytest.raises(ApiError, match="temperature is something, not a number"):
        parse(CompletionRequest, temperature="x" * 100_000)
