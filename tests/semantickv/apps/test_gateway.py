"""The proxy and the router over scripted engines: what clients see, what is written down, who may see what."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from asgi_client import AsgiClient, ask

from semantickv.apps.build import build_proxy, build_router
from semantickv.apps.gateway import Gateway
from semantickv.settings import EdgeSettings
from semantickv.telemetry import trace_log
from semantickv.telemetry.metrics import EDGE_METRICS
from semantickv.telemetry.trace_log import TraceLog, TraceOptions
from semantickv.traces.collection import TraceJob
from semblend.errors import ConfigError
from tests.fakes.scripted_engine import ScriptedEngine, answer_json, die_after, hang, send_raw, stream

CHAT = "/v1/chat/completions"
DOCUMENT = " ".join(f"Clause {n}: the tenant pays {n * 37 % 1000} coins on day {n * 13 % 31}." for n in range(200))
EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "Yes"}}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 3, '
    b'"prompt_tokens_details": {"cached_tokens": 64}}}\n\n',
    b"data: [DONE]\n\n",
)


class Inline(Executor):
    """Runs at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


def chat(*texts: str, **more: Any) -> bytes:
    messages = [{"role": "system" if n == 0 and len(texts) > 1 else "user", "content": t} for n, t in enumerate(texts)]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def run(test: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def fleet(count: int, **settings: Any):
    """A router over so many engines, without traces and without health checks."""
    engines = [ScriptedEngine() for _ in range(count)]
    for number, engine in enumerate(engines):
        engine.default = answer_json({"served_by": number})
        await engine.start()
    app = build_router(EdgeSettings(replicas=tuple(one.url for one in engines), trace=False, **settings))
    try:
        yield app, engines
    finally:
        for engine in engines:
            await engine.stop()


def proxy_with_traces(url: str, path: Path, **more: Any) -> Gateway:
    app = build_proxy(EdgeSettings(upstream=url, trace=False))
    app.trace_log = TraceLog(TraceOptions(str(path), **more), Inline())
    return app


# -- the proxy ---------------------------------------------------------------------------------------------------------


def test_a_streamed_chat_passes_unchanged_and_leaves_one_record():
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(stream(*EVENTS))
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            client, body = await ask(app, "POST", CHAT, body=chat("Hi", stream=True), headers={"X-Request-ID": "me-1"})
            assert body == b"".join(EVENTS)
            assert client.headers["x-request-id"] == "me-1"
            assert "x-replica-id" not in client.headers
            assert engine.requests[0].body == chat("Hi", stream=True)
            record = json.loads((await ask(app, "GET", "/v1/requests/me-1"))[1])
            assert (record["status"], record["fault"], record["model"]) == (200, None, "m")
            assert 0 <= record["first_byte_ms"] <= record["ttft_ms"] <= record["total_ms"]
            assert record["receipt"]["exact_tokens"] == 64
            assert record["receipt"]["relocated_tokens"] is None  # nobody said 0

    run(test())


def test_a_receipt_of_our_engine_is_split_by_kind():
    async def test():
        async with ScriptedEngine() as engine:
            receipt = {
                "outcome": "backend_materialized_reuse",
                "exact_tokens": 16,
                "reused_tokens": 800,
                "reason": None,
            }
            usage = {"prompt_tokens": 900, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 816}}
            engine.plan(answer_json({"usage": usage, "semblend": receipt}))
            declined = {"outcome": "backend_declined_reuse", "reason": "stale", "exact_tokens": 0, "reused_tokens": 0}
            engine.plan(answer_json({"usage": usage, "semblend": declined}))
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            found = []
            for name in "ab":
                await ask(app, "POST", CHAT, body=chat("Hi"), headers={"X-Request-ID": name})
                found.append(json.loads((await ask(app, "GET", f"/v1/requests/{name}"))[1])["receipt"])
            assert (found[0]["exact_tokens"], found[0]["relocated_tokens"]) == (16, 800)
            assert found[0]["is_fallback"] is False
            assert found[1]["rejected"] == "stale"

    run(test())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/org/name", "/v1/embeddings", "/v1/completions"])
