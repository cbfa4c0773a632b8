"""The NATS sink against a small server that speaks the text protocol on the loopback interface."""

from __future__ import annotations

import json
import logging
import queue
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from ports import closed_ports, find_port

from semblend.config import SemBlendConfig
from semblend.confirm import events
from semblend.confirm.events import Event
from semblend.confirm.nats_sink import NatsSink
from semblend.confirm.sinks import open_stream
from semblend.errors import ConfigError, MissingDependencyError

pytest.importorskip("nats")
WAIT_S = 120


class FakeNats:
    """INFO, CONNECT, PING, PONG and PUB; every published message lands in ``published``."""

    def __init__(self, port: int = 0, max_payload: int = 1_048_576) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self.published: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self.connected = threading.Event()
        self._info = {"server_id": "fake", "version": "2.10.0", "proto": 1, "max_payload": max_payload}
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as reader:
                connection.sendall(b"INFO " + json.dumps(self._info).encode() + b"\r\n")
                for line in reader:
                    verb, *arguments = line.split()
                    if verb == b"CONNECT":
                        self.connected.set()
                    elif verb == b"PING":
                        connection.sendall(b"PONG\r\n")
                    elif verb == b"PUB":
                        payload = reader.read(int(arguments[-1]) + 2)[:-2]
                        self.published.put((arguments[0].decode(), payload))
        except OSError:
            return  # the test hung up

    def close(self) -> None:
        for end in (self._listener, *self._sockets):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already
            end.close()
        for thread in self._threads:
            thread.join(WAIT_S)


@pytest.fixture
def server() -> Iterator[FakeNats]:
    fake = FakeNats()
    yield fake
    fake.close()


def numbered(number: int) -> Event:
    return events.error("test", "message", f"r{number}")


def received(server: FakeNats, count: int) -> list[str]:
    return [json.loads(server.published.get(timeout=WAIT_S)[1])["request_id"] for _ in range(count)]


def test_events_arrive_in_order_on_the_subject(server: FakeNats) -> None:
    sink = NatsSink(server.url, "semblend.test")
    event = numbered(0)
    sink.emit(event)
    assert server.published.get(timeout=WAIT_S) == ("semblend.test", event.to_json_line().encode())
    for number in range(1, 101):
        sink.emit(numbered(number))
    assert received(server, 100) == [f"r{number}" for number in range(1, 101)]
    sink.close()
    assert sink.dropped == 0


def test_closing_at_once_still_sends_what_was_queued(server: FakeNats) -> None:
    sink = NatsSink(server.url)
    for number in range(20):
        sink.emit(numbered(number))
    sink.close(timeout_s=WAIT_S)
    assert received(server, 20) == [f"r{number}" for number in range(20)]
    assert sink.dropped == 0


def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    with closed_ports(1) as (port,):
        sink = NatsSink(f"nats://127.0.0.1:{port}", limit=5)
        for number in range(12):
            sink.emit(numbered(number))
        assert sink.dropped == 7
        sink.close()
    assert sink.dropped == 12
    sink.emit(numbered(13))
    assert sink.dropped == 13


def test_a_server_that_comes_late_gets_the_queued_events() -> None:
    port = find_port()
    sink = NatsSink(f"nats://127.0.0.1:{port}")
    sink.emit(numbered(1))
    sink.emit(numbered(2))
    late = FakeNats(port)
    try:
        assert received(late, 2) == ["r1", "r2"]
        sink.close()
        assert sink.dropped == 0
    finally:
        late.close()


def test_a_server_that_restarts_is_found_again() -> None:
    first = FakeNats()
    sink = NatsSink(first.url)
    sink.emit(numbered(1))
    assert received(first, 1) == ["r1"]
    first.close()
    second = FakeNats(first.port)
    try:
        assert second.connected.wait(WAIT_S)
        sink.emit(numbered(2))
        assert "r2" in received(second, 1)
        sink.close()
    finally:
        second.close()


def test_an_event_that_the_server_would_refuse_is_dropped_and_the_next_arrives() -> None:
    small = FakeNats(max_payload=300)
    try:
        sink = NatsSink(small.url)
        sink.emit(events.error("test", "x" * 400, "big"))
        sink.emit(numbered(2))
        assert received(small, 1) == ["r2"]
        sink.close()
        assert sink.dropped == 1
    finally:
        small.close()


def test_an_unreachable_server_is_reported_once_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    with closed_ports(1) as (port,), caplog.at_level(logging.WARNING, logger="semblend"):
        sink = NatsSink(f"nats://user:hunter2@127.0.0.1:{port}")
        sink.emit(numbered(1))
        sink.close(timeout_s=WAIT_S)  # leaves when the first attempt has failed
    messages = [record.getMessage() for record in caplog.records if record.name == "semblend"]
    assert len(messages) == 1
    assert f"127.0.0.1:{port}" in messages[0]
    assert "hunter2" not in caplog.text


def test_a_sink_that_saw_no_event_starts_no_thread(server: FakeNats) -> None:
    before = set(threading.enumerate())
    sink = NatsSink(server.url)
    assert set(threading.enumerate()) <= before
    sink.close()
    assert sink.dropped == 0


@pytest.mark.parametrize("url", ["localhost:4222", "http://localhost", "nats://", ""])
def test_a_wrong_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="NATS URL"):
        NatsSink(url)


@pytest.mark.parametrize("subject", ["", "a b", "a.*", "a.>", "a\r\nPUB b 0"])
def test_a_wrong_subject_is_refused_at_once(subject: str) -> None:
    with pytest.raises(ConfigError, match="subject"):
        NatsSink("nats://localhost", subject)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nats", "nats.aio", "nats.aio.client"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match="nats-py") as refusal:
        NatsSink("nats://localhost")
    assert "semblend-suite[telemetry]" in refusal.value.hint


def test_settings_open_a_nats_sink(server: FakeNats) -> None:
    stream = open_stream(SemBlendConfig(nats_url=server.url, nats_subject="my.subject"))
    stream.emit(numbered(1))
    assert server.published.get(timeout=WAIT_S)[0] == "my.subject"
    stream.close()


def test_a_client_that_breaks_ends_its_thread_and_later_events_are_dropped(
    server: FakeNats, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("cannot happen")

    sink = NatsSink(server.url)
    monkeypatch.setattr(sink._client, "publish", broken)
    monkeypatch.setattr(sink._client, "flush", broken)
    sink.emit(numbered(1))
    sink.close(timeout_s=WAIT_S)
    sink.emit(numbered(2))
    assert sink.dropped == 2
    assert "cannot happen" in caplog.text
