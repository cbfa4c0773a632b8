"""A request goes to an engine and its answer comes back, byte for byte; whatever goes wrong is a value."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_client import AsgiClient, ask
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import closed_ports

from semantickv.apps.proxy import Headers, Place, ProxyApp
from semantickv.edge.headers import select_request_headers, select_response_headers
from semantickv.edge.upstream_call import (
    EngineAddress,
    Fault,
    FaultKind,
    OutgoingRequest,
    Upstream,
    UpstreamAnswer,
)
from semblend.errors import ConfigError
from tests.fakes.scripted_engine import (
    EngineSide,
    ScriptedEngine,
    answer_json,
    die_after,
    hang,
    send_raw,
    stream,
)

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"


class Forwarder(ProxyApp):
    """The smallest application on the core: everything goes to one engine; keeps what became of each request."""

    def __init__(self, url: str, *, timeout_s: float = 60.0, connect_s: float = 5.0, **known: float) -> None:
        super().__init__(max_requests=100, timeout_s=timeout_s)
        self.pool = Upstream(EngineAddress.parse(url), connect_timeout_s=connect_s, **known)
        self.faults: list[Fault | None] = []

    def is_forwarded(self, method: str, path: str) -> bool:
        return True

    def open_call(self, scope: Any, body: bytes, began: float) -> PlainCall:
        target = scope["path"] + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        request = OutgoingRequest(scope["method"], target, select_request_headers(scope["headers"]), body)
        return PlainCall(self, request)


class PlainCall:
    """One request to the one engine: its answer goes to the client as it is, and its fault into ``app.faults``."""

    request_id = ""

    def __init__(self, app: Forwarder, request: OutgoingRequest) -> None:
        self.app, self.request, self.body = app, request, request.body

    def place(self) -> Place:
        return Place(self.app.pool, self.request)

    def take_head(self, answer: UpstreamAnswer) -> Headers:
        return []

    def observe(self, piece: bytes) -> None:
        pass

    def end_attempt(self, fault: Fault | None) -> bool:
        return False

    def end(self, status: int, fault: Fault | None) -> None:
        self.app.faults.append(fault)


def run(test: Any) -> None:
    """Run a test in an event loop that does not wait for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


def test_a_request_reaches_the_engine_as_it_was_sent():
    async def test():
        async with ScriptedEngine() as engine:
            app = Forwarder(engine.url + "/base/")
            headers = {
                "Authorization": "Bearer k",
                "X-Any": "1",
                "Connection": "x-secret",
                "X-Secret": "s",
                "Host": "h",
            }
            client, body = await ask(app, "POST", "/v1/x?a=%20b", body=b'{"a": "\xc3\xa9"}', headers=headers)
        assert (client.status, body) == (200, b'{"ok": true}')
        seen = engine.requests[0]
        assert (seen.method, seen.target, seen.body) == ("POST", "/base/v1/x?a=%20b", b'{"a": "\xc3\xa9"}')
        assert seen.headers["authorization"] == "Bearer k"
        assert seen.headers["x-any"] == "1"
        assert seen.headers["host"] == f"127.0.0.1:{engine.port}"
        assert not {"connection", "x-own"} & set(seen.headers)

    run(test())


def test_a_stream_arrives_piece_by_piece_before_the_engine_has_ended():
    async def test():
        async with ScriptedEngine() as engine:
            gate = asyncio.Event()
            engine.plan(stream(b"data: 1\n\n", b"data: 2\n\n", gate=gate, headers="x-engine: e\r\n"))
            async with AsgiClient(Forwarder(engine.url), "POST", "/v1/x", body=b"{}") as client:
                assert await client.start() == 200
                assert await client.read() == b"data: 1\n\n"
                gate.set()
                assert await client.finish() == b"data: 2\n\n"
                assert client.is_whole
                assert client.headers == {"content-type": "text/event-stream", "x-engine": "e"}

    run(test())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=3000), max_size=12))