def test_the_other_paths_pass_too(path):
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            method = "GET" if "models" in path else "POST"
            client, body = await ask(app, method, path, body=b"" if method == "GET" else b'{"input": "x"}')
            assert (client.status, json.loads(body)) == (200, {"ok": True})
            assert engine.requests[0].target == path

    run(test())


@pytest.mark.parametrize("path", ["/", "/v1/files", "/admin", "/v1/models/../../admin", "/v1/chat/completions/x"])
def test_what_the_proxy_does_not_know_never_reaches_the_engine(path):
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            for method in ("GET", "POST", "DELETE"):
                client, body = await ask(app, method, path, body=b"{}")
                assert client.status == 404
                assert json.loads(body)["error"]["hint"]
            assert not engine.requests

    run(test())


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b'{"messages": 7}', b"[" * 5000, b'{"prompt": [1, -1]}'])
def test_a_body_that_cannot_be_read_is_the_engines_to_refuse(body):
    async def test():
        async with fleet(2) as (app, engines):
            client, _ = await ask(app, "POST", CHAT, body=body)
            assert client.status == 200
            assert [one.body for engine in engines for one in engine.requests] == [body]

    run(test())


@pytest.mark.parametrize(
    ("plan", "status", "kind"),
    [
        (die_after(), 502, "closed_early"),
        (send_raw(b"nonsense\r\n\r\n"), 502, "garbage"),
        (hang(), 504, "no_answer"),
    ],
)
def test_an_engine_that_fails_gives_an_error_in_openais_shape(plan, status, kind):
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(plan)
            timeout_s = 0.2 if kind == "no_answer" else 60
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False, timeout_s=timeout_s))
            client, body = await ask(app, "POST", CHAT, body=chat("Hi"))
            assert client.status == status
            assert json.loads(body)["error"]["code"] == kind
            assert f'semantickv_faults_total{{kind="{kind}"}} 1.0' in app.metrics.write().decode()
            assert app.intake.running == app.intake.held_bytes == 0

    run(test())


def test_a_client_that_leaves_is_counted_as_such_and_the_engine_is_not_blamed():
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(*[hang() for _ in range(5)])
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            for _ in range(5):
                async with AsgiClient(app, "POST", CHAT, body=chat("Hi")) as client:
                    await engine.arrived.wait()
                    engine.arrived.clear()
                    client.leave()
                    await client.task
            assert 'status="499"} 5.0' in app.metrics.write().decode()
            assert app.router.replicas[0].can_serve
            assert app.router.replicas[0].running == app.router.replicas[0].waiting_tokens == 0
            assert app.intake.running == app.intake.held_bytes == 0

    run(test())


def test_too_many_requests_at_once_are_told_to_come_again():
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(hang())
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False, max_requests=1))
            async with AsgiClient(app, "POST", CHAT, body=chat("Hi")) as first:
                await engine.arrived.wait()
                second, body = await ask(app, "POST", CHAT, body=chat("Hi"))
                assert second.status == 503
                assert second.headers["retry-after"] == "1"
                assert json.loads(body)["error"]["code"] == "overloaded"
                first.leave()
            assert app.intake.refused == 1

    run(test())


def test_a_body_above_the_limit_is_refused_before_it_is_read():
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            client, _ = await ask(app, "POST", CHAT, body=b"x" * ((16 << 20) + 1))
            assert client.status == 413
            assert not engine.requests
            assert app.intake.held_bytes == 0

    run(test())


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_trace_holds_no_text_and_can_be_replayed(tmp_path):
    async def test():
        async with ScriptedEngine() as engine:
            engine.default = stream(*EVENTS)
            app = proxy_with_traces(engine.url, tmp_path / "t.jsonl", key="k")
            headers = {"X-Session-ID": "my-session", "X-Tenant-ID": "my-tenant"}
            for _ in range(2):
                await ask(app, "POST", CHAT, body=chat("Be brief.", "CONTEXT: " + DOCUMENT), headers=headers)
            latest = json.loads((await ask(app, "GET", "/v1/traces/latest"))[1])["requests"]
            app.settle()
            app.trace_log.close()
        text = (tmp_path / "t.jsonl").read_text()
        assert (tmp_path / "t.jsonl").stat().st_mode & 0o077 == 0
        assert not any(word in text for word in ("Clause", "brief", "my-session", "my-tenant"))
        lines = [json.loads(line) for line in text.splitlines()]
        assert lines == latest
        assert lines[0]["blocks"][0]["semantic_type"] == "system"
        assert lines[0]["blocks"] == lines[1]["blocks"]
        assert lines[0]["observed_prefix_hit_tokens"] == 64
        assert 0 < lines[0]["observed_ttft_ms"] <= lines[0]["observed_total_latency_ms"]
        from semantickv.traces.trace import Trace

        assert len(Trace.read(tmp_path / "t.jsonl").starts) - 1 == 2

    run(test())


