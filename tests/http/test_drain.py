"""The end of a server: what runs may end, what is new is refused, and no answer is cut without a word."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")
pytest.importorskip("uvicorn", reason="a real socket needs uvicorn")

from live_server import LiveServer, post_bytes, read_to_end, run_server, wait_until
from uvicorn.config import Config
from uvicorn.server import ServerState

from semblend.config import SemBlendConfig
from semblend.facade import SemBlend
from semblend.http import server as listener
from semblend.http.connections import Connections, Deadlines, Phase
from semblend.http.protocol import GuardedProtocol
from tests.fakes.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"


def held_engine() -> FakeEngine:
    """An engine that reads prompts and says nothing until it is released."""
    fake = FakeEngine(SemBlend(SemBlendConfig(embedder="none")))
    fake.hold.clear()
    return fake


def release(server: LiveServer, fake: FakeEngine) -> None:
    loop = server.server._loop
    assert loop is not None
    loop.call_soon_threadsafe(fake.hold.set)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "The ferry leaves pier four at nine. When?"}], **more}


def ask(server: LiveServer, fake: FakeEngine, **more: Any) -> socket.socket:
    """A request that the engine has begun with."""
    before = len(fake.running)
    wire = server.connect()
    wire.sendall(post_bytes(CHAT, chat(**more)))
    wait_until(lambda: len(fake.running) > before)
    return wire


def read_error(answer: bytes) -> dict[str, Any]:
    """The error of an answer that is one: by its status, or by the last event before the end of its stream."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 200"):
        assert body.count(b"data: [DONE]") == 1
        body = body[: body.index(b"data: [DONE]")].rpartition(b"data: ")[2]
    error: dict[str, Any] = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["error"]
    return error


def test_requests_that_run_are_answered_in_full_while_the_server_drains():
    fake = held_engine()
    with run_server(fake) as server:
        whole, streamed = ask(server, fake), ask(server, fake, stream=True)
        server.server.stop()
        wait_until(lambda: server.app.state.drain.has_begun)
        release(server, fake)
        assert b'"finish_reason":"stop"' in read_to_end(whole)
        answer = read_to_end(streamed)
        assert b"data: [DONE]" in answer
        assert b'"error"' not in answer
        server.thread.join(300)
        assert not server.thread.is_alive()


def test_while_the_server_drains_nobody_new_gets_in():
    fake = held_engine()
    with run_server(fake) as server:
        busy, silent, idle = ask(server, fake), server.connect(), server.connect()
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: server.server.connections.count(Phase.IDLE) == 1)
        wait_until(lambda: len(server.server.connections) == 3)
        server.server.stop()
        assert read_to_end(silent) == b""
        assert b"200 OK" in read_to_end(idle)
        with pytest.raises(ConnectionError):
            server.connect()
        release(server, fake)
        assert b"200 OK" in read_to_end(busy)


def test_a_request_that_arrives_behind_another_one_while_the_server_drains_gets_no_answer_but_a_close():
    fake = held_engine()
    with run_server(fake) as server:
        wire = ask(server, fake)
        server.server.stop()
        wait_until(lambda: server.app.state.drain.has_begun)
        wire.sendall(post_bytes(CHAT, chat()))
        release(server, fake)
        assert read_to_end(wire).count(b'"finish_reason":"stop"') == 1


