"""OpenTelemetry: one span for each request, below the client's and above the engine's; nothing without tracing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_client import AsgiClient, ask
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from semantickv.apps.build import build_proxy, build_router
from semantickv.settings import EdgeSettings
from tests.fakes.scripted_engine import ScriptedEngine, answer_json, die_after, hang

CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SECRET = "the text of a prompt"


def run(test: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


def chat() -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": SECRET}]}).encode()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What a set-up application records. (The real provider can be set only once in a process.)"""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_a_request_is_one_span_between_the_clients_and_the_engines(exporter):
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            receipt = {"outcome": "backend_materialized_reuse", "exact_tokens": 16, "reused_tokens": 800}
            usage = {"prompt_tokens": 900, "completion_tokens": 5}
            one.default = two.default = answer_json({"usage": usage, "semblend": receipt})
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False))
            headers = {"traceparent": PARENT, "tracestate": "a=b", "X-Request-ID": "me", "Authorization": "Bearer k"}
            await ask(app, "POST", CHAT, body=chat(), headers=headers)
            (span,) = exporter.get_finished_spans()
            assert (span.name, span.kind) == (f"POST {CHAT}", SpanKind.SERVER)
            assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
            (seen,) = [*one.requests, *two.requests]
            assert seen.headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
            assert seen.headers["tracestate"] == "a=b"
            expected = {
                "http.response.status_code": 200, "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 900,
                "semantickv.replica": "r0", "semantickv.route": "cold_fallback", "semantickv.reuse": "relocated",
                "semantickv.relocated_tokens": 800, "semantickv.exact_tokens": 16, "semantickv.request_id": "me",
                "semantickv.attempts": 1,
            }  # fmt: skip
            assert expected.items() <= dict(span.attributes).items()
            assert span.status.status_code is StatusCode.UNSET
            assert SECRET not in span.to_json()
            assert "Bearer" not in span.to_json()

    run(test())


def test_without_a_client_span_it_is_the_root_and_garbage_is_no_parent(exporter):
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            for given in ({}, {"traceparent": "garbage"}, {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"}):
                await ask(app, "POST", CHAT, body=chat(), headers=given)
            spans = exporter.get_finished_spans()
            assert [span.parent for span in spans] == [None] * 3
            assert [seen.headers["traceparent"].split("-")[2] for seen in engine.requests] == [
                f"{span.context.span_id:016x}" for span in spans
            ]

    run(test())


def test_a_fault_of_the_engine_is_an_error_and_a_client_that_leaves_is_none(exporter):
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(die_after(), hang())
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            await ask(app, "POST", CHAT, body=chat())
            engine.arrived.clear()
            async with AsgiClient(app, "POST", CHAT, body=chat()) as client:
                await engine.arrived.wait()
                client.leave()
                await client.task
            died, left = exporter.get_finished_spans()
            assert (died.status.status_code, died.attributes["error.type"]) == (StatusCode.ERROR, "closed_early")
            assert (left.status.status_code, left.attributes["error.type"]) == (StatusCode.UNSET, "client_left")

    run(test())


def test_without_tracing_the_clients_context_passes_as_it_is():
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            await ask(app, "POST", CHAT, body=chat(), headers={"traceparent": PARENT, "tracestate": "a=b"})
            assert engine.requests[0].headers["traceparent"] == PARENT
            assert engine.requests[0].headers["tracestate"] == "a=b"

    run(test())