def test_whatever_bytes_an_engine_streams_come_out_the_same(pieces):
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(stream(*pieces))
            client, body = await ask(Forwarder(engine.url), "POST", "/v1/x", body=b"{}")
            assert body == b"".join(pieces)
            assert client.is_whole

    run(test())


def test_one_connection_serves_one_request_after_another():
    async def test():
        async with ScriptedEngine() as engine:
            app = Forwarder(engine.url)
            for _ in range(3):
                await ask(app, "GET", "/v1/models")
            assert engine.connections == 1
            assert (app.pool.idle, app.pool.open) == (1, 0)

    run(test())


def test_a_connection_that_idled_too_long_is_not_used_again():
    async def test():
        async with ScriptedEngine() as engine:
            app = Forwarder(engine.url, idle_s=0.05)
            await ask(app, "GET", "/v1/models")
            await asyncio.sleep(0.1)
            await ask(app, "GET", "/v1/models")
            assert engine.connections == 2

    run(test())


def test_a_request_on_a_connection_that_the_engine_just_closed_goes_out_once_more():
    async def test():
        async with ScriptedEngine() as engine:
            app = Forwarder(engine.url)
            await ask(app, "GET", "/v1/models")
            engine.plan(die_after())  # as an engine does whose keep-alive time is over
            client, _ = await ask(app, "POST", "/v1/x", body=b"{}")
            assert client.status == 200
            assert app.faults == [None, None]

    run(test())


def test_a_new_connection_that_dies_is_not_tried_again_on_the_same_engine():
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(die_after())
            app = Forwarder(engine.url)
            await ask(app, "POST", "/v1/x", body=b"{}")
            assert app.faults[0].kind is FaultKind.CLOSED_EARLY
            assert app.faults[0].may_retry
            assert len(engine.requests) == 1

    run(test())


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (send_raw(b"I am no HTTP server\r\n\r\n"), FaultKind.GARBAGE),
        (send_raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, close=False), FaultKind.GARBAGE),
        (send_raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"), FaultKind.GARBAGE),
        (send_raw(CHUNKED + b"zz\r\n"), FaultKind.GARBAGE),
        (send_raw(b"HTTP/1.1 200"), FaultKind.CLOSED_EARLY),
        (hang(), FaultKind.NO_ANSWER),
    ],
    ids=["no HTTP", "endless headers", "an upgrade", "garbage behind the head", "half a head", "silence"],
)
def test_what_is_no_answer_is_a_fault_and_the_client_is_told(behaviour, kind):
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(behaviour)
            app = Forwarder(engine.url, timeout_s=0.2 if kind is FaultKind.NO_ANSWER else 60)
            client, body = await ask(app, "POST", "/v1/x", body=b"{}")
            assert client.status in (502, 504)
            assert json.loads(body)["error"]["code"] == kind
            assert app.faults[0].kind is kind
            assert (app.pool.idle, app.pool.open) == (0, 0)

    run(test())


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (die_after(b"data: 1\n\n"), FaultKind.CUT_OFF),
        (hang(b"data: 1\n\n"), FaultKind.STALLED),
        (send_raw(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: 1\n\n"), FaultKind.CUT_OFF),
    ],
    ids=["killed", "hung", "shorter than it said"],
)
def test_an_engine_that_fails_in_mid_answer_leaves_the_client_an_unfinished_one(behaviour, kind):
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(behaviour)
            app = Forwarder(engine.url, timeout_s=1 if kind is FaultKind.STALLED else 60)
            client, body = await ask(app, "POST", "/v1/x", body=b"{}")
            assert body == b"data: 1\n\n"
            assert not client.is_whole
            assert app.faults[0].kind is kind
            assert not app.faults[0].may_retry
            assert (app.pool.idle, app.pool.open) == (0, 0)

    run(test())


