"""The applications behind uvicorn on a real socket: real clients, real disconnects, a real end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from edge_servers import PATIENCE_S, EngineThread, serve
from ports import closed_ports, find_port

from semantickv.apps.build import build_proxy, build_router
from semantickv.settings import EdgeSettings
from tests.fakes.scripted_engine import answer_json, die_after, hang, stream

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_a_stream_over_real_sockets_is_byte_for_byte_the_engines():
    pieces = [f"data: {n}\n\n".encode() * (n % 7 + 1) for n in range(50)]
    with EngineThread(stream(*pieces)) as engine:
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
        with serve(app) as (url, _), httpx.stream("POST", url + CHAT, json=BODY, timeout=PATIENCE_S) as answer:
            assert b"".join(answer.iter_raw()) == b"".join(pieces)
            assert answer.headers["content-type"] == "text/event-stream"


def test_a_client_that_hangs_up_stops_the_engine():
    thread = EngineThread(hang(b"data: 1\n\n"))
    with thread as engine:
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
        with serve(app) as (url, _):
            with httpx.stream("POST", url + CHAT, json=BODY, timeout=PATIENCE_S) as answer:
                next(answer.iter_raw())
            thread.run(asyncio.wait_for(engine.left.wait(), PATIENCE_S))


def test_a_client_sees_that_an_answer_was_cut():
    with EngineThread(die_after(b"data: 1\n\n")) as engine:
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
        with serve(app) as (url, _), pytest.raises(httpx.RemoteProtocolError):
            httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S)


def test_requests_that_run_when_the_server_is_stopped_are_answered():
    thread = EngineThread()
    with thread as engine:
        gate = asyncio.Event()
        engine.plan(stream(b"data: 1\n\n", b"data: 2\n\n", gate=gate))
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
        with serve(app) as (url, server), httpx.stream("POST", url + CHAT, json=BODY, timeout=PATIENCE_S) as answer:
            parts = answer.iter_raw()
            got = next(parts)
            server.should_exit = True
            thread.loop.call_soon_threadsafe(gate.set)
            assert got + b"".join(parts) == b"data: 1\n\ndata: 2\n\n"


def test_the_router_serves_real_clients_and_its_headers_say_where():
    with EngineThread(default=answer_json({"by": 0})) as one, EngineThread(default=answer_json({"by": 1})) as two:
        app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False))
        with serve(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            answers = [client.post(CHAT, json=BODY) for _ in range(4)]
            assert all(f"r{answer.json()['by']}" == answer.headers["x-replica-id"] for answer in answers)
            wait_for_up(client, 2)
            assert client.get("/v1/replicas").json()["replicas"][0]["up"]
            assert "semantickv_requests_total" in client.get("/metrics").text


@pytest.fixture
def refusing():
    """Addresses that refuse every connection."""
    with closed_ports(4) as ports:
        yield tuple(f"http://127.0.0.1:{port}" for port in ports)


def test_replicas_that_refuse_connections_are_not_called_up_before_the_second_check(refusing):
    app = build_router(EdgeSettings(replicas=refusing, trace=False, health_s=600))
    with serve(app) as (url, _):
        answer = httpx.get(url + "/health", timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["replicas_up"]) == (503, 0)


def test_replicas_that_refuse_connections_are_never_called_up(refusing):
    app = build_router(EdgeSettings(replicas=refusing, trace=False, health_s=0.05))
    with serve(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        for _ in range(PATIENCE_S * 100):  # from the first moment until the checks are sure
            answer = client.get("/health")
            found = answer.json()
            assert (answer.status_code, found["status"], found["replicas_up"]) == (503, "no replica", 0)
            assert 'semantickv_replica_up{replica="r0"} 0.0' in client.get("/metrics").text
            assert not any(one["up"] for one in client.get("/v1/replicas").json()["replicas"])
            if found["replicas_down"] == 4:
                break
            assert found["replicas_down"] + found["replicas_unknown"] == 4
        assert found["replicas_down"] == 4


def wait_for_up(client: httpx.Client, count: int) -> dict[str, Any]:
    for _ in range(PATIENCE_S * 100):
        found = client.get("/health").json()
        if found["replicas_up"] == count:
            return found
        threading.Event().wait(0.01)
    raise AssertionError(found)


def test_a_router_is_ready_once_one_replica_has_answered(refusing):
    with EngineThread() as engine:
        app = build_router(EdgeSettings(replicas=(engine.url, refusing[0]), trace=False, health_s=600))
        with serve(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            assert wait_for_up(client, 1) == {
                "status": "ok",
                "replicas_up": 1,
                "replicas_unknown": 1,  # a second check would make it down
                "replicas_down": 0,
            }


def test_the_proxy_is_not_ready_while_its_engine_refuses_and_still_tries_it(refusing):
    with EngineThread() as engine:
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False, health_s=0.05))
        with serve(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            wait_for_up(client, 1)
    app = build_proxy(EdgeSettings(upstream=refusing[0], trace=False, health_s=0.05))
    with serve(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        for _ in range(PATIENCE_S * 100):
            found = client.get("/health")
            if found.json()["replicas_down"]:
                break
            threading.Event().wait(0.01)
        assert (found.status_code, found.json()["replicas_down"]) == (503, 1)
        answer = client.post(CHAT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "refused")


ROUTER_GUIDE = (ROOT / "docs" / "guides" / "router.md").read_text("utf-8")


def read_starts(block: str) -> tuple[set[str], str]:
    """The ports of the engines that a block of the guide starts, and its line that starts the router."""
    lines = block.splitlines()
    engines = [line for line in lines if re.search(r"(semblend|vllm) serve ", line)]
    (router,) = [line for line in lines if line.startswith("semantickv router --replicas")]
    return {re.search(r"--port (\d+)", line)[1] for line in engines}, router


def test_the_guide_starts_every_engine_that_it_gives_to_the_router():
    blocks = re.findall(r"```sh\n(.*?)```", ROUTER_GUIDE.partition("## Compare")[0], re.DOTALL)
    starts = [read_starts(block) for block in blocks if "--replicas" in block]
    assert len(starts) == 2
    for ports, router in starts:
        assert ports == set(re.findall(r"127\.0\.0\.1:(\d+)", router)), router
    assert "--engine-reuse prefix" in starts[1][1]  # those are stock engines


def test_the_question_of_the_guide_goes_twice_to_one_embedded_server():
    from live_server import run_server

    from tests.fakes.fake_engine import FakeEngine

    body = json.loads(re.search(r"^BODY='(.*?)'$", ROUTER_GUIDE, re.MULTILINE | re.DOTALL)[1])
    with run_server(FakeEngine()) as one, run_server(FakeEngine()) as two:
        app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False))
        with serve(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            wait_for_up(client, 2)
            body["model"] = client.get("/v1/models").json()["data"][0]["id"]
            first, second = (client.post(CHAT, json=body) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200), first.text
    told = [answer.headers["x-semantic-route"] for answer in (first, second)]
    assert told == re.findall(r"`(?:x-semantic-route: )?(cold_fallback|exact_prefix_route)`", ROUTER_GUIDE)[:2]
    assert first.headers["x-replica-id"] == second.headers["x-replica-id"]


@pytest.mark.slow
def test_the_command_serves_traces_and_ends_with_a_signal(tmp_path):
    with EngineThread() as engine:
        port = find_port()
        command = [sys.executable, "-m", "semantickv", "proxy", "--port", str(port), "--output-dir", str(tmp_path)]
        environ = {**os.environ, "SEMANTICKV_UPSTREAM_BASE_URL": engine.url}
        with subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True) as process:
            url = f"http://127.0.0.1:{port}"
            for _ in range(PATIENCE_S * 20):
                try:
                    httpx.get(url + "/health", timeout=PATIENCE_S)
                    break
                except httpx.TransportError:
                    threading.Event().wait(0.05)
            assert httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S).json() == {"ok": True}
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (0, -signal.SIGTERM), err
        assert "Traceback" not in err
    lines = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert [line["blocks"][0]["semantic_type"] for line in lines] == ["user"]


@pytest.mark.slow
def test_an_application_without_its_settings_says_what_is_missing():
    command = [sys.executable, "-m", "uvicorn", "semantickv.apps.locality_router:app", "--port", "0"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SEMANTICKV_")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "SEMANTICKV_REPLICAS" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_receipts_of_our_own_server_come_back_as_one_record():
    from live_server import run_server

    from semblend import SemBlend, SemBlendConfig
    from tests.fakes.fake_engine import FakeEngine

    document = " ".join(f"clause{n}" for n in range(400))

    def ask(client: httpx.Client, name: str, text: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "stream": name == "stream"}
        body |= {"stream_options": {"include_usage": True}} if name == "stream" else {}
        assert client.post(CHAT, json=body, headers={"X-Request-ID": name}).status_code == 200
        return client.get(f"/v1/requests/{name}").json()["receipt"]

    with SemBlend(SemBlendConfig(embedder="none")) as library, run_server(FakeEngine(library)) as live:
        app = build_proxy(EdgeSettings(upstream=live.url, trace=False))
        with serve(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            cold = ask(client, "cold", f"Read this. {document}")
            moved = ask(client, "stream", f"Another instruction, somewhat longer. {document}")
    assert cold["is_fallback"] is True
    assert cold["relocated_tokens"] == 0
    assert moved["outcome"] == "backend_materialized_reuse"
    assert moved["relocated_tokens"] > 300
    assert moved["prompt_tokens"] > 400
