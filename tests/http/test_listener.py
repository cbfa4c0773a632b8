"""A real server and clients that do not behave: silent, slow, greedy, ambiguous, deaf."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")
pytest.importorskip("uvicorn", reason="a real socket needs uvicorn")
httpx = pytest.importorskip("httpx", reason="the tests need httpx")

from live_server import post_bytes, read_to_end, run_server, wait_until  # noqa: E402

from semblend.config import SemBlendConfig  # noqa: E402
from semblend.engine.server.tenants import Tenants  # noqa: E402
from semblend.facade import SemBlend  # noqa: E402
from semblend.http import protocol  # noqa: E402
from semblend.http.connections import Connections, Phase  # noqa: E402
from semblend.http.protocol import MAX_PIPELINED  # noqa: E402
from semblend.http.server import Acceptor  # noqa: E402
from semblend.wire.answer import Chunk  # noqa: E402
from semblend.wire.request import Request  # noqa: E402
from tests.fakes.fake_engine import FakeEngine  # noqa: E402

CHAT = "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def engine() -> FakeEngine:
    return FakeEngine(SemBlend(SemBlendConfig(embedder="none")))


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "The ferry leaves pier four at nine. When?"}], **more}


def read_answer(wire: socket.socket) -> bytes:
    """One whole answer that says how long it is."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += wire.recv(4096)
    head, _, body = got.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-le"))
    while len(body) < length:
        body += wire.recv(4096)
    return head + b"\r\n\r\n" + body


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_a_client_that_says_nothing_is_let_go():
    with run_server(engine(), header_timeout_s=0.2) as server, server.connect() as wire:
        assert read_to_end(wire) == b""


@pytest.mark.parametrize("first", [b"", HEALTH])
def test_a_client_that_drips_its_headers_is_let_go_although_bytes_keep_coming(first):
    drips = threading.Event()

    def drip(wire: socket.socket) -> None:
        for byte in b" HTTP/1.1\r\nX-Slow: " + b"a" * 10_000:
            if drips.wait(0.02):
                return
            try:
                wire.send(bytes([byte]))
            except OSError:
                return

    with run_server(engine(), header_timeout_s=1) as server, server.connect() as wire:
        wire.sendall(first + b"GET /health")
        if first:
            assert b"200 OK" in read_answer(wire)
        dripper = threading.Thread(target=drip, args=(wire,))
        dripper.start()
        try:
            assert read_to_end(wire).startswith(b"HTTP/1.1 408 ")
        finally:
            drips.set()
            dripper.join()


def test_a_connection_serves_one_request_after_another():
    with run_server(engine()) as server, server.connect() as wire:
        for _ in range(3):
            wire.sendall(HEALTH)
            assert b"200 OK" in read_answer(wire)
        assert len(server.server.connections) == 1


def test_a_connection_that_idles_is_closed():
    with run_server(engine(), idle_timeout_s=0.2) as server, server.connect() as wire:
        wire.sendall(HEALTH)
        assert b"200 OK" in read_to_end(wire)


def test_small_writes_leave_at_once():
    with run_server(engine()) as server, server.connect() as wire:
        wire.sendall(HEALTH)
        read_answer(wire)
        (connection,) = server.server.connections.list_all()
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_request_that_is_computed_longer_than_the_other_deadlines_is_answered():
    fake = engine()
    with run_server(fake, header_timeout_s=1, idle_timeout_s=1) as server, server.connect() as wire:
        fake.hold.clear()
        wire.sendall(post_bytes(CHAT, chat()))
        wait_until(lambda: bool(fake.running))
        threading.Event().wait(1.5)
        server.server._loop.call_soon_threadsafe(fake.hold.set)
        assert b"200 OK" in read_answer(wire)


def test_a_body_that_goes_on_after_its_refusal_does_not_keep_the_connection():
    tenants = Tenants({"sk-acme": "acme"})
    with run_server(engine(), header_timeout_s=1, tenants=tenants) as server, server.connect() as wire:
        wire.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n".encode())
        assert b" 401 " in read_answer(wire)
        closed = threading.Event()

        def drip() -> None:
            while not closed.wait(0.02):
                try:
                    wire.send(b"x")
                except OSError:
                    return

        dripper = threading.Thread(target=drip)
        dripper.start()
        try:
            read_to_end(wire)
            wait_until(lambda: len(server.server.connections) == 0)
        finally:
            closed.set()
            dripper.join()


def test_a_large_body_that_is_refused_may_end_and_the_connection_goes_on():
    with run_server(engine(), max_body_bytes=1000) as server, server.connect() as wire:
        wire.sendall(post_bytes(CHAT, chat(user="x" * 100_000)))
        assert b" 413 " in read_answer(wire)
        wire.sendall(HEALTH)
        assert b"200 OK" in read_answer(wire)


