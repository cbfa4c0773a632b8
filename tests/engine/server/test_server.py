"""The server against the fake engine: shapes field by field, mistakes, tenants, limits, clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")
httpx = pytest.importorskip("httpx", reason="the tests need httpx")

from asgi_client import AsgiClient, ask  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from live_server import run_server, wait_until  # noqa: E402

from semblend.config import SemBlendConfig  # noqa: E402
from semblend.confirm.outcome import Outcome  # noqa: E402
from semblend.confirm.receipt import Receipt  # noqa: E402
from semblend.engine.server.admission import AdmissionQueue  # noqa: E402
from semblend.engine.server.config import ServeConfig  # noqa: E402
from semblend.engine.server.dashboard import ColdEstimate, LiveBoard, LiveRequest, draw_strip  # noqa: E402
from semblend.engine.server.routes import create_app, listen  # noqa: E402
from semblend.engine.server.service import MAX_BODY_BYTES  # noqa: E402
from semblend.engine.server.tenants import Identity, Tenants, bearer  # noqa: E402
from semblend.errors import CapacityError, ConfigError  # noqa: E402
from semblend.facade import SemBlend  # noqa: E402
from semblend.plan.reuse_plan import Decline, DeclineReason  # noqa: E402
from semblend.span import Span  # noqa: E402
from semblend.wire.answer import Chunk  # noqa: E402
from semblend.wire.errors import ApiError  # noqa: E402
from semblend.wire.request import Request  # noqa: E402
from tests.fakes.fake_engine import FakeEngine  # noqa: E402

DOCUMENT = " ".join(f"Clause {n} says that ferry {n * 7} leaves pier {n % 5} at {n % 24} sharp." for n in range(80))
CHAT = "/v1/chat/completions"


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 600))


def engine(**arguments: Any) -> FakeEngine:
    return FakeEngine(SemBlend(SemBlendConfig(embedder="none")), **arguments)


@asynccontextmanager
async def client(fake: FakeEngine, *, address: str = "10.9.9.9", **limits: Any) -> AsyncIterator[Any]:
    transport = httpx.ASGITransport(create_app(fake, ServeConfig(**limits)), client=(address, 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield http


def chat(content: str = f"When?\n{DOCUMENT}", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **more}


def events(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


# -- shapes --------------------------------------------------------------------------------------------------------


def test_a_chat_answer_has_the_official_fields_and_ours():
    async def test():
        async with client(engine()) as http:
            answer = await http.post(CHAT, json=chat())
        body = answer.json()
        assert answer.status_code == 200
        assert set(body) == {
            "id", "object", "created", "model", "system_fingerprint", "choices", "usage", "semblend"
        }  # fmt: skip
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert answer.headers["x-request-id"] == body["id"]
        assert isinstance(body["created"], int)
        (choice,) = body["choices"]
        assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert body["semblend"]["outcome"] == "cold_fallback"
        assert {
            "exact_tokens",
            "reused_tokens",
            "recomputed_tokens",
            "prefill_tokens",
            "donors",
            "risk",
            "ttft_ms",
        } <= set(body["semblend"])

    run(test)


def test_another_question_on_the_same_document_reuses_it_and_usage_says_so():
    async def test():
        async with client(engine()) as http:
            first = (await http.post(CHAT, json=chat())).json()
            second = (await http.post(CHAT, json=chat(f"From which pier, please?\n{DOCUMENT}"))).json()
        ours = second["semblend"]
        assert ours["outcome"] == "backend_materialized_reuse"
        assert ours["donors"] == [first["id"]]
        assert ours["reused_tokens"] > 0.7 * second["usage"]["prompt_tokens"]
        kinds = ("exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens")
        assert sum(ours[kind] for kind in kinds) == second["usage"]["prompt_tokens"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == ours["exact_tokens"] + ours["reused_tokens"]

    run(test)


def test_a_chat_stream_opens_with_the_role_and_closes_with_usage_and_receipt():
    async def test():
        async with client(engine()) as http:
            plain = (await http.post(CHAT, json=chat())).json()
            options = {"stream": True, "stream_options": {"include_usage": True}}
            answer = await http.post(CHAT, json=chat(**options))
            bare = events((await http.post(CHAT, json=chat(stream=True))).text)
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = events(answer.text)
        assert {part["object"] for part in parts} == {"chat.completion.chunk"}
        assert len({part["id"] for part in parts}) == 1
        assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        told = "".join(part["choices"][0]["delta"].get("content", "") for part in parts[:-1])
        assert told == plain["choices"][0]["message"]["content"]
        assert parts[-2]["choices"][0]["finish_reason"] == "stop"
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert all(part["usage"] is None for part in parts[:-1])
        assert [("semblend" in part) for part in parts] == [False] * (len(parts) - 1) + [True]
        assert bare[-1]["choices"][0]["finish_reason"] == "stop"
        assert bare[-1]["semblend"]["outcome"] == "exact_prefix_route"
        assert all("usage" not in part for part in bare)

    run(test)


def test_completions_take_text_or_ids_and_give_logprobs_with_offsets():
    async def test():
        fake = engine()
        async with client(fake) as http:
            text = await http.post("/v1/completions", json={"prompt": DOCUMENT, "max_tokens": 4, "logprobs": 2})
            ids = await http.post("/v1/completions", json={"prompt": list(fake.encode(DOCUMENT)), "max_tokens": 4})
            stream = await http.post(
                "/v1/completions", json={"prompt": DOCUMENT, "max_tokens": 4, "logprobs": 2, "stream": True}
            )
        body = text.json()
        choice = body["choices"][0]
        assert (body["object"], choice["finish_reason"]) == ("text_completion", "length")
        assert body["usage"]["completion_tokens"] == 4
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["logprobs"]["text_offset"][0] == 0
        assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
        assert ids.json()["choices"][0]["text"] == choice["text"]
        parts = [part["choices"][0] for part in events(stream.text)]
        offsets = [part["logprobs"]["text_offset"][0] for part in parts if part["logprobs"]]
        assert offsets == choice["logprobs"]["text_offset"]

    run(test)


def test_chat_logprobs_n_and_stop_are_honoured():
    async def test():
        async with client(engine()) as http:
            body = (await http.post(CHAT, json=chat(n=3, logprobs=True, top_logprobs=2, stop=[" ferry"]))).json()
            stream = events((await http.post(CHAT, json=chat(n=2, stream=True))).text)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        for choice in body["choices"]:
            assert " ferry" not in choice["message"]["content"]
            assert choice["finish_reason"] == "stop"
            token = choice["logprobs"]["content"][0]
            assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(token["top_logprobs"]) == 2
        finished = [part["choices"][0]["index"] for part in stream if part["choices"][0]["finish_reason"]]
        assert finished == [0, 1]

    run(test)


def test_generate_speaks_sglangs_shape_whole_and_streamed():
    async def test():
        fake = engine()
        async with client(fake) as http:
            params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
            await http.post("/generate", json={"text": f"Why? {DOCUMENT}", "sampling_params": params})
            body = (
                await http.post(
                    "/generate",
                    json={
                        "input_ids": list(fake.encode(f"How come? {DOCUMENT}")),
                        "sampling_params": params,
                        "rid": "mine",
                    },
                )
            ).json()
            stream = events(
                (await http.post("/generate", json={"text": DOCUMENT, "sampling_params": params, "stream": True})).text
            )
        meta = body["meta_info"]
        assert len(body["output_ids"]) == meta["completion_tokens"] == 6
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert meta["cached_tokens"] == sum(meta["cached_tokens_details"].values()) > 0.7 * meta["prompt_tokens"]
        assert body["semblend"]["reused_tokens"] == meta["cached_tokens_details"]["fuzzy"]
        assert stream[-1]["text"].startswith(stream[0]["text"])  # each event repeats the text so far
        assert stream[0]["meta_info"]["finish_reason"] is None

    run(test)


def test_models_health_metrics_and_stats_answer():
    from prometheus_client.parser import text_string_to_metric_families

    async def test():
        async with client(engine(), aliases=("gpt-4o",)) as http:
            await http.post(CHAT, json=chat())
            models = (await http.get("/v1/models")).json()
            one = (await http.get("/v1/models/gpt-4o")).json()
            health = (await http.get("/health")).json()
            metrics = await http.get("/metrics")
            stats = (await http.get("/api/stats")).json()
            live = (await http.get("/api/live")).json()
            news = (await http.get(f"/api/live?after={live['sequence']}")).json()
            lost = await http.get("/v1/models/other")
        assert [card["id"] for card in models["data"]] == ["fake", "gpt-4o"]
        assert (models["object"], one["object"], one["root"]) == ("list", "model", "fake")
        assert health["status"] == "ok"
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'semblend_server_responses_total{path="/v1/chat/completions",status="200"} 1' in metrics.text
        families = {family.name: family for family in text_string_to_metric_families(metrics.text)}
        for name in ("running", "waiting", "refused"):
            assert [sample.value for sample in families[f"semblend_server_{name}"].samples] == [0]
        assert "semblend_requests_total" in metrics.text
        assert stats["totals"]["outcomes"] == {"cold_fallback": 1}
        assert len(live["requests"]) == 1
        assert news["requests"] == []
        assert lost.status_code == 404

    run(test)


def test_metrics_without_their_package_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    async def test():
        async with client(engine()) as http:
            answer = await http.get("/metrics")
        assert answer.status_code == 500
        assert "semblend-suite[local]" in answer.json()["error"]["hint"]

    run(test)


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_a_flush_forgets_every_donor_and_prefix(path):
    async def test():
        async with client(engine()) as http:
            await http.post(CHAT, json=chat())
            assert (await http.post(path)).json() == {"success": True, "donors_forgotten": 1}
            again = (await http.post(CHAT, json=chat())).json()
        assert again["semblend"]["prefill_tokens"] == again["usage"]["prompt_tokens"]

    run(test)


# -- one request's own wishes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "reused"),
    [
        ({"quality": "fast"}, True),
        ({"quality": "balanced"}, True),
        ({"quality": "exact"}, False),
        ({"quality": "0.3"}, True),
        ({"reuse": False}, False),
    ],
)
def test_a_request_chooses_its_own_quality(ours, reused):
    async def test():
        async with client(engine()) as http:
            await http.post(CHAT, json=chat())
            body = (await http.post(CHAT, json=chat(f"Where to?\n{DOCUMENT}", semblend=ours))).json()
        assert (body["semblend"]["reused_tokens"] > 0) is reused
        assert body["semblend"]["mode"] == ours.get("quality", "balanced")

    run(test)


@pytest.mark.parametrize(("number", "mode"), [(0.05, "0.05"), (0, "exact"), (0.02, "balanced"), ("1e-1", "0.1")])
def test_a_quality_may_be_a_number_of_nats(number, mode):
    async def test():
        async with client(engine()) as http:
            body = (await http.post(CHAT, json=chat(semblend={"quality": number}))).json()
        assert body["semblend"]["mode"] == mode

    run(test)


@pytest.mark.parametrize("number", [-1, "1e9x", "nan", "inf", True, [0.1], "-0.0001"])
def test_a_quality_that_is_no_number_of_nats_is_refused_with_a_hint(number):
    async def test():
        async with client(engine()) as http:
            answer = await http.post(CHAT, json=chat(semblend={"quality": number}))
        assert answer.status_code == 400
        assert "quality" in answer.text
        assert "nats" in answer.text

    run(test)


def test_another_cache_salt_sees_nothing():
    async def test():
        async with client(engine()) as http:
            await http.post(CHAT, json=chat(cache_salt="a"))
            other = (await http.post(CHAT, json=chat(cache_salt="b"))).json()
            same = (await http.post(CHAT, json=chat(cache_salt="a"))).json()
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert same["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    run(test)


# -- mistakes ------------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, Any, int, str]] = [
    (CHAT, {"model": "fake"}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "Hi"}, 400, "messages"),
    (CHAT, {"messages": ["Hi"]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "king", "content": "Hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, chat("x") | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content[0].type"),
    (CHAT, chat("half \ud800 pair"), 400, "surrogate"),
    (CHAT, chat(model="gpt-5"), 404, "gpt-5"),
    (CHAT, chat(model=7), 400, "model"),
    (CHAT, chat(temperature="hot"), 400, "temperature"),
    (CHAT, chat(temperature=9), 400, "temperature"),
    (CHAT, chat(temperature=True), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(n=0), 400, "n is 0"),
    (CHAT, chat(n=99), 400, "n is 99"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
    (CHAT, chat(stop=["a"] * 99), 400, "stop"),
    (CHAT, chat(stop=[""]), 400, "stop"),
    (CHAT, chat(seed="x"), 400, "seed"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat(top_logprobs=3), 400, "top_logprobs"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools is not supported"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format is not supported"),
    (CHAT, chat(logit_bias=[5]), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "'x'"),
    (CHAT, chat(logit_bias={"²": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"-5": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"99999999999": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"5": 101}), 400, "logit_bias.5"),
    (CHAT, chat(logit_bias={"5": "much"}), 400, "logit_bias.5"),
    (CHAT, chat(logit_bias={str(n): 1 for n in range(2000)}), 400, "2000 entries"),
    (CHAT, chat(presence_penalty=2.5), 400, "presence_penalty"),
    (CHAT, chat(frequency_penalty="x"), 400, "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    (CHAT, chat(repetition_penalty=1e-38), 400, "repetition_penalty is 1e-38, outside [0.01, 2]"),
    (CHAT, chat(repetition_penalty=2.1), 400, "repetition_penalty"),
    (CHAT, chat(min_p=-0.1), 400, "min_p"),
    (CHAT, chat(top_k=-2), 400, "top_k"),
    (CHAT, chat(semblend={"quality": "best"}), 400, "semblend.quality"),
    (CHAT, chat(semblend="fast"), 400, "semblend"),
    (CHAT, chat(cache_salt=5), 400, "cache_salt"),
    (CHAT, chat("word " * 40_000), 400, "context"),
    (CHAT, chat(max_completion_tokens=32_768), 400, "context"),
    (CHAT, [1, 2], 400, "object"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a", ""]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a", 5]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[1], "a", []]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 65}, 400, "65 prompts"),
    ("/v1/completions", {"prompt": [1, -2]}, 400, "index 1"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "index 1"),
    ("/v1/completions", {"prompt": "a", "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "a", "n": 1, "best_of": 4}, 400, "best_of"),
    ("/generate", {}, 400, "input_ids"),
    ("/generate", {"text": "a", "input_ids": [1]}, 400, "input_ids"),
    ("/generate", {"text": ["a", "b"]}, 400, "batch"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": "many"}}, 400, "sampling_params.max_new_tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "named"), MISTAKES)
def test_a_mistake_gets_openais_error_object_with_a_hint(path, body, status, named):
    async def test():
        async with client(engine()) as http:
            sent = json.dumps(body).encode()
            answer = await http.post(path, content=sent, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert answer.status_code == status, answer.text
        assert set(error) == {"message", "type", "param", "code", "hint"}
        assert named in error["message"]
        assert error["hint"]
        assert "Traceback" not in answer.text

    run(test)


def test_a_body_in_another_encoding_is_said_so():
    async def test():
        async with client(engine()) as http:
            answer = await http.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
            assert answer.status_code == 415
            assert "gzip" in answer.json()["error"]["message"]
            assert (await http.head("/health")).status_code == 200  # as load balancers look

    run(test)


@pytest.mark.parametrize("sent", [b"", b"{", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000])
def test_a_body_that_is_not_json_is_a_400(sent):
    async def test():
        async with client(engine()) as http:
            answer = await http.post(CHAT, content=sent)
            assert answer.status_code == 400
            assert "JSON" in answer.json()["error"]["message"]
            assert (await http.post(CHAT, json=chat())).status_code == 200

    run(test)


def test_harmless_values_of_what_we_lack_are_accepted():
    async def test():
        neutral = {
            "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "presence_penalty": 0.0,
            "logit_bias": {}, "user": "u", "store": False, "metadata": {"a": "b"}, "temperature": None,
        }  # fmt: skip
        async with client(engine()) as http:
            assert (await http.post(CHAT, json=chat(**neutral))).status_code == 200

    run(test)


def test_an_unknown_path_and_a_wrong_method_get_the_same_shape():
    async def test():
        async with client(engine()) as http:
            odd = ((await http.get("/v2/chat"), 404), (await http.get(CHAT), 405), (await http.post(f"{CHAT}/"), 404))
            for answer, status in odd:
                assert answer.status_code == status
                assert answer.json()["error"]["message"]

    run(test)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("model", "messages", "stream", "n", "stop", "seed", "max_tokens", "semblend", "stream_options", "logprobs",
         "prompt", "tools", "cache_salt", "text", "input_ids", "sampling_params", "top_k", "ignore_eos")  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), st.sampled_from([CHAT, "/v1/completions", "/generate"])
)
def test_no_body_whatever_makes_the_server_fail(body, path):
    async def test():
        async with client(SHARED) as http:
            answer = await http.post(path, json=body)
        assert answer.status_code in (200, 400, 404)

    run(test)


SHARED = engine()


# -- an engine that fails ------------------------------------------------------------------------------------------


class Failing(FakeEngine):
    """Raises ahead of the first token, or after it."""

    def __init__(self, error: Exception, *, after: int) -> None:
        super().__init__(SemBlend(SemBlendConfig(embedder="none")))
        self.error, self.after, self.broken = error, after, True

    async def submit(self, request: Request) -> AsyncIterator[Chunk]:
        seen = 0
        async for chunk in super().submit(request):
            if self.broken and seen >= self.after:
                raise self.error
            seen += 1
            yield chunk


@pytest.mark.parametrize(
    ("error", "status"), [(CapacityError("no blocks left"), 503), (RuntimeError("secret path /srv/x"), 500)]
)
def test_an_engine_that_fails_costs_one_request_and_shows_nothing_of_itself(error, status):
    async def test():
        fake = Failing(error, after=0)
        async with client(fake) as http:
            for stream in (False, True):
                answer = await http.post(CHAT, json=chat(stream=stream))
                assert answer.status_code == status
                assert "secret" not in answer.text
            fake.after = 3
            late = events((await http.post(CHAT, json=chat(stream=True))).text)
            assert late[-1]["error"]["type"] in ("server_error", "overloaded_error")
            fake.broken = False
            assert (await http.post(CHAT, json=chat())).status_code == 200
            live = (await http.get("/api/live")).json()
        assert live["totals"]["states"] == {"failed": 3, "done": 1}
        assert (live["running"], fake.running) == (0, set())

    run(test)


def test_a_request_that_takes_too_long_is_ended():
    async def test():
        fake = engine()
        fake.hold.clear()
        async with client(fake, request_timeout_s=1) as http:
            answer = await http.post(CHAT, json=chat())
            assert answer.status_code == 504
            assert len(fake.cancelled) == 1
            fake.hold.set()
            assert (await http.post(CHAT, json=chat())).status_code == 200

    run(test)


# -- text that cannot fit ------------------------------------------------------------------------------------------


class RecordsEncoding(FakeEngine):
    """Remembers how many characters reached its tokenizer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(SemBlend(SemBlendConfig(embedder="none")), **arguments)
        self.encoded: list[int] = []

    def encode(self, text: str, **how: Any) -> Any:
        self.encoded.append(len(text))
        return super().encode(text, **how)


