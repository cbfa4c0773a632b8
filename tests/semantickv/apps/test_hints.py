"""Hints for engines pass through; what engines say of reuse comes back as one record of the request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_client import ask

from semantickv.apps.build import build_proxy, build_router
from semantickv.settings import EdgeSettings
from semblend.errors import ConfigError
from tests.fakes.scripted_engine import ScriptedEngine, answer_json, stream

CHAT = "/v1/chat/completions"
HINTS = {
    "protocol_version": "1",
    "message_id": "m",
    "actions": [{"action_id": "a", "action_type": "keep", "action_version": "1", "payload": {"tokens": 512}}],
}


def run(test: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **more}).encode()


@pytest.mark.parametrize("build", ["proxy", "router"])
def test_kv_hints_and_session_ids_reach_the_engine_as_they_were_sent(build):
    async def test():
        async with ScriptedEngine() as engine, ScriptedEngine() as other:
            urls = (engine.url, other.url)
            settings = EdgeSettings(upstream=engine.url, replicas=urls, trace=False)
            app = build_proxy(settings) if build == "proxy" else build_router(settings)
            body = chat(kv_hints=HINTS, session_id="in-body", priority=3, vllm_xargs={"session_id": "x"})
            await ask(app, "POST", CHAT, body=body, headers={"X-Session-ID": "in-header"})
            (seen,) = [*engine.requests, *other.requests]
            assert seen.body == body
            assert seen.headers["x-session-id"] == "in-header"

    run(test())


OURS = {"edit": {"base": "chatcmpl-7f"}}


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        (None, {"semblend": OURS}),
        ({"a": 1, "semblend": {"quality": "fast"}}, {"a": 1, "semblend": {"quality": "fast"} | OURS}),
        ({"semblend": {"edit": {"base": "own"}}}, {"semblend": {"edit": {"base": "own"}}}),
        ("nonsense", "nonsense"),
    ],
)
def test_an_edit_that_a_header_declares_reaches_engines_that_read_a_field_and_those_that_read_headers(said, sent):
    async def test():
        async with ScriptedEngine() as engine:
            app = build_router(EdgeSettings(replicas=(engine.url,), trace=False))
            more = {} if said is None else {"kv_transfer_params": said}
            await ask(app, "POST", CHAT, body=chat(**more), headers={"X-SemBlend-Edit": "chatcmpl-7f"})
            await ask(app, "POST", CHAT, body=chat(**more))
            declared, plain = engine.requests
            assert json.loads(declared.body)["kv_transfer_params"] == sent
            assert declared.headers["x-semblend-edit"] == "chatcmpl-7f"
            assert plain.body == chat(**more)

    run(test())


def test_a_session_in_the_body_keeps_its_replica_too():
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False, policy="round_robin"))
            seen = [await ask(app, "POST", CHAT, body=chat(session_id="s")) for _ in range(4)]
            assert len({client.headers["x-replica-id"] for client, _ in seen}) == 1
            assert seen[-1][0].headers["x-route-reason"] == "round_robin;session"

    run(test())


def test_an_engine_that_reads_sessions_in_the_body_gets_them_there():
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            settings = EdgeSettings(replicas=(one.url, two.url), trace=False, session_hint="body")
            await ask(build_router(settings), "POST", CHAT, body=chat(), headers={"X-Session-ID": "mine"})
            await ask(build_router(settings), "POST", CHAT, body=chat())
            bodies = [json.loads(seen.body) for seen in (*one.requests, *two.requests)]
            assert bodies[0] == json.loads(chat(session_id="mine"))
            assert "session_id" not in bodies[1]

    run(test())


def test_with_salts_two_tenants_with_one_name_for_a_session_have_two_sessions_in_the_engine():
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False, salt_secret="s"))
            for key in "ab":
                headers = {"X-Session-ID": "chat-1", "Authorization": f"Bearer {key}"}
                await ask(app, "POST", CHAT, body=chat(session_id="chat-1"), headers=headers)
            seen = [*one.requests, *two.requests]
            names = {one.headers["x-session-id"] for one in seen} | {json.loads(one.body)["session_id"] for one in seen}
            assert len(names) == 2
            assert "chat-1" not in names

    run(test())


@pytest.mark.parametrize("name", ["chat" * 50, 7, ["chat-1"]])
def test_with_salts_a_session_that_is_no_label_does_not_reach_the_engine_as_it_is(name):
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False, salt_secret="s"))
            for key in "ab":
                headers = {"Authorization": f"Bearer {key}"}
                await ask(app, "POST", CHAT, body=chat(session_id=name), headers=headers)
            names = [json.loads(seen.body)["session_id"] for seen in (*one.requests, *two.requests)]
            assert names[0] != names[1]
            assert name not in names

    run(test())


def test_a_session_in_the_body_is_no_header_where_the_header_is_too_long():
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False))
            client, _ = await ask(app, "POST", CHAT, body=chat(session_id="談"), headers={"X-Session-ID": "s" * 200})
            assert client.status == 200
            (seen,) = [*one.requests, *two.requests]
            assert "x-session-id" not in seen.headers

    run(test())


def test_an_unknown_session_hint_is_a_config_error():
    with pytest.raises(ConfigError, match="SEMANTICKV_SESSION_HINT"):
        EdgeSettings.read({"SEMANTICKV_SESSION_HINT": "query"})


OURS = {"outcome": "backend_materialized_reuse", "exact_tokens": 16, "reused_tokens": 800}
DECLINED = {"outcome": "backend_declined_reuse", "reason": "stale", "exact_tokens": 0, "reused_tokens": 0}
COLD = {"outcome": "cold_fallback", "exact_tokens": 0, "reused_tokens": 0}
CACHED = {"usage": {"prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 64}}}


def details(**counts: int) -> dict[str, Any]:
    return {"sglext": {"cached_tokens_details": counts}}


@pytest.mark.parametrize(
    ("answer", "kind", "counts"),
    [
        ({"semblend": OURS}, "relocated", (16, None, 800)),
        ({"kv_transfer_params": {"semblend": OURS}}, "relocated", (16, None, 800)),
        (details(device=32, host=64, storage=8), "exact_external", (32, 72, None)),
        (details(device=32, host=0), "exact_local", (32, 0, None)),
        (CACHED, "exact_local", (64, None, None)),
        ({"semblend": DECLINED}, "rejected", (0, None, 0)),
        ({"semblend": COLD}, "fallback", (0, None, 0)),
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}, "fallback", (0, None, None)),
        ({"usage": {"prompt_tokens": 9}}, None, (None, None, None)),
        ({"semblend": 7, "kv_transfer_params": [], "sglext": {"cached_tokens_details": 3}}, None, (None, None, None)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_an_engine_says_of_reuse_is_one_record_of_the_request(answer, kind, counts, is_stream):
    async def test():
        async with ScriptedEngine() as engine:
            events = [b"data: " + json.dumps(answer).encode() + b"\n\n", b"data: [DONE]\n\n"]
            engine.plan(stream(*events) if is_stream else answer_json(answer))
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            await ask(app, "POST", CHAT, body=chat(stream=is_stream), headers={"X-Request-ID": "me"})
            record = json.loads((await ask(app, "GET", "/v1/requests/me"))[1])
            receipt = record["receipt"]
            assert record["reuse"] == kind
            assert (receipt["exact_tokens"], receipt["external_tokens"], receipt["relocated_tokens"]) == counts

    run(test())
