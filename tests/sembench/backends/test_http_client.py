"""The client: events cut anywhere, times from the first word, errors in one line."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from http_answers import answering
from hypothesis import given
from hypothesis import strategies as st

from sembench.backends import (
    Exchange,
    PromptCall,
    SseParser,
    build_chat_answer,
    build_chat_body,
    build_generate_answer,
    build_generate_body,
    check_url,
    describe_error,
    open_client,
    post_stream,
    read_route,
)
from semblend.errors import InputError

CALL = PromptCall(text="Hi", max_tokens=4, request_id="r1", tenant="a", salt="s", top_logprobs=2)


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(1, 7), min_size=1),
)
def test_events_are_the_same_wherever_the_bytes_are_cut(texts, newline, cuts):
    stream = "".join(f": note{newline}data: {text}{newline}{newline}" for text in texts).encode()
    parser, found, at, turn = SseParser(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        found += parser.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert found == texts
    assert not parser.unfinished


def test_data_of_several_lines_is_one_event():
    assert SseParser().feed(b"data: a\ndata: b\n\n") == ["a\nb"]


def exchange(body: bytes, *, status: int = 200, kind: str = "text/event-stream") -> Exchange:
    async def ask() -> Exchange:
        async def answer(_request):
            return web.Response(status=status, headers={"content-type": kind, "x-route": "semantic"}, body=body)

        async with answering(answer) as (client, url):
            return await post_stream(client, url, {}, {})

    return asyncio.run(ask())


def stream(*events: object) -> bytes:
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


def delta(**fields: object) -> dict[str, object]:
    return {"id": "chatcmpl-1", "choices": [{"delta": fields, "finish_reason": None}]}


def test_the_first_word_and_not_the_role_ends_the_wait():
    got = exchange(stream(delta(role="assistant", content=""), delta(content="a"), delta(content="b")))
    got.arrivals_ms = [10.0, 50.0, 70.0]
    answer = build_chat_answer(got, CALL)
    assert answer.ttft_ms == 50.0
    assert answer.inter_token_ms == (20.0,)
    assert answer.text == "ab"


def test_a_gateway_answer_is_read_field_by_field():
    logprobs = {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "b", "logprob": -3.0}]}]}
    piece = {"choices": [{"delta": {"content": "a"}, "logprobs": logprobs, "finish_reason": "stop"}]}
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    last = {"choices": [], "usage": usage, "semblend": {"reused_tokens": 4}}
    answer = build_chat_answer(exchange(stream(piece, last)), CALL)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (9, 1, 4)
    assert (answer.tokens, answer.token_logprobs, answer.top_logprobs) == (("a",), (-0.1,), ({"b": -3.0},))
    assert answer.receipt == {"reused_tokens": 4}
    assert answer.finish_reason == "stop"
    assert answer.route.outcome == "semantic_placement"
    assert answer.error is None


def test_an_sglang_answer_is_its_last_event():
    meta = {
        "id": "r1",
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "cached_tokens": 6,
        "cached_tokens_details": {"exact": 2, "fuzzy": 4},
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.1, 7, "a"], [-0.2, 8, None]],
        "output_top_logprobs": [[[-0.1, 7, "a"]], None],
    }
    first = {"text": "a", "output_ids": [7], "meta_info": {}}
    answer = build_generate_answer(
        exchange(stream(first, {"text": "ab", "output_ids": [7, 8], "meta_info": meta})), CALL
    )
    assert (answer.text, answer.token_ids, answer.tokens) == ("ab", (7, 8), ("a", "#8"))
    assert (answer.cached_exact, answer.cached_semantic, answer.finish_reason) == (2, 4, "length")
    assert answer.top_logprobs == ({"a": -0.1}, {})
    assert len(answer.inter_token_ms) == 1


def test_what_is_asked_has_the_shape_that_servers_know():
    body = build_generate_body(CALL)
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    assert (body["stream"], body["rid"], body["cache_salt"], body["top_logprobs_num"]) == (True, "r1", "s", 2)
    body = build_chat_body(CALL, "m")
    assert body["stream_options"] == {"include_usage": True}
    assert (body["top_logprobs"], body["cache_salt"], body["max_tokens"], body["temperature"]) == (2, "s", 4, 0)


@pytest.mark.parametrize(
    ("body", "status", "kind", "told"),
    [
        (b"data: {}\n\n", 200, "text/event-stream", "the stream was cut"),
        (b"data: {}\n\ndata: [DO", 200, "text/event-stream", "the stream was cut"),
        (b"data: {oops\n\ndata: [DONE]\n\n", 200, "text/event-stream", "not JSON"),
        (b"data: [1]\n\ndata: [DONE]\n\n", 200, "text/event-stream", "not an object"),
        (b'data: {"error": {"message": "full"}}\n\ndata: [DONE]\n\n', 200, "text/event-stream", "HTTP 200: full"),
        (b'{"error": {"message": "no model"}}', 404, "application/json", "HTTP 404: no model"),
        (b"<html>bad gateway</html>", 502, "text/html", "HTTP 502: <html>bad gateway</html>"),
        (b"hello", 200, "text/plain", "not JSON"),
    ],
)
def test_what_went_wrong_is_told_in_one_line(body, status, kind, told):
    error = exchange(body, status=status, kind=kind).error
    assert told in error
    assert "\n" not in error


def test_a_server_that_is_not_there_is_an_error_and_not_an_exception():
    async def ask() -> Exchange:
        async with open_client(5) as client:
            return await post_stream(client, "http://127.0.0.1:9/x", {}, {})

    got = asyncio.run(ask())
    assert got.connection_failed
    assert "cannot reach http://127.0.0.1:9/x" in got.error


def test_error_lines_stay_short():
    assert len(describe_error(500, b"x" * 10_000)) <= 300


def test_a_url_needs_its_scheme():
    with pytest.raises(InputError, match="--base-url 'localhost:1' is not a URL"):
        check_url("localhost:1", "--base-url")


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ({"x-semantic-route": "semantic"}, "semantic_placement"),
        ({"x-gateway-route": "semantic-placement; score=1"}, "semantic_placement"),
        ({"x-route": "round_robin"}, "round_robin"),
        ({"x-route": "exact_prefix_route", "x-semantic-placement": "true"}, "semantic_placement"),
        ({"x-route": "semantic", "x-semantic-placement": "no"}, "cold_fallback"),
        ({}, None),
    ],
)
def test_a_route_is_read_from_whichever_header_a_router_writes(headers, outcome):
    assert read_route(headers).outcome == outcome