HUGE = "7" * (MAX_BODY_BYTES - 4096)  # as much as fits the body
TOO_LONG = [
    (CHAT, chat(HUGE), "messages"),
    (CHAT, {"messages": [{"role": "user", "content": HUGE[: len(HUGE) // 64]}] * 64}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": HUGE}]}]}, "messages"),
    ("/v1/completions", {"prompt": HUGE}, "prompt"),
    ("/v1/completions", {"prompt": [HUGE]}, "prompt"),
    ("/v1/completions", {"prompt": ["short", HUGE]}, "prompt"),
    ("/v1/completions", {"prompt": HUGE, "stream": True}, "prompt"),
    ("/v1/completions", {"prompt": [HUGE[: len(HUGE) // 64]] * 64}, "prompt"),
    ("/generate", {"text": HUGE}, "text"),
    ("/generate", {"text": HUGE, "stream": True}, "text"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG, ids=range(len(TOO_LONG)))
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(path, body, param):
    async def test():
        fake = RecordsEncoding()
        async with client(fake) as http:
            answer = await http.post(path, json=body)
            assert (await http.post(CHAT, json=chat("Hi"))).status_code == 200  # a short one is served
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "characters" in error["message"]
        assert error["hint"]
        assert max(fake.encoded) < 100
        assert fake.cancelled == []

    run(test)


def test_a_text_of_the_longest_tokens_that_fill_the_context_is_not_refused_by_its_length():
    async def test():
        fake = RecordsEncoding(max_context=64)
        blanks = (" " * fake.longest_token_chars) * 60  # 60 tokens of 16 characters
        async with client(fake) as http:
            fits = await http.post("/v1/completions", json={"prompt": blanks, "max_tokens": 2})
            over = await http.post("/v1/completions", json={"prompt": blanks + " " * 65, "max_tokens": 2})
            texts = {"prompt": [blanks] * 8, "max_tokens": 2}
            together = await http.post("/v1/completions", json=texts)
        async with client(RecordsEncoding(max_context=64), max_list_chars=2000) as http:
            too_many = await http.post("/v1/completions", json=texts)
        assert (fits.status_code, over.status_code, together.status_code, too_many.status_code) == (200, 400, 200, 400)
        assert "in 8 texts" in too_many.json()["error"]["message"]

    run(test)


# -- tenants -------------------------------------------------------------------------------------------------------

RING = Tenants({"sk-acme": "acme", "sk-bolt": "bolt"}, admin_keys=["sk-root"], fronts=["10.1.0.0/16"])


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_with_keys_configured_a_missing_or_unknown_key_is_401():
    async def test():
        async with client(engine(), tenants=RING) as http:
            for headers in ({}, key("sk-none"), {"Authorization": "Basic abc"}, {"X-Tenant-ID": "acme"}):
                answer = await http.post(CHAT, json=chat(), headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["type"] == "authentication_error"
                assert (await http.get("/api/live", headers=headers)).status_code == 401
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/")).status_code == 200

    run(test)


def test_a_tenant_neither_reuses_nor_sees_what_is_anothers():
    async def test():
        async with client(engine(), tenants=RING) as http:
            theirs = (await http.post(CHAT, json=chat(), headers=key("sk-acme"))).json()
            ours = (await http.post(CHAT, json=chat(), headers=key("sk-bolt"))).json()
            assert ours["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            seen = {}
            for name in ("sk-acme", "sk-bolt", "sk-root"):
                donors = (await http.get("/api/donors", headers=key(name))).json()
                live = (await http.get("/api/live", headers=key(name))).json()
                seen[name] = {one["id"] for one in live["requests"]}
                named = {donor["donor_id"] for donor in donors["donors"]}
                assert named == (seen[name] if name == "sk-root" else set())  # only an admin is told which they are
                assert donors["count"] == live["donors"] == len(seen[name])
                assert live["totals"]["requests"] == len(seen[name])
            assert seen == {"sk-acme": {theirs["id"]}, "sk-bolt": {ours["id"]}, "sk-root": {theirs["id"], ours["id"]}}
            path = f"/api/requests/{theirs['id']}"
            assert (await http.get(path, headers=key("sk-bolt"))).status_code == 404
            assert (await http.get(path, headers=key("sk-root"))).json()["tenant"] == "acme"
            assert "engine" not in (await http.get("/api/stats", headers=key("sk-bolt"))).json()

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
def test_donors_and_places_are_shown_to_an_admin_and_to_no_tenant(path, stream):
    def asking(question: str) -> dict[str, Any]:
        text = f"{question}\n{DOCUMENT}"
        return {"text": text} if path == "/generate" else chat(text) if path == CHAT else {"prompt": text}

    def last_object(text: str) -> dict[str, Any]:
        return (events(text)[-1] if stream else json.loads(text))["semblend"]

    async def test():
        async with client(engine(), tenants=RING) as http:
            texts = {}
            for name in ("sk-acme", "sk-root"):
                first = (await http.post(path, json=asking("When?"), headers=key(name))).json()
                donor = first["meta_info"]["id"] if path == "/generate" else first["id"]
                body = asking("From which pier, please?") | {"stream": stream}
                texts[name] = (await http.post(path, json=body, headers=key(name))).text, donor
            live = (await http.get("/api/live", headers=key("sk-acme"))).json()
            whole = (await http.get("/api/live", headers=key("sk-root"))).json()
            (text, donor), (full, own_donor) = texts["sk-acme"], texts["sk-root"]
            told = last_object(text)
            assert told["outcome"] == "backend_materialized_reuse"
            assert told["reused_tokens"] > 0
            assert not {"donors", "recomputed", "spans"} & set(told)
            assert donor not in text
            assert last_object(full)["donors"] == [own_donor]
            assert last_object(full)["recomputed"]
            for request in live["requests"]:
                assert not {"donors", "recomputed"} & set(request["semblend"])
                assert all(part[3] is None for part in request["strip"])
                starts = [part[0] for part in request["strip"]]
                assert len({part[2] for part in request["strip"]}) == len(starts)  # one part a kind: counts, no places
                one = (await http.get(f"/api/requests/{request['id']}", headers=key("sk-acme"))).json()
                assert one["semblend"] == request["semblend"]
            assert any(request["semblend"]["donors"] == [own_donor] for request in whole["requests"])

    run(test)


def test_a_list_of_prompts_and_a_trusted_front_show_a_tenant_no_donors():
    async def test():
        texts = {"prompt": [f"{question}\n{DOCUMENT}" for question in ("When, please?", "From which pier?")]}
        async with client(engine(), tenants=RING, address="10.1.2.3") as http:
            front = {"X-Tenant-ID": "acme"}
            first = (await http.post("/v1/completions", json={"prompt": f"When?\n{DOCUMENT}"}, headers=front)).json()
            answer = await http.post("/v1/completions", json=texts, headers=front)
        assert all(part["reused_tokens"] > 0 and "donors" not in part for part in answer.json()["semblend"])
        assert first["id"] not in answer.text

    run(test)


def test_a_declines_own_words_stay_with_the_operator():
    async def test():
        fake = engine()
        fake.semblend.lookup = lambda *given, **named: Decline(DeclineReason.STALE, "donor secret-1 was evicted")
        async with client(fake, tenants=RING) as http:
            tenant = await http.post(CHAT, json=chat(), headers=key("sk-acme"))
            live = await http.get("/api/live", headers=key("sk-acme"))
            operator = await http.post(CHAT, json=chat(), headers=key("sk-root"))
        assert tenant.json()["semblend"]["reason"] == "stale"
        assert tenant.json()["semblend"]["detail"]
        assert "secret-1" not in tenant.text + live.text
        assert operator.json()["semblend"]["detail"] == "donor secret-1 was evicted"

    run(test)


def test_only_an_admin_may_flush():
    async def test():
        async with client(engine(), tenants=RING) as http:
            for path in ("/flush_cache", "/reset_prefix_cache"):
                assert (await http.post(path, headers=key("sk-acme"))).status_code == 403
                assert (await http.post(path, headers=key("sk-root"))).status_code == 200

    run(test)


def read_metrics(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and label values."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_metrics_are_a_tenants_own_everything_for_an_admin_and_nothing_without_a_key():
    async def test():
        async with client(engine(), tenants=RING) as http:
            for _ in range(3):
                await http.post(CHAT, json=chat(), headers=key("sk-acme"))
            await http.post(CHAT, json={"messages": "wrong"}, headers=key("sk-acme"))
            await http.post(CHAT, json=chat(), headers=key("sk-bolt"))
            answers = {
                name: await http.get("/metrics", headers=key(name)) for name in ("sk-acme", "sk-bolt", "sk-root")
            }
            assert (await http.get("/metrics")).status_code == 401
            assert (await http.get("/metrics", headers={"X-Tenant-ID": "acme"})).status_code == 401
        acme, bolt, root = (read_metrics(answer.text) for answer in answers.values())
        responses = "semblend_server_responses_total"
        assert (acme[responses, CHAT, "200"], acme[responses, CHAT, "400"]) == (3, 1)
        assert {name: value for name, value in bolt.items() if name[0] == responses} == {(responses, CHAT, "200"): 1}
        assert root[responses, CHAT, "200"] == 4
        told = {name[0] for name in bolt}
        assert told == {
            "semblend_server_running",
            "semblend_server_waiting",
            "semblend_server_refused_total",
            responses,
            "semblend_requests_total",
            "semblend_declines_total",
            "semblend_tokens_total",
        }
        assert bolt["semblend_requests_total", "cold_fallback"] == 1
        assert acme["semblend_tokens_total", "exact"] > 0
        assert bolt["semblend_tokens_total", "exact"] == 0

    run(test)


def test_metrics_are_public_by_an_explicit_word_only():
    async def test():
        async with client(engine(), tenants=RING, public_metrics=True) as http:
            await http.post(CHAT, json=chat(), headers=key("sk-acme"))
            assert "semblend_donors" in (await http.get("/metrics")).text
        async with client(engine(), tenants=RING) as http:
            assert (await http.get("/metrics")).status_code == 401

    run(test)


READ_BY_A_TENANT = ["/metrics", "/api/live", "/api/live?after=1", "/api/stats", "/api/donors", "/v1/models", "/health"]


def test_what_a_tenant_reads_is_the_same_whatever_the_others_do(monkeypatch):
    """The side channels of a shared server: numbers that count everybody, lists that others push things out of."""
    monkeypatch.setattr(time, "time", lambda: 1_000.0)

    async def test():
        fake = engine()
        app = create_app(fake, ServeConfig(tenants=RING, max_running=2, max_waiting=3))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            await http.post(CHAT, json=chat(), headers=key("sk-bolt"))
            before = {path: (await http.get(path, headers=key("sk-bolt"))).text for path in READ_BY_A_TENANT}
            for number in range(230):  # more than the board keeps
                await http.post(CHAT, json=chat(f"{number}\n{DOCUMENT}", max_tokens=1), headers=key("sk-acme"))
            fake.hold.clear()
            flood = [asyncio.create_task(http.post(CHAT, json=chat(), headers=key("sk-acme"))) for _ in range(9)]
            gate = app.state.service.admission
            await until(lambda: gate.count("acme").refused > 0)
            after = {path: (await http.get(path, headers=key("sk-bolt"))).text for path in READ_BY_A_TENANT}
            fake.hold.set()
            await asyncio.gather(*flood)
        metrics = before.pop("/metrics")  # they count the tenant's own reading
        for path, times in Counter(path.partition("?")[0] for path in READ_BY_A_TENANT).items():
            metrics += f'semblend_server_responses_total{{path="{path}",status="200"}} {times}.0\n'
        assert sorted(after.pop("/metrics").splitlines()) == sorted(metrics.splitlines())
        assert after == before

    run(test)


def test_a_tenants_news_are_counted_by_its_own_numbers():
    async def test():
        async with client(engine(), tenants=RING) as http:
            for name in ("sk-acme", "sk-bolt"):
                await http.post(CHAT, json=chat(), headers=key(name))
            live = (await http.get("/api/live", headers=key("sk-bolt"))).json()
            await http.post(CHAT, json=chat(), headers=key("sk-acme"))
            path = f"/api/live?after={live['sequence']}"
            assert (await http.get(path, headers=key("sk-bolt"))).json()["requests"] == []
            await http.post(CHAT, json=chat(), headers=key("sk-bolt"))
            assert len((await http.get(path, headers=key("sk-bolt"))).json()["requests"]) == 1

    run(test)


def test_a_request_id_cannot_be_guessed_from_another():
    async def test():
        async with client(engine()) as http:
            ids = [(await http.post(CHAT, json=chat())).headers["x-request-id"] for _ in range(2)]
        names = [id.removeprefix("chatcmpl-") for id in ids]
        assert all(re.fullmatch(r"[0-9a-f]{32}", name) for name in names)
        assert sum(a != b for a, b in zip(*names, strict=True)) > 16  # random, not counted

    run(test)


def test_a_flood_of_one_tenant_leaves_the_other_served():
    """D4 of the review: five requests of one tenant filled all places, and the other got 429 only."""

    async def test():
        fake = engine()
        fake.hold.clear()
        app = create_app(fake, ServeConfig(tenants=RING, max_running=2, max_waiting=3))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            loud = [asyncio.create_task(http.post(CHAT, json=chat(), headers=key("sk-acme"))) for _ in range(12)]
            gate = app.state.service.admission
            await until(lambda: gate.count("acme").refused == 7)
            quiet = [asyncio.create_task(http.post(CHAT, json=chat(), headers=key("sk-bolt"))) for _ in range(2)]
            await until(lambda: (gate.count("bolt").running, gate.count("bolt").waiting) == (1, 1))
            fake.hold.set()
            assert [(await one).status_code for one in quiet] == [200, 200]
            statuses = [(await one) for one in loud]
            refused = [one for one in statuses if one.status_code == 429]
            assert len(refused) == 8  # one of them made room in the line
            assert all(one.headers["retry-after"] == "1" for one in refused)
            assert all("bolt" not in one.text for one in refused)
        assert (gate.running, gate.waiting) == (0, 0)

    run(test)


def test_a_tenant_header_is_believed_from_a_front_and_from_nobody_else():
    async def test():
        fake = engine()
        async with client(fake, tenants=RING, address="10.1.2.3") as http:
            assert (await http.post(CHAT, json=chat(), headers={"X-Tenant-ID": "acme"})).status_code == 200
            assert (await http.post(CHAT, json=chat(), headers={"X-Tenant-ID": "x" * 500})).status_code == 400
            # a key decides over the header
            bolt = await http.post(CHAT, json=chat(), headers={"X-Tenant-ID": "acme", **key("sk-bolt")})
            assert bolt.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert [donor.namespace.tenant for donor in fake.donors()] == ["acme", "bolt"]

        open_door = engine()
        async with client(open_door, address="10.9.9.9") as http:
            await http.post(CHAT, json=chat(), headers={"X-Tenant-ID": "acme"})
        assert [donor.namespace.tenant for donor in open_door.donors()] == [""]

    run(test)


@pytest.mark.parametrize(
    ("name", "values"),
    [("X-Tenant-ID", ("acme", "bolt")), ("Authorization", ("Bearer sk-acme", "Bearer sk-bolt")),
     ("x-api-key", ("sk-acme", "sk-acme"))],
)  # fmt: skip
def test_a_caller_that_names_itself_twice_is_nobody(name, values):
    """A front that adds its header behind its caller's must not let the caller choose."""

    async def test():
        fake = engine()
        async with client(fake, tenants=RING, address="10.1.2.3") as http:
            answer = await http.post(CHAT, json=chat(), headers=[(name, value) for value in values])
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "repeated_header")
            assert (await http.get("/api/stats", headers=[(name, value) for value in values])).status_code == 400
        assert not fake.donors()

    run(test)


def test_addresses_of_fronts_are_read_as_networks_and_nonsense_is_refused():
    ring = Tenants(fronts=["10.1.0.0/16", "::1"])
    assert ring.identify(None, address="::ffff:10.1.9.9", claimed="a").tenant == "a"
    assert ring.identify(None, address="::1", claimed="a").tenant == "a"
    assert ring.identify(None, address="not-an-address", claimed="a").tenant == ""
    assert not ring.identify(None, address="10.2.0.1").admin
    assert Tenants().identify(None).admin
    assert "sk-acme" not in repr(vars(RING))
    assert bearer(None, "k") == "k"
    for wrong in (
        {"fronts": ["front.example"]},
        {"keys": {"": "a"}},
        {"keys": {"k": ""}},
        {"keys": {"k": "a"}, "admin_keys": ["k"]},
    ):
        with pytest.raises(ConfigError):
            Tenants(**wrong)


# -- limits --------------------------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_413_even_when_it_hides_its_length():
    async def test():
        async def drip() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" " * 100

        async with client(engine(), max_body_bytes=1000) as http:
            assert (await http.post(CHAT, json=chat("x" * 2000))).status_code == 413
            assert (await http.post(CHAT, content=drip())).status_code == 413

    run(test)


def test_sixteen_megabytes_are_refused_by_their_length_before_a_byte_is_read():
    async def test():
        read = 0

        async def drip() -> AsyncIterator[bytes]:
            nonlocal read
            while True:
                read += 1
                yield b" " * 65_536

        async with client(engine()) as http:
            for length in (16 * 1024**2, "9" * 5000):
                answer = await http.post(CHAT, content=drip(), headers={"content-length": str(length)})
                assert answer.status_code == 413
                assert answer.json()["error"]["code"] == "body_too_large"
                assert read == 0
            assert (await http.post(CHAT, content=drip())).status_code == 413  # no length: read up to the limit
            assert read == MAX_BODY_BYTES // 65_536 + 1

    run(test)


def test_the_default_limit_of_a_body_follows_from_the_context():
    from semblend.engine.server.service import ESCAPED_BYTES, ROOM_BESIDE_TEXT, Service

    def limit(context: int, **limits: Any) -> int:
        return Service(engine(max_context=context), ServeConfig(**limits), AdmissionQueue(1, 1)).body_limit

    chars = engine().longest_token_chars
    assert limit(8192, max_list_chars=1) == ROOM_BESIDE_TEXT + ESCAPED_BYTES * 8192 * chars
    assert limit(8192, max_list_chars=600_000) == ROOM_BESIDE_TEXT + ESCAPED_BYTES * 600_000
    assert limit(10**7) == MAX_BODY_BYTES
    assert limit(10**7, max_body_bytes=5 * 10**7) == 5 * 10**7


@pytest.mark.parametrize("depth", [65, 199, 200, 201, *range(950, 965), 5000, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_of_any_depth_in_any_field_is_refused_in_our_words(opening, depth):
    async def test():
        nested = opening * depth + "1" + ("]" if opening == "[" else "}") * depth
        async with client(SHARED) as http:
            for sent in (
                nested,
                f'{{"prompt": {nested}}}',
                f'{{"prompt": "x", "tools": {nested}}}',
                f'{{"x": {nested}}}',
            ):
                answer = await http.post("/v1/completions", content=sent.encode())
                assert answer.status_code == 400, answer.text
                assert "nested more than 64 deep" in answer.json()["error"]["message"]

    run(test)


LONG = "9" * 4301
ODD_REQUESTS = [
    ("/api/live?after=" + LONG, 200),
    ("/api/live?after=" + "0" * 5000, 200),
    ("/api/live?after=-1", 400),
    ("/api/live?after=%D9%A4", 400),  # a digit of another script
    ("/api/live?after=1e3", 400),
    ("/api/live?after=", 400),
    ("/api/live?after=%00", 400),
    ("/api/live?after=1&after=x", 400),
    ("/api/live?" + "&" * 20_000, 200),
    ("/api/live?" + "a=1&" * 10_000, 200),
    ("/api/live?after=%ED%A0%80", 400),  # half a surrogate pair
    ("/api/requests/%00", 404),
    ("/api/requests/%ED%A0%80", 404),
    ("/api/requests/" + "a" * 20_000, 404),
    ("/api/requests/..%2F..%2Fetc", 404),
    ("/v1/models/%00%ED%A0%80", 404),
    ("/v1/models/" + "%F0%9F%98%80" * 5000, 404),
    ("/v1/models/", 404),
    ("/%ED%A0%80", 404),
    ("/%00" * 100, 404),
]


@pytest.mark.parametrize(("path", "status"), ODD_REQUESTS, ids=lambda value: str(value)[:40])
def test_odd_paths_and_queries_are_answered_or_refused_and_never_fail(path, status):
    async def test():
        async with client(SHARED) as http:
            answer = await http.get(path)
            assert answer.status_code == status, answer.text
            assert status == 200 or answer.json()["error"]["message"]

    run(test)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-length": LONG},
        {"content-length": "-1"},
        {"content-length": "\u00b2"},
        {"content-encoding": "\u00ff" * 5000},
        {"content-type": "x" * 5000},
        {"host": "\u00e9" * 5000},
        {"host": "[::1"},
        {"origin": "http://[::1"},
        {"origin": "\u00e9" * 5000},
        {"authorization": "Bearer " + "\u00ff" * 9000},
        {"x-api-key": ""},
        {"x-tenant-id": "\u00ff" * 5000},
        {"x-request-id": "x" * 9000},
    ],
    ids=lambda headers: str(headers)[:40],
)
def test_odd_headers_are_answered_or_refused_and_never_fail(headers):
    async def test():
        for ring in (Tenants(), RING):
            async with client(SHARED, tenants=ring, address="10.1.2.3", local_only=True) as http:
                raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                answer = await http.post(CHAT, content=b'{"messages": [{"role": "user", "content": "x"}]}', headers=raw)
                assert 200 <= answer.status_code < 500
                assert answer.status_code == 200 or answer.json()["error"]["message"]

    run(test)


def test_token_ids_beyond_the_context_are_refused_before_they_take_a_place():
    async def test():
        fake = engine(max_context=64)
        async with client(fake, max_running=1, max_waiting=0) as http:
            for path, body, param in (
                ("/v1/completions", {"prompt": [1] * 64}, "prompt"),
                ("/v1/completions", {"prompt": [[1], [1] * 64]}, "prompt"),
                ("/generate", {"input_ids": [1] * 64}, "input_ids"),
            ):
                error = (await http.post(path, json=body)).json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert (await http.get("/api/live")).json()["requests"] == []

    run(test)


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a fact, not for a time; the test's own limit is the end of patience."""
    while not holds():
        await asyncio.sleep(0)


def test_a_full_queue_is_429_with_retry_after_and_drains():
    async def test():
        fake = engine()
        fake.hold.clear()
        transport = httpx.ASGITransport(
            app := create_app(fake, ServeConfig(max_running=2, max_waiting=1, retry_after_s=3))
        )
        gate: AdmissionQueue = app.state.service.admission
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            held = [asyncio.create_task(http.post(CHAT, json=chat(stream=n == 0))) for n in range(3)]
            await until(lambda: (gate.running, gate.waiting) == (2, 1))
            refused = await http.post(CHAT, json=chat())
            streamed = await http.post(CHAT, json=chat(stream=True))
            fake.hold.set()
            done = await asyncio.gather(*held)
        assert (refused.status_code, streamed.status_code) == (429, 429)
        assert refused.headers["retry-after"] == "3"
        assert refused.json()["error"]["code"] == "queue_full"
        assert [answer.status_code for answer in done] == [200, 200, 200]
        assert (gate.running, gate.waiting, gate.refused) == (0, 0, 2)

    run(test)


def test_a_gate_gives_back_the_place_of_one_who_left_the_line_even_in_the_moment_of_his_turn():
    async def test():
        gate = AdmissionQueue(1, 5)
        await gate.enter()
        first, second = (asyncio.create_task(gate.enter()) for _ in range(2))
        await until(lambda: gate.waiting == 2)
        gate.leave()  # the first's turn has come, but it is cancelled before it learns so
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert (gate.running, gate.waiting) == (1, 0)
        gate.leave()
        assert gate.running == 0

    run(test)


def test_settings_out_of_range_are_refused():
    for name in ("max_running", "max_body_bytes", "request_timeout_s"):
        with pytest.raises(ConfigError):
            ServeConfig(**{name: 0})


def test_two_hundred_clients_at_once_are_all_answered_right():
    async def test():
        fake = engine()
        transport = httpx.ASGITransport(app := create_app(fake, ServeConfig(max_running=16, max_waiting=400)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300) as http:
            asked = [f"Passage {n} tells that crew number {n} sails first." for n in range(200)]
            sent = [http.post(CHAT, json=chat(text, stream=n % 3 == 0)) for n, text in enumerate(asked)]
            done = await asyncio.gather(*sent)
        for n, answer in enumerate(done):
            assert answer.status_code == 200
            assert f"number {n} " in (
                "".join(_told(answer.text)) if n % 3 == 0 else answer.json()["choices"][0]["message"]["content"]
            )
        service = app.state.service
        assert (service.admission.running, service.admission.waiting, fake.running) == (0, 0, set())

    run(test)


def _told(text: str) -> Iterator[str]:
    for part in events(text):
        yield part["choices"][0]["delta"].get("content", "")


# -- a real socket -------------------------------------------------------------------------------------------------


@contextmanager
def real_server(fake: FakeEngine, **limits: Any) -> Iterator[tuple[str, int, Any]]:
    with run_server(fake, **limits) as live:
        yield live.host, live.port, live.app


class Stuck(FakeEngine):
    """Says two tokens and then nothing, until it is told to stop; every step is an event that a test can wait for."""

    def __init__(self) -> None:
        super().__init__(SemBlend(SemBlendConfig(embedder="none")))
        self.started, self.stopped = threading.Event(), threading.Event()
        self.stuck = True

    async def submit(self, request: Request) -> AsyncIterator[Chunk]:
        if not self.stuck:
            async for chunk in super().submit(request):
                yield chunk
            return
        self.running.add(request.request_id)
        yield Chunk(text="One", token_ids=(1,))
        self.started.set()
        await asyncio.get_running_loop().create_future()

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            super().cancel(request_id)
            self.stopped.set()


def post(path: str, body: Any) -> bytes:
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    return head.encode() + sent


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place_and_the_engine_stops(stream):
    fake = Stuck()
    with real_server(fake, max_running=1, max_waiting=0) as (host, port, app):
        with socket.create_connection((host, port), timeout=300) as wire:
            wire.sendall(post(CHAT, chat(stream=stream)))
            assert fake.started.wait(300)
            if stream:
                assert b"200 OK" in wire.recv(100)
        assert fake.stopped.wait(300)
        fake.stuck = False
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=300) as http:
            answer = _retried(lambda: http.post(CHAT, json=chat()))
            assert answer.status_code == 200
            assert http.get("/api/live").json()["totals"]["states"] == {"cancelled": 1, "done": 1}
        assert app.state.service.admission.running == 0


def _retried(ask: Callable[[], Any]) -> Any:
    """The place is given back a moment after the engine was told: 429 in that moment is right."""
    answers: list[Any] = []
    wait_until(lambda: answers.append(ask()) or answers[-1].status_code != 429)
    return answers[-1]


def test_a_client_that_leaves_the_line_frees_its_place_there():
    fake = Stuck()
    with real_server(fake, max_running=1, max_waiting=1) as (host, port, app):
        gate = app.state.service.admission
        with socket.create_connection((host, port), timeout=300) as first:
            first.sendall(post(CHAT, chat(stream=True)))
            assert fake.started.wait(300)
            with socket.create_connection((host, port), timeout=300) as second:
                second.sendall(post(CHAT, chat(stream=True)))
                wait_until(lambda: gate.waiting == 1)
            wait_until(lambda: gate.waiting == 0)
            assert gate.running == 1
        assert fake.stopped.wait(300)
        wait_until(lambda: gate.running == 0)


def test_tokens_arrive_one_by_one_over_a_real_socket():
    fake = Stuck()
    with real_server(fake) as (host, port, _), socket.create_connection((host, port), timeout=300) as wire:
        wire.sendall(post(CHAT, chat(stream=True)))
        seen = b""
        while b'"content":"One"' not in seen:  # the engine will never say more: what it said must be here already
            seen += wire.recv(4096)
        assert b"[DONE]" not in seen


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_vanish_at_random_moments_leave_nothing_behind(seed):
    rng = random.Random(seed)
    fake = engine()
    with real_server(fake, max_running=4, max_waiting=40) as (host, port, app):
        sent = post(CHAT, chat(stream=True))
        wires = []
        for _ in range(30):
            wire = socket.create_connection((host, port), timeout=300)
            wire.sendall(sent[: rng.choice([0, 10, len(sent) // 2, len(sent) - 1, len(sent), len(sent)])])
            wires.append(wire)
            if rng.random() < 0.7:
                wires.pop(rng.randrange(len(wires))).close()
        for wire in wires:
            wire.close()
        gate = app.state.service.admission
        wait_until(lambda: (gate.running, gate.waiting, len(fake.running)) == (0, 0, 0))
        answer = httpx.post(f"http://{host}:{port}{CHAT}", json=chat(), timeout=300)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"].startswith("Clause")


class Flood(FakeEngine):
    """Talks as fast as it is listened to, for ever."""

    async def submit(self, request: Request) -> AsyncIterator[Chunk]:
        self.running.add(request.request_id)
        while True:
            await asyncio.sleep(0)
            yield Chunk(text="x" * 100_000, token_ids=(1,))


def test_a_client_that_stops_reading_loses_its_place_when_its_time_is_over():
    fake = Flood(SemBlend(SemBlendConfig(embedder="none")))
    with real_server(fake, request_timeout_s=1) as (host, port, app):
        gate = app.state.service.admission
        with socket.create_connection((host, port), timeout=300) as wire:
            wire.sendall(post(CHAT, chat(stream=True)))
            wait_until(lambda: bool(fake.cancelled))
            wait_until(lambda: gate.running == 0)
        assert len(fake.cancelled) == 1


def test_an_address_that_cannot_be_listened_on_is_one_line_with_a_hint():
    with listen("127.0.0.1", 0) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("127.0.0.1", 99_999), ("300.1.1.1", 80)):
            with pytest.raises(ConfigError, match="cannot listen") as caught:
                listen(host, port)
            assert caught.value.hint


def test_a_body_that_does_not_come_is_given_up():
    serving = real_server(engine(), body_timeout_s=1)
    with serving as (host, port, _), socket.create_connection((host, port), timeout=300) as wire:
        wire.sendall(post(CHAT, chat())[:-5])
        assert wire.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://server"}, 200),
        ({"Origin": "https://friend.example"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[broken"}, 403),
    ],
)
def test_a_page_from_elsewhere_may_not_call_through_a_visitors_browser(headers, status):
    async def test():
        async with client(engine(), origins=("https://friend.example",)) as http:
            for method, path in (("POST", "/flush_cache"), ("GET", "/api/donors")):
                assert (await http.request(method, path, headers=headers)).status_code == status
            assert (await http.post(CHAT, json=chat(), headers=headers)).status_code == status

    run(test)


def test_a_local_server_answers_to_names_of_this_machine_only():
    async def test():
        async with client(engine(), local_only=True) as http:
            for host, status in (
                ("localhost:8000", 200),
                ("127.0.0.1", 200),
                ("[::1]:80", 200),
                ("rebound.example", 403),
            ):
                assert (await http.get("/api/donors", headers={"Host": host})).status_code == status

    run(test)


# -- the live board's arithmetic -----------------------------------------------------------------------------------


def receipt(**values: Any) -> Receipt:
    given = {"request_id": "r", "engine": "e", "namespace": "0" * 32, "outcome": Outcome.COLD_FALLBACK} | values
    return Receipt(**given)


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), max_size=6),
    st.integers(1, 50),
    st.floats(0, 1),
)
def test_a_strip_covers_every_token_once_and_agrees_with_the_receipt(exact, pieces, tail, share):
    at, spans = exact, []
    for gap, length in pieces:
        spans.append(Span(f"d{len(spans) % 2}", 5, at + gap, length))
        at += gap + length
    held = sum(span.length for span in spans)
    recomputed = tuple(
        (span.target_start, span.target_start + int(share * (span.length - 1))) for span in spans if span.length > 1
    )
    again = sum(end - start for start, end in recomputed)
    outcome = Outcome.BACKEND_MATERIALIZED_REUSE if held > again else Outcome.COLD_FALLBACK
    made = receipt(
        prompt_tokens=at + tail, exact_tokens=exact, reused_tokens=held - again, recomputed_tokens=again,
        prefill_tokens=at + tail - exact - held, spans=tuple(spans), outcome=outcome,
    )  # fmt: skip
    parts = draw_strip(made, recomputed)
    assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])]
    assert parts[-1][1] == made.prompt_tokens
    for kind, count in made.tokens.items():
        assert sum(end - start for start, end, one, _ in parts if one == kind) == count


def test_a_cold_estimate_learns_from_every_request_without_moved_kv_by_what_it_computed():
    cold = ColdEstimate()
    for computed in (100, 200, 300):  # behind a shared system prompt
        known = {"exact_tokens": 1000, "prefill_tokens": computed}
        cold.learn(receipt(prompt_tokens=1000 + computed, ttft_ms=10.0 + computed / 2, **known))
    moved = {"reused_tokens": 80, "prefill_tokens": 20, "spans": (Span("d", 0, 10, 80),)}
    cold.learn(receipt(prompt_tokens=100, ttft_ms=500.0, outcome=Outcome.BACKEND_MATERIALIZED_REUSE, **moved))
    assert cold.samples == 3
    assert cold.estimate_ms(400) == 210.0


def test_a_cold_estimate_goes_no_further_than_twice_the_longest_sample():
    cold = ColdEstimate()
    for tokens in (100, 200, 300):
        cold.add(tokens, tokens / 10)
    assert (cold.estimate_ms(600), cold.estimate_ms(601)) == (60.0, None)


def test_a_cold_start_does_not_become_a_cold_estimate():
    cold = ColdEstimate()
    cold.add(37, 1500.0)  # the server's first request
    assert cold.estimate_ms(37) is None
    for tokens in (40, 60, 80, 120):
        cold.add(tokens, 10.0 + tokens)
    assert cold.estimate_ms(100) == pytest.approx(110.0, rel=0.05)


def test_exact_hits_alone_save_no_time_with_reuse():
    board = LiveBoard()

    def book(**tokens: Any) -> None:
        entry = board.open(LiveRequest(f"r{len(board._entries)}", "acme", CHAT, None))
        board.record_chunk(entry, Chunk(receipt=receipt(**tokens), token_ids=(1,)))
        board.close(entry, "done")

    for tokens in (100, 200, 300):
        book(prompt_tokens=tokens, prefill_tokens=tokens, ttft_ms=float(tokens))
    book(prompt_tokens=300, exact_tokens=290, prefill_tokens=10, ttft_ms=10.0)
    assert board.tally(Identity("acme")).to_dict()["saved_ms"] == 0
    moved = {"reused_tokens": 290, "prefill_tokens": 10, "spans": (Span("d", 0, 10, 290),)}
    book(prompt_tokens=300, ttft_ms=20.0, outcome=Outcome.BACKEND_MATERIALIZED_REUSE, **moved)
    assert board.tally(Identity("acme")).to_dict()["saved_ms"] == pytest.approx(280.0, abs=1)


def test_an_api_error_names_its_type_by_status():
    assert ApiError(429, "m", retry_after_s=2).headers() == {"Retry-After": "2"}
    assert [ApiError(status, "m").type for status in (400, 401, 403, 404, 429, 500)] == [
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "rate_limit_error",
        "server_error",
    ]  # fmt: skip


# -- reads and refusals take turns ---------------------------------------------------------------------------------


def test_reads_and_refusals_wait_for_a_turn_and_an_answer_does_not():
    async def test():
        app = create_app(engine(), ServeConfig(tenants=Tenants({"sk-acme": "acme"})))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            key = {"Authorization": "Bearer sk-acme"}
            await app.state.turns.take("somebody")
            asked = [http.get(path) for path in ("/openapi.json", "/health", "/api/live", "/nowhere")]
            asked += [http.get("/api/live", headers=key), http.post(CHAT, json=chat())]
            waiting = [asyncio.ensure_future(one) for one in asked]
            answer = await http.post(CHAT, json=chat(), headers=key)
            assert answer.status_code == 200
            assert not any(one.done() for one in waiting)
            app.state.turns.give_back("somebody", 0.0)
            assert [(await one).status_code for one in waiting] == [200, 200, 401, 404, 200, 401]

    run(test)


def test_a_client_that_leaves_while_its_read_waits_has_nothing_done_for_it():
    async def test():
        app = create_app(engine())
        await app.state.turns.take("somebody")
        async with AsgiClient(app, "GET", "/api/live") as gone:
            gone.leave()
            assert await gone.start() == 0
        assert app.state.turns.waiting == 0

    run(test)


def test_a_reader_that_does_not_read_holds_up_nobody():
    async def test():
        app = create_app(engine())
        blocked = asyncio.Event()

        async def never(message: Any) -> None:
            blocked.set()
            await asyncio.Event().wait()

        async def receive() -> Any:
            return await asyncio.Event().wait()

        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/health", "raw_path": b"/health"}
        scope |= {"query_string": b"", "headers": [], "client": ("127.0.0.1", 1), "scheme": "http"}
        deaf = asyncio.create_task(app(scope, receive, never))
        await blocked.wait()
        found, _ = await ask(app, "GET", "/health")
        assert found.status == 200
        deaf.cancel()

    run(test)


def test_the_openapi_document_is_encoded_once():
    async def test():
        app = create_app(engine())
        bodies = []
        for _ in range(2):
            async with AsgiClient(app, "GET", "/openapi.json") as one:
                await one.start()
                bodies.append(await one.read())
        assert bodies[0] is bodies[1]
        assert json.loads(bodies[0])["openapi"] == "3.1.0"

    run(test)