def test_a_session_that_the_body_names_is_in_the_trace_of_the_proxy_too(tmp_path):
    async def test():
        async with ScriptedEngine() as engine:
            app = proxy_with_traces(engine.url, tmp_path / "t.jsonl", key="k")
            for more, headers in (({"session_id": "s"}, {}), ({}, {"X-Session-ID": "s"}), ({}, {})):
                await ask(app, "POST", CHAT, body=chat("Hi", **more), headers=headers)
            app.settle()
            app.trace_log.close()
        named, header, without = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
        assert named["session_id"] == header["session_id"]
        assert "session_id" not in without

    run(test())


def test_text_is_kept_only_on_request(tmp_path):
    async def test():
        async with ScriptedEngine() as engine:
            app = proxy_with_traces(engine.url, tmp_path / "t.jsonl", redact=False)
            await ask(app, "POST", CHAT, body=chat("What is a clause?"))
            app.settle()
            app.trace_log.close()
        assert "What is a clause?" in (tmp_path / "t.jsonl").read_text()

    run(test())


def test_a_request_that_failed_leaves_no_trace_and_holds_nobody_up(tmp_path):
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(
                answer_json({"error": {}}, status=400), send_raw(b"nonsense\r\n\r\n"), answer_json({"ok": True})
            )
            app = proxy_with_traces(engine.url, tmp_path / "t.jsonl")
            for _ in range(3):
                await ask(app, "POST", CHAT, body=chat("Hi"))
            app.settle()
            app.trace_log.close()
        assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 1

    run(test())


def test_a_trace_worker_that_dies_costs_traces_and_no_answer(tmp_path):
    class Dying(Inline):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(MemoryError())
            return future

    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            app.trace_log = TraceLog(TraceOptions(str(tmp_path / "t.jsonl")), Dying())
            client, _ = await ask(app, "POST", CHAT, body=chat("Hi"))
            assert client.status == 200
            app.settle()
            assert app.trace_log.dropped == 1
            assert 'semantickv_traces_total{result="dropped"} 1.0' in app.metrics.write().decode()

    run(test())


def test_a_body_that_cannot_be_cut_costs_its_own_trace_and_nobody_elses(tmp_path):
    bodies = [chat("first"), chat("x", model="\ud800"), b"[" * 50_000, b'{"messages": [{"role": [], "content": {}}]}',
              b'{"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}', chat("last")]  # fmt: skip
    log = TraceLog(TraceOptions(str(tmp_path / "t.jsonl")), executor := Inline())
    for body in bodies:
        log.submit(log.take_ticket(), TraceJob(body, 0.0, 1.0, None, "", "", {}, {}))
    assert (log.written, log.unread, log.dropped) == (4, 2, 0)
    assert log._executor is executor
    log.close()
    assert len((tmp_path / "t.jsonl").read_text("utf-8").splitlines()) == 4