@pytest.mark.parametrize("stops", [1, 2], ids=["the drain is over", "a second signal"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_still_runs_at_the_end_is_told_so_and_gives_back_its_place(stops, stream):
    fake = held_engine()
    with run_server(fake, drain_s=0.2 if stops == 1 else 600, max_running=1) as server:
        running = ask(server, fake, stream=stream)
        in_line = server.connect()
        in_line.sendall(post_bytes(CHAT, chat(stream=stream)))
        wait_until(lambda: server.app.state.service.admission.waiting == 1)
        for _ in range(stops):
            server.server.stop()
        for wire in (running, in_line):
            answer = read_to_end(wire)
            assert read_error(answer)["code"] == "shutting_down"
            wire.close()
        server.thread.join(300)
        assert not server.thread.is_alive()
        gate = server.app.state.service.admission
        assert (gate.running, gate.waiting, len(fake.running)) == (0, 0, 0)


def test_a_stream_that_has_begun_ends_with_an_error_event_and_done():
    fake = FakeEngine(SemBlend(SemBlendConfig(embedder="none")))
    fake.pace = type(fake.pace)(token_s=0.05)
    with run_server(fake, drain_s=0.1) as server, server.connect() as wire:
        wire.sendall(post_bytes(CHAT, chat(stream=True, ignore_eos=True, max_tokens=2000)))
        first = wire.recv(65536)
        while b'"content"' not in first:
            first += wire.recv(65536)
        server.server.stop()
        answer = first + read_to_end(wire)
        assert read_error(answer)["code"] == "shutting_down"
        assert answer.endswith(b"0\r\n\r\n")  # the last chunk: the client knows that nothing is missing


def test_an_upload_that_does_not_end_is_refused_when_the_drain_is_over():
    with run_server(held_engine(), drain_s=0.2) as server, server.connect() as wire:
        wire.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf".encode())
        wait_until(lambda: server.server.connections.count(Phase.BODY) == 1)
        server.server.stop()
        answer = read_to_end(wire)
        assert b" 503 " in answer
        assert b"Retry-After" in answer or b"retry-after" in answer
        assert read_error(answer)["code"] == "shutting_down"


def test_a_client_that_does_not_read_cannot_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(listener, "LAST_WORDS_S", 0.3)
    fake = FakeEngine(SemBlend(SemBlendConfig(embedder="none")))

    async def flood(request):  # type: ignore[no-untyped-def]
        from semblend.wire.answer import Chunk

        fake.running.add(request.request_id)
        while True:
            yield Chunk(text="x" * 100_000, token_ids=(1,))

    fake.submit = flood  # type: ignore[method-assign]
    with run_server(fake, drain_s=0.1) as server, server.connect() as wire:
        wire.sendall(post_bytes(CHAT, chat(stream=True)))
        wait_until(lambda: any(one.flow and one.flow.write_paused for one in server.server.connections.list_all()))
        server.server.stop()
        server.thread.join(300)
        assert not server.thread.is_alive()


def test_a_server_that_serves_nobody_ends_at_once():
    with run_server(held_engine(), drain_s=600) as server:
        server.server.stop()
        server.thread.join(300)
        assert not server.thread.is_alive()


def test_many_streams_under_way_all_end_whole():
    fake = held_engine()
    with run_server(fake, max_running=8, max_waiting=64, drain_s=0.3) as server:
        wires = [server.connect() for _ in range(40)]
        for wire in wires:
            wire.sendall(post_bytes(CHAT, chat(stream=True)))
        gate = server.app.state.service.admission
        wait_until(lambda: gate.running == 8 and gate.waiting == 32)
        server.server.stop()
        ends: list[dict[str, Any]] = []
        readers = [threading.Thread(target=lambda w=wire: ends.append(read_error(read_to_end(w)))) for wire in wires]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(300)
        assert [end["code"] for end in ends] == ["shutting_down"] * 40
        for wire in wires:
            wire.close()


def test_a_connection_that_is_not_made_yet_when_the_server_ends_is_closed_as_soon_as_it_is():
    class Wire(asyncio.Transport):
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    async def end() -> bool:
        settings = Config(lambda: None, lifespan="off", ws="none", log_config=None)
        settings.load()
        books, wire = Connections(limit=4), Wire()
        protocol = GuardedProtocol(settings, ServerState(), books, Deadlines(1.0, 1.0, 1.0))
        books.enter(protocol, Phase.HEADER)
        for connection in books.list_all():
            connection.shutdown()
        protocol.connection_made(wire)
        return wire.aborted

    assert asyncio.run(end())


SIGNALLED_AT_START = """
import os, signal
from semblend.http.server import HttpServer, listen

async def app(scope, receive, send):
    assert (await receive())["type"] == "lifespan.startup"
    os.kill(os.getpid(), signal.SIGINT)
    await send({"type": "lifespan.startup.complete"})
    assert (await receive())["type"] == "lifespan.shutdown"
    print("told of the end")
    await send({"type": "lifespan.shutdown.complete"})

server = HttpServer(app, listen("127.0.0.1", 0))
print(server.run().name, server.started.is_set())
"""


def test_a_signal_while_the_application_starts_ends_it_as_any_other() -> None:
    ended = subprocess.run([sys.executable, "-c", SIGNALLED_AT_START], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split("\n")[:2] == ["told of the end", "SIGINT True"]


def test_a_signal_before_the_server_listens_to_signals_is_an_interrupt() -> None:
    code = SIGNALLED_AT_START.partition("async def app")[0] + (
        "class Early(HttpServer):\n"
        "    async def _run(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        await __import__('asyncio').sleep(60)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs begin without it
        "try:\n"
        "    print('ended', Early(None, listen('127.0.0.1', 0)).run())\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")