def test_a_client_that_closes_after_a_large_body_still_reads_its_refusal():
    with run_server(engine(), max_body_bytes=1000) as server, server.connect() as wire:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 16000000\r\n\r\n"
        wire.sendall(head.encode())
        for _ in range(16):  # more than the buffers of both sides hold: it goes only because the server reads it
            wire.sendall(b"x" * 1_000_000)
        assert b" 413 " in read_to_end(wire)
    with run_server(engine(), max_body_bytes=1000, header_timeout_s=1) as server, server.connect() as wire:
        wire.sendall(head.encode())
        assert b" 413 " in read_to_end(wire)
        wait_until(lambda: len(server.server.connections) == 0)  # although it neither sends the rest nor closes


# -- readers -------------------------------------------------------------------------------------------------------


class Flood(FakeEngine):
    """Talks as fast as it is listened to, for ``chunks`` chunks of 100,000 characters."""

    chunks = 1_000_000

    def __init__(self) -> None:
        super().__init__(SemBlend(SemBlendConfig(embedder="none")))
        self.said_all = threading.Event()

    async def submit(self, request: Request) -> AsyncIterator[Chunk]:
        self.running.add(request.request_id)
        for number in range(self.chunks):
            await asyncio.sleep(0)
            last = number == self.chunks - 1
            yield Chunk(text="x" * 100_000, token_ids=(1,), finish_reason="stop" if last else None)
        self.said_all.set()


def test_a_client_that_does_not_read_its_stream_loses_its_place_long_before_the_request_times_out():
    fake = Flood()
    with run_server(fake, write_timeout_s=0.3) as server, server.connect() as wire:
        wire.sendall(post_bytes(CHAT, chat(stream=True)))
        wait_until(lambda: bool(fake.cancelled))
        wait_until(lambda: server.app.state.service.admission.running == 0)
        wait_until(lambda: len(server.server.connections) == 0)


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
def test_a_client_that_does_not_read_its_whole_answer_is_let_go(headers):
    fake = Flood()
    fake.chunks = 120  # 12 MB: more than the system keeps for us
    with run_server(fake, write_timeout_s=0.3) as server, server.connect() as wire:
        wire.sendall(post_bytes(CHAT, chat(), headers))
        assert fake.said_all.wait(300)
        wait_until(lambda: len(server.server.connections) == 0)


def test_a_client_that_reads_slowly_gets_its_whole_answer():
    fake = Flood()
    fake.chunks = 120
    pause = threading.Event()
    with run_server(fake, write_timeout_s=3) as server, server.connect() as wire:  # all of it takes longer than that
        wire.sendall(post_bytes(CHAT, chat(), "Connection: close\r\n"))
        size = 0
        while part := wire.recv(200_000):
            size += len(part)
            pause.wait(0.06)
        assert size > 12_000_000


# -- room ----------------------------------------------------------------------------------------------------------


def test_at_the_limit_a_newcomer_is_served_and_the_longest_silent_one_goes():
    with run_server(engine(), max_connections=4) as server:
        silent = [server.connect() for _ in range(4)]
        wait_until(lambda: len(server.server.connections) == 4)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert read_to_end(silent[0]) == b""
        assert server.server.connections.evicted == 1
        for wire in silent:
            wire.close()


def test_where_every_connection_waits_for_an_answer_the_next_client_waits_in_line():
    fake = engine()
    with run_server(fake, max_connections=2) as server:
        fake.hold.clear()
        busy = [server.connect() for _ in range(2)]
        for wire in busy:
            wire.sendall(post_bytes(CHAT, chat()))
        wait_until(lambda: server.server.connections.count(Phase.ANSWER) == 2)
        with server.connect() as third:
            third.sendall(HEALTH)
            third.settimeout(0.2)
            with pytest.raises(TimeoutError):
                third.recv(1)
            third.settimeout(120)
            server.server._loop.call_soon_threadsafe(fake.hold.set)
            assert b"200 OK" in read_answer(third)
        for wire in busy:
            assert b"200 OK" in read_answer(wire)
            wire.close()


def test_without_a_descriptor_accepting_pauses_and_goes_on_later():
    class Poor:
        """A listening socket that has no descriptor to give, twice, and then nobody who waits."""

        def __init__(self) -> None:
            self.real = socket.create_server(("127.0.0.1", 0))
            self.refusals = 0

        def accept(self) -> Any:
            self.refusals += 1
            if self.refusals <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    async def test() -> None:
        poor: Any = Poor()
        acceptor = Acceptor(poor, Connections(10), lambda: pytest.fail("nobody was accepted"))
        with socket.create_connection(poor.getsockname()):
            before = asyncio.get_running_loop().time()
            while poor.refusals < 2:
                await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - before >= 0.1  # it does not spin
        acceptor.close()

    asyncio.run(asyncio.wait_for(test(), 300))