def test_a_worker_that_takes_over_writes_at_once_and_does_not_wait_for_what_is_lost(tmp_path, monkeypatch):
    broken: Future[Any] = Future()
    broken.set_exception(BrokenExecutor())
    path, job = tmp_path / "t.jsonl", TraceJob(chat("Hi"), 0.0, 1.0, None, "", "", {}, {})
    log = TraceLog(TraceOptions(str(path)), executor := Inline())
    early, lost, late = (log.take_ticket() for _ in range(3))
    with monkeypatch.context() as patch:
        patch.setattr(executor, "submit", lambda *_: broken)
        log.submit(lost, job)
    trace_log._WORKERS.clear()  # a worker's memory goes with its process
    log.submit(late, job)
    assert not path.read_text("utf-8"), "an earlier request is under way: lines stand in order of arrival"
    log.submit(early, job)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["request_id"] for line in lines] == ["r00000000", "r00000002"]
    assert (log.written, log.dropped) == (2, 1)
    log.close()


# -- the router --------------------------------------------------------------------------------------------------------


def test_a_document_goes_where_it_was_seen_although_other_text_stands_before_it():
    async def test():
        async with fleet(4) as (app, _):
            first, _ = await ask(app, "POST", CHAT, body=chat("Review this lease.", DOCUMENT))
            assert first.headers["x-semantic-route"] == "cold_fallback"
            for n in range(3):
                ask_again = chat(f"Another instruction, number {n}, of another length.", f"Q{n}. {DOCUMENT}")
                again, _ = await ask(app, "POST", CHAT, body=ask_again)
                assert again.headers["x-replica-id"] == first.headers["x-replica-id"]
                assert again.headers["x-semantic-route"] == "semantic_placement"
                assert float(again.headers["x-semantic-score"]) > 0.8

    run(test())


@pytest.mark.parametrize(
    "refusal", [answer_json({"error": {}}, status=400), answer_json({"error": {}}, status=429), die_after()]
)
def test_what_an_engine_refused_is_not_taken_to_be_there(refusal):
    async def test():
        async with fleet(2) as (app, engines):
            for engine in engines:
                engine.default = refusal
            await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT))
            assert all(one.memory.tokens == 0 for one in app.router.replicas)
            assert json.loads((await ask(app, "GET", "/v1/fleet"))[1])["documents"] == []
            for engine in engines:
                engine.default = answer_json({"ok": True})
            cold, _ = await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT))
            assert (cold.status, cold.headers["x-semantic-score"]) == (200, "0.0000")

    run(test())


def test_a_refusal_takes_nothing_away_that_was_there_before():
    async def test():
        async with fleet(2) as (app, engines):
            first, _ = await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT))
            home = int(first.headers["x-replica-id"].removeprefix("r"))
            engines[home].plan(answer_json({"error": {}}, status=400))
            refused, _ = await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT, "Why?"))
            assert refused.status == 400
            again, _ = await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT))
            assert (again.headers["x-replica-id"], again.headers["x-semantic-score"]) == (f"r{home}", "1.0000")

    run(test())


def test_the_same_beginning_is_an_exact_prefix_route():
    async def test():
        async with fleet(3) as (app, _):
            first, _ = await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT))
            again, _ = await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT, "And why?"))
            assert again.headers["x-semantic-placement"] == "exact_prefix_route"
            assert again.headers["x-semantickv-replica"] == first.headers["x-semantickv-replica"]

    run(test())


def test_engines_that_reuse_prefixes_only_are_not_sent_moved_passages_for_nothing():
    async def test():
        async with fleet(3, engine_reuse="prefix") as (app, _):
            await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT))
            again, _ = await ask(app, "POST", CHAT, body=chat("Another beginning.", DOCUMENT))
            assert again.headers["x-semantic-route"] == "cold_fallback"

    run(test())


@pytest.mark.parametrize(
    "plan", [die_after(), send_raw(b"nonsense\r\n\r\n"), answer_json({"error": "full"}, status=503)]
)
def test_before_the_first_byte_another_replica_is_asked(plan):
    async def test():
        async with fleet(2, policy="round_robin") as (app, engines):
            engines[0].plan(plan)
            engines[1].plan(plan)
            engines[1].plan(plan)
            seen = [await ask(app, "POST", CHAT, body=chat("Hi")) for _ in range(1)]
            # Both fail once: the last one's answer, or error, is the client's.
            assert seen[0][0].status in (502, 503)
            client, _ = await ask(app, "POST", CHAT, body=chat("Hi"), headers={"X-Request-ID": "x"})
            assert client.status == 200
            assert all(len(engine.requests) >= 1 for engine in engines)
            assert all(replica.running == 0 for replica in app.router.replicas)

    run(test())