def test_garbage_in_mid_answer_leaves_the_client_an_unfinished_one():
    async def test():
        async with ScriptedEngine() as engine:
            gate = asyncio.Event()

            async def lie(side: EngineSide) -> None:
                await side.say(CHUNKED)
                await gate.wait()
                await side.say(b"zz\r\n")

            engine.plan(lie)
            app = Forwarder(engine.url)
            async with AsgiClient(app, "POST", "/v1/x", body=b"{}") as client:
                await client.start()
                assert await client.read() == b"data: 1\n\n"
                gate.set()
                assert await client.finish() == b""
                assert not client.is_whole
            assert (app.faults[0].kind, app.faults[0].may_retry) == (FaultKind.GARBAGE, False)

    run(test())


def test_an_engine_that_nobody_reaches_is_a_refusal():
    async def test():
        with closed_ports(1) as (port,):
            app = Forwarder(f"http://127.0.0.1:{port}")
            await ask(app, "POST", "/v1/x", body=b"{}")
        assert app.faults[0].kind is FaultKind.REFUSED

    run(test())


def test_an_answer_without_a_length_ends_with_its_connection():
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(send_raw(b"HTTP/1.0 200 OK\r\n\r\nold but whole"))
            app = Forwarder(engine.url)
            client, body = await ask(app, "GET", "/v1/models")
            assert (body, client.is_whole) == (b"old but whole", True)
            assert app.pool.idle == 0

    run(test())