SERVE_WITH_FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from semblend import SemBlend, SemBlendConfig
from tests.fakes.fake_engine import FakeEngine
from semblend.engine.server.routes import create_app, listen, serve
app = create_app(FakeEngine(SemBlend(SemBlendConfig(embedder="none"))))
with listen("127.0.0.1", 0) as sock:
    print(sock.getsockname()[1], flush=True)
    serve(app, sock)
"""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this process may not open 1,100 sockets")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_eleven_hundred_silent_sockets_at_1024_descriptors_take_nothing_from_others(many_descriptors, tmp_path):
    errors = tmp_path / "stderr"
    command = [sys.executable, "-c", SERVE_WITH_FEW_DESCRIPTORS]
    with errors.open("wb") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            silent = [socket.create_connection(("127.0.0.1", port), timeout=300) for _ in range(1100)]
            for wire in silent[::2]:
                wire.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
            for _ in range(20):
                answer = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=chat(), timeout=300)
                assert answer.status_code == 200
            silent += [socket.create_connection(("127.0.0.1", port), timeout=300) for _ in range(300)]
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=300).status_code == 200
            for wire in silent:
                wire.close()
        finally:
            server.terminate()
            assert server.wait(300) == 0
    assert errors.stat().st_size < 10_000, errors.read_text()[:2000]


# -- what is not a request -----------------------------------------------------------------------------------------

SMUGGLED = b"GET /flush_cache HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", 400),
        (b"POST /x HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET /x HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 80_000 + b"\r\n\r\n", 431),
        (b"GET /x HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 101 + b"\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
def test_what_two_servers_could_read_differently_is_refused_and_the_connection_closed(sent, status):
    with run_server(engine()) as server, server.connect() as wire:
        wire.sendall(sent + SMUGGLED)
        answer = read_to_end(wire)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert answer.lower().count(b"content-length:") == 1
        assert b'"hint"' in answer


def test_a_body_that_breaks_off_into_nonsense_is_refused_and_its_request_ends(caplog):
    with run_server(engine()) as server, server.connect() as wire:
        wire.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n".encode())
        wait_until(lambda: server.server.connections.count(Phase.BODY) == 1)
        with caplog.at_level(logging.ERROR):
            wire.sendall(b"nonsense\r\n")
            assert b" 400 " in read_to_end(wire)
            wait_until(lambda: len(server.server.connections) == 0)
            wait_until(lambda: not server.app.state.drain.tasks)
    assert not caplog.records


@pytest.fixture
def short_linger(monkeypatch):
    """Whoever goes on sending after the last answer is heard for two seconds, not for five."""
    monkeypatch.setattr(protocol, "LINGER_S", 2.0)


@pytest.mark.parametrize("key", ["sk-acme", "unknown"])
def test_a_body_in_tiny_chunks_is_refused_before_it_costs_anything(key, short_linger):
    tenants = Tenants({"sk-acme": "acme"})
    patient = {"header_timeout_s": 600, "body_timeout_s": 600}  # no deadline ends it before its chunks do
    with run_server(engine(), tenants=tenants, **patient) as server, server.connect() as wire:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
        wire.sendall(head.encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                wire.sendall(b"1\r\n \r\n" * 1000)
        wait_until(lambda: len(server.server.connections) == 0)
        wait_until(lambda: not server.app.state.drain.tasks)


def test_a_body_in_a_few_small_chunks_or_in_many_large_ones_is_read():
    body = json.dumps(chat()).encode() + b" " * 2_000_000
    with run_server(engine()) as server, server.connect() as wire:
        for size in (1 << 14, 1 << 12):
            parts = [body[at : at + size] for at in range(0, len(body), size)]
            parts = [body[:1], body[1:3], *([body[3:size]] if size > 3 else []), *parts[1:]]
            wire.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            wire.sendall(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")
            assert b"200 OK" in read_answer(wire)


def test_a_connection_that_sends_request_upon_request_without_reading_ends_after_some(short_linger):
    with run_server(engine()) as server, server.connect() as wire:
        wire.sendall(HEALTH * 200)
        answers = read_to_end(wire).split(b"HTTP/1.1 200 OK")[1:]
        assert len(answers) == MAX_PIPELINED + 1
        assert [b"connection: close" in answer.lower() for answer in answers] == [False] * MAX_PIPELINED + [True]
        wait_until(lambda: len(server.server.connections) == 0)


def test_a_connection_whose_client_waits_for_each_answer_has_no_end():
    with run_server(engine()) as server, server.connect() as wire:
        for _ in range(3 * MAX_PIPELINED):
            wire.sendall(HEALTH)
            assert b"200 OK" in read_answer(wire)


def test_pipelined_requests_are_answered_in_order():
    with run_server(engine()) as server, server.connect() as wire:
        wire.sendall(HEALTH + HEALTH + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert read_to_end(wire).count(b'"status":"ok"') == 3