def test_a_replica_that_is_gone_costs_no_request_and_is_left_alone_after_three_faults():
    async def test():
        async with fleet(2, policy="round_robin") as (app, engines):
            await engines[0].stop()
            for _ in range(10):
                client, body = await ask(app, "POST", CHAT, body=chat("Hi"))
                assert (client.status, json.loads(body)) == (200, {"served_by": 1})
            dead = app.router.replicas[0]
            assert dead.faults["refused"] == 3
            assert dead.breaker.state.value == "open"
            assert "semantickv_retries_total 3.0" in app.metrics.write().decode()

    run(test())


def test_in_mid_answer_nothing_is_sent_again():
    async def test():
        async with fleet(2) as (app, engines):
            for engine in engines:
                engine.plan(die_after(b"data: 1\n\n"))
            client, body = await ask(app, "POST", CHAT, body=chat("Hi"))
            assert (client.status, body, client.is_whole) == (200, b"data: 1\n\n", False)
            assert sum(len(engine.requests) for engine in engines) == 1

    run(test())


def test_when_all_replicas_are_gone_the_client_is_told_so():
    async def test():
        async with fleet(2) as (app, engines):
            for engine in engines:
                await engine.stop()
            client, _ = await ask(app, "POST", CHAT, body=chat("Hi"))
            assert client.status == 502
            for _ in range(3):
                await ask(app, "POST", CHAT, body=chat("Hi"))
            client, body = await ask(app, "POST", CHAT, body=chat("Hi"))
            assert (client.status, json.loads(body)["error"]["code"]) == (503, "no_replica")
            assert (await ask(app, "GET", "/health"))[0].status == 503

    run(test())


def test_a_session_stays_with_its_replica():
    async def test():
        async with fleet(4, policy="round_robin") as (app, _):
            homes = {
                (await ask(app, "POST", CHAT, body=chat(f"Turn {n}"), headers={"X-Session-ID": "s"}))[0].headers[
                    "x-replica-id"
                ]
                for n in range(8)
            }
            assert len(homes) == 1

    run(test())


def test_the_replicas_page_shows_load_and_health_to_the_operator():
    async def test():
        async with fleet(2) as (app, engines):
            await ask(app, "POST", CHAT, body=chat("Hi"))
            page = json.loads((await ask(app, "GET", "/v1/replicas"))[1])
            assert page["policy"] == "semantic_locality"
            assert [one["url"] for one in page["replicas"]] == [engine.url for engine in engines]
            assert sum(one["served"] for one in page["replicas"]) == 1

    run(test())


# -- tenants -----------------------------------------------------------------------------------------------------------


def test_a_tenant_learns_nothing_of_what_another_one_sent():
    async def test():
        async with fleet(4) as (app, _):
            alice, eve = {"Authorization": "Bearer a"}, {"Authorization": "Bearer e"}
            await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT), headers=alice | {"X-Request-ID": "r"})
            mine, _ = await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT), headers=alice)
            assert mine.headers["x-semantic-route"] == "exact_prefix_route"
            theirs, _ = await ask(app, "POST", CHAT, body=chat("Be brief.", DOCUMENT), headers=eve)
            assert theirs.headers["x-semantic-route"] == "cold_fallback"
            assert float(theirs.headers["x-semantic-score"]) == 0.0
            assert (await ask(app, "GET", "/v1/requests/r", headers=eve))[0].status == 404
            assert (await ask(app, "GET", "/v1/requests/r", headers=alice))[0].status == 200

    run(test())


def test_a_tenant_header_neither_joins_nor_parts_anyone_and_does_not_reach_the_engine():
    async def test():
        async with fleet(4) as (app, engines):
            for tenant in ("acme", "other"):
                client, _ = await ask(
                    app, "POST", CHAT, body=chat("Be brief.", DOCUMENT), headers={"X-Tenant-ID": tenant}
                )
            assert client.headers["x-semantic-route"] == "exact_prefix_route"
            assert not any("x-tenant-id" in one.headers for engine in engines for one in engine.requests)

    run(test())