def test_hints_before_the_answer_are_not_the_answer():
    async def test():
        async with ScriptedEngine() as engine:
            early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
            engine.plan(send_raw(early + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", close=False))
            client, body = await ask(Forwarder(engine.url), "POST", "/v1/x", body=b"{}")
            assert (client.status, body) == (200, b"ok")
            assert "link" not in client.headers

    run(test())


@pytest.mark.parametrize("when", ["at once", "later"])
def test_bytes_that_nobody_asked_for_never_reach_the_next_client(when):
    async def test():
        async with ScriptedEngine() as engine:
            whole, stray = (
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n",
                b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nWRONG",
            )

            async def behave(side: EngineSide) -> None:
                if when == "at once":
                    await side.say(whole + b"ok" + stray)
                    return
                await side.say(whole + b"ok")
                await asyncio.sleep(0.02)
                await side.say(stray)

            engine.plan(behave)
            app = Forwarder(engine.url)
            assert (await ask(app, "POST", "/v1/x", body=b"{}"))[1] == b"ok"
            while when == "later" and app.pool.idle:  # until those bytes have come
                await asyncio.sleep(0.01)
            assert (await ask(app, "POST", "/v1/x", body=b"{}"))[1] == b'{"ok": true}'
            assert engine.connections == 2

    run(test())


@pytest.mark.parametrize("pieces", [(), (b"data: 1\n\n",)], ids=["before the first byte", "in mid stream"])
def test_when_the_client_leaves_the_engine_sees_its_connection_closed(pieces):
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(hang(*pieces))
            app = Forwarder(engine.url)
            async with AsgiClient(app, "POST", "/v1/x", body=b"{}") as client:
                await engine.arrived.wait()
                if pieces:
                    await client.start()
                    await client.read()
                client.leave()
                await engine.left.wait()
                await client.task
            assert app.faults[0].kind is FaultKind.CLIENT_LEFT
            assert not app.faults[0].blames_engine
            assert (app.pool.idle, app.pool.open) == (0, 0)

    run(test())


def test_a_client_that_leaves_after_its_answer_does_not_cut_the_next_client_off():
    async def test():
        async with ScriptedEngine() as engine:
            app = Forwarder(engine.url)
            first = AsgiClient(app, "GET", "/v1/models")
            async with first:
                await first.finish()
            gate = asyncio.Event()
            engine.plan(stream(b"1", b"2", gate=gate))
            async with AsgiClient(app, "POST", "/v1/x", body=b"{}") as second:
                await second.start()
                first.leave()
                await asyncio.sleep(0)
                gate.set()
                assert await second.finish() == b"12"
            assert engine.connections == 1

    run(test())


def test_an_answer_that_nobody_read_does_not_stand_in_front_of_the_next_one():
    """A router drops a 503 unread and asks elsewhere; the connection may not serve again with those bytes in it."""

    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(answer_json({"secret": "of the first client"}, status=503), answer_json({"second": True}))
            app = Forwarder(engine.url)
            dropped = await app.pool.send(OutgoingRequest("POST", "/v1/completions", [], b"{}"), 5)
            assert isinstance(dropped, UpstreamAnswer)
            assert dropped.status == 503
            dropped.close()
            client, body = await ask(app, "POST", "/v1/completions", body=b"{}")
            assert (client.status, body) == (200, b'{"second": true}')

    run(test())


def test_what_stands_behind_an_answer_never_becomes_part_of_its_head():
    async def test():
        async with ScriptedEngine() as engine:
            second = b"HTTP/1.1 200 OK\r\nx-second: 1\r\ncontent-length: 5\r\n\r\nWRONG"
            first = b"HTTP/1.1 200 OK\r\nx-first: 1\r\ncontent-length: 2\r\n\r\nok"
            trailed = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-trailer: 1\r\n\r\n"
            engine.plan(send_raw(first + second, close=False), send_raw(trailed, close=False))
            app = Forwarder(engine.url)
            for expected in ({"x-first": "1", "content-length": "2"}, {}):
                client, body = await ask(app, "POST", "/v1/x", body=b"{}")
                assert (body, client.headers) == (b"ok", expected)

    run(test())


def test_a_client_that_does_not_read_stops_the_engine_from_sending():
    async def test():
        async with ScriptedEngine() as engine:
            total, written = 64 << 20, [0]

            async def flood(side: EngineSide) -> None:
                await side.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
                while written[0] < total:
                    await side.say(bytes(1 << 16))
                    written[0] += 1 << 16

            engine.plan(flood)
            may_read = asyncio.Event()
            got = 0

            async def slow_app(scope: Any, receive: Any, send: Any) -> None:
                async def slow_send(message: Any) -> None:
                    nonlocal got
                    await may_read.wait()
                    got += len(message.get("body", b""))

                await Forwarder(engine.url)(scope, receive, slow_send)

            async with AsgiClient(slow_app, "GET", "/v1/x") as client:
                before = -1
                while written[0] != before:  # until the engine can send no more
                    before = written[0]
                    await asyncio.sleep(0.05)
                # What is held: our own buffer and those of the two sockets.
                assert before < 16 << 20
                may_read.set()
                await client.task
            assert got == total

    run(test())


def test_a_body_of_many_megabytes_arrives_whole():
    async def test():
        async with ScriptedEngine() as engine:
            body = bytes(range(256)) * 40_000
            await ask(Forwarder(engine.url), "POST", "/v1/x", body=body)
            assert engine.requests[0].body == body

    run(test())


def test_an_error_of_the_engine_is_passed_on_as_it_is():
    async def test():
        async with ScriptedEngine() as engine:
            engine.plan(answer_json({"error": {"message": "no such model"}}, status=404, headers="x-why: model\r\n"))
            client, body = await ask(Forwarder(engine.url), "POST", "/v1/x", body=b"{}")
            assert (client.status, client.headers["x-why"]) == (404, "model")
            assert body == b'{"error": {"message": "no such model"}}'

    run(test())


def test_headers_of_one_connection_do_not_go_through():
    sent = [(b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"keep-alive", b"5"), (b"content-length", b"2")]
    assert select_response_headers(sent) == [(b"content-length", b"2")]
    assert select_response_headers([(b"x-a", b"theirs")], [b"x-a"]) == []


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://u:p@x", "http://x/?q", "http://x:99999"]
)
def test_what_is_no_address_of_an_engine_is_refused_with_a_hint(url):
    with pytest.raises(ConfigError) as caught:
        EngineAddress.parse(url)
    assert caught.value.hint