def test_a_caller_that_names_itself_twice_reaches_neither_an_engine_nor_a_record():
    """The router goes by the first key; an engine could go by the last."""

    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False, salt_secret="s"))
            twice = {"Authorization": "Bearer a", "authorization": "Bearer b"}  # two names here, one on the wire
            client, body = await ask(app, "POST", CHAT, body=chat("Hi"), headers=twice)
            assert (client.status, json.loads(body)["error"]["code"]) == (400, "repeated_header")
            client, _ = await ask(app, "GET", "/v1/requests/x", headers=twice)
            assert client.status == 400
            assert not engine.requests

    run(test())


def test_salts_are_set_by_the_server_one_for_each_key():
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False, salt_secret="s"))
            for key, salt in (("a", None), ("a", None), ("b", None), ("b", "guess")):
                more = {} if salt is None else {"cache_salt": salt}
                headers = {"Authorization": f"Bearer {key}"}
                await ask(app, "POST", CHAT, body=chat("Hi", **more), headers=headers)
            salts = [json.loads(one.body)["cache_salt"] for one in engine.requests]
            assert salts[0] == salts[1]
            assert len(set(salts)) == 3
            assert "guess" not in salts
            assert [one.headers["x-tenant-id"] for one in engine.requests] == salts

    run(test())


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"prompt": "' + b"x" * (4 << 20) + b'"}', b'{"a": ' + b"[1]," * 9000])
def test_a_body_in_which_no_salt_can_be_set_does_not_reach_the_engine(body):
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False, salt_secret="s"))
            client, _ = await ask(app, "POST", CHAT, body=body)
            assert client.status == 400
            assert not engine.requests
            assert app.intake.running == app.intake.held_bytes == 0

    run(test())


def test_a_second_salt_in_a_body_is_no_way_around_ours():
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False, salt_secret="s"))
            await ask(app, "POST", CHAT, body=b'{"cache_salt": "a", "messages": [], "cache_salt": "b"}')
            assert engine.requests[0].body.count(b"cache_salt") == 1
            assert b'"b"' not in engine.requests[0].body

    run(test())


@pytest.mark.parametrize("path", ["/metrics", "/v1/replicas", "/v1/traces/latest"])
def test_what_tells_about_all_tenants_is_for_the_operator_alone(path):
    async def test():
        async with fleet(1) as (app, _):
            assert (await ask(app, "GET", path))[0].status == 200
            assert (await ask(app, "GET", path, peer="10.0.0.7"))[0].status == 403
        async with fleet(1, admin_key="secret") as (app, _):
            assert (await ask(app, "GET", path))[0].status == 403
            headers = {"Authorization": "Bearer secret"}
            assert (await ask(app, "GET", path, peer="10.0.0.7", headers=headers))[0].status == 200

    run(test())


@pytest.mark.parametrize(
    "settings",
    [
        EdgeSettings(),
        EdgeSettings(replicas=("http://a:1", "http://a:1")),
        EdgeSettings(replicas=("http://a:1",), policy="best"),
        EdgeSettings(replicas=("http://a:1",), engine_reuse="all"),
    ],
)
def test_a_wrong_setting_is_an_error_with_a_hint(settings):
    with pytest.raises(ConfigError) as caught:
        build_router(settings)
    assert caught.value.hint


def test_the_guide_lists_every_metric_and_every_header_that_clients_see():
    guides = Path(__file__).parents[3] / "docs" / "guides"
    proxy, router = ((guides / name).read_text("utf-8") for name in ("proxy.md", "router.md"))
    assert all(f"| `{spec.name}` |" in proxy and spec.help in proxy for spec in EDGE_METRICS)

    async def test():
        async with fleet(2) as (app, _):
            client, _ = await ask(app, "POST", CHAT, body=chat("Hi"))
            ours = set(client.headers) - {"content-type", "content-length", "x-request-id"}
            assert ours
            assert all(f"`{name}`" in router for name in ours)

    run(test())
