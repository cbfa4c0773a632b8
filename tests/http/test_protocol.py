"""Requests beside a twin, h11: whatever bytes come, however they are cut, nothing is read that h11 would not read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from semblend.http.connections import Connections, Deadlines
from semblend.http.protocol import MAX_HEADER_BYTES, GuardedProtocol


@dataclass(frozen=True)
class Read:
    """A request as an application sees it."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Wire(asyncio.Transport):
    """A client whose bytes are handed in by the test; it reads everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def serve(pieces: list[bytes], *, streams: bool = False) -> tuple[list[Read], bytes]:
    """Hand pieces to a connection, one after the other; return the requests that were whole, and what was answered."""
    found: list[Read] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        found.append(Read(scope["method"], target, _normalize(scope["headers"]), body))
        headers = [] if streams else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        await send({"type": "http.response.body", "body": b"k"})

    async def drive() -> bytes:
        config = Config(app, lifespan="off", ws="none", log_config=None)
        config.load()
        wire, state = Wire(), ServerState()
        protocol = GuardedProtocol(config, state, Connections(limit=4), Deadlines(60.0, 60.0, 60.0))
        protocol.connection_made(wire)
        for piece in pieces:
            if not wire.closed:
                protocol.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(100):  # more than all requests need: none of them waits for anything but its bytes
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        await asyncio.wait_for(asyncio.gather(*state.tasks), 10)
        return wire.written

    written = asyncio.run(drive())
    return found, written


def read_with_h11(data: bytes) -> list[Read]:
    """The requests that h11 finds, one after the other, if each is answered."""
    found: list[Read] = []
    conn = h11.Connection(h11.SERVER, MAX_HEADER_BYTES)
    conn.receive_data(data)
    try:
        while True:
            head = conn.next_event()
            if not isinstance(head, h11.Request):
                return found
            body = b""
            while isinstance(event := conn.next_event(), h11.Data):
                body += event.data
            if not isinstance(event, h11.EndOfMessage):
                return found
            found.append(Read(head.method.decode(), head.target, _normalize(head.headers), body))
            conn.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            conn.send(h11.EndOfMessage())
            if conn.our_state is not h11.DONE:
                return found
            conn.start_next_cycle()
    except h11.RemoteProtocolError:
        return found


def _normalize(headers: Any) -> tuple[tuple[bytes, bytes], ...]:
    """Headers as both give them: h11 writes the coding in lower case, and Upgrade is not passed on here."""
    kept = [(bytes(name), bytes(value)) for name, value in headers if name != b"upgrade"]
    return tuple((name, value.lower() if name == b"transfer-encoding" else value) for name, value in kept)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = [0, *sorted({place % len(data) for place in at} - {0}), len(data)] if data else [0]
    return [data[start:end] for start, end in pairwise(places)]


# -- requests, whole and broken ----------------------------------------------------------------------------------------

NAMES = ["Accept", "X-Other", "authorization", "Content-Type", "Cookie", "Upgrade", "Trailer"]
VALUES = [b"", b"a", b"a b\tc", b"chunked", b"7", b"\xe9\xff", b'"quoted, \\" text"', b"x" * 300]
BODIES = [
    b"",
    b"{}",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: y\r\n\r\n",
    b"\r\n0\r\n\r\nGET /b HTTP/1.1\r\n",
]


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    body = draw(st.sampled_from(BODIES))
    pieces = [piece for piece in cut(body, draw(st.lists(st.integers(0, 40), max_size=4))) if piece]
    extension = draw(st.sampled_from([b"", b";a", b";a=b", b';a="b;c"']))
    trailers = draw(st.sampled_from([b"", b"X-Tenant-ID: eve\r\n", b"A: b\r\nAuthorization: Bearer eve\r\n"]))
    lines = [b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces]
    return b"".join(lines) + draw(st.sampled_from([b"0", b"000"])) + extension + b"\r\n" + trailers + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    blank = draw(st.sampled_from([b"", b" ", b" \t "]))
    lines = [b"%b:%b%b%b" % (name.encode(), blank, value, blank) for name, value in draw(
        st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=4)
    )]  # fmt: skip
    lines.insert(draw(st.integers(0, len(lines))), b"Host: x")
    if draw(st.booleans()):
        lines.append(
            draw(st.sampled_from([b"Connection: keep-alive", b"Connection: Upgrade", b"Expect: 100-continue"]))
        )
    form = draw(st.sampled_from(["none", "counted", "chunked"]))
    body = b""
    if form == "counted":
        body = draw(st.sampled_from(BODIES))
        lines.append(b"Content-Length: %d" % len(body))
    elif form == "chunked":
        body = draw(chunks())
        lines.append(draw(st.sampled_from([b"Transfer-Encoding: chunked", b"transfer-encoding:Chunked "])))
    method = draw(st.sampled_from([b"POST", b"GET", b"DELETE", b"OPTIONS"]))
    target = draw(st.sampled_from([b"/", b"/v1/a?b=c&d=%20", b"//a/../b", b"/%2e;a?b?c", b'/|{}"<>\\^`']))
    return b"\r\n".join([b"%b %b HTTP/1.1" % (method, target), *lines, b"", body])


SPLICES = [
    b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b",", b"\x00", b"\x0b", b"\x7f", b"\x80", b"0", b"1", b"a", b"+", b"-",
    b"_", b"#", b"*", b"0x", b"\r\n\r\n", b"\r\n ", b";", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 ", b"CONNECT", b"PRI",
    b"Content-Length: 3\r\n", b"Content-Length: 3, 3\r\n", b"Content-Length:\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: identity\r\n", b"Transfer_Encoding: chunked\r\n",
    b"Transfer-Encoding : chunked\r\n", b"Transfer-Encoding:\x0bchunked\r\n", b"Host: y\r\n", b"Upgrade: h2c\r\n",
    b"Connection: close\r\n", b"Connection: upgrade\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"ffffffffffffffffff\r\n",
]  # fmt: skip


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    data = b"".join(draw(st.lists(requests(), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(1, 3))):
        lines = [at for at in range(1, len(data)) if data[at - 1 : at] == b"\n"]
        start = draw(st.one_of(st.integers(0, len(data)), st.sampled_from(lines or [0])))
        end = min(len(data), start + draw(st.sampled_from([0, 0, 0, 1, 2, 7])))
        data = data[:start] + draw(st.one_of(st.sampled_from(SPLICES), st.binary(max_size=2))) + data[end:]
    return data


CUTS = st.lists(st.integers(0, 2000), max_size=12)


@settings(max_examples=300)
@given(st.lists(requests(), min_size=1, max_size=4), CUTS)
def test_requests_are_read_as_h11_reads_them_wherever_their_bytes_are_cut(sent, at):
    data = b"".join(sent)
    found, written = serve(cut(data, at))
    assert found == read_with_h11(data)
    assert len(found) == len(sent) == written.count(b"HTTP/1.1 200 OK")


def test_of_broken_bytes_nothing_is_read_that_h11_would_not_read(is_long):
    @settings(max_examples=500 if is_long else 200)
    @given(broken(), CUTS)
    @example(b"GET / HTTP/1.1\nHost: x\n\n", [])
    @example(b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n Content-Length: 5\r\n\r\nhello", [])
    @example(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", [])
    @example(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n", [])
    def check(data, at):
        found, _ = serve(cut(data, at))
        assert found == read_with_h11(data)[: len(found)]

    check()


# -- what h11 does not decide ------------------------------------------------------------------------------------------

CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("around", [b"0\r\nA: ", b"0;", b"1;a="], ids=["trailer", "last extension", "extension"])
def test_what_stands_around_chunks_has_a_limit_even_where_a_line_never_ends(around):
    found, written = serve([CHUNKED + around, *[b"a" * 1024] * 70])
    assert (found, written[:13]) == ([], b"HTTP/1.1 431 ")


def test_a_body_full_of_empty_lines_is_refused_as_one_in_tiny_chunks_is():
    body = b"\r\n\r\n" * 100_000
    _, written = serve([CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)])
    assert written.startswith(b"HTTP/1.1 400 ")


def test_a_chunked_body_that_comes_in_many_small_packets_is_read():
    body = b"x" * 100_000
    data = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    found, _ = serve([data[at : at + 50] for at in range(0, len(data), 50)])
    assert [one.body for one in found] == [body]


def test_an_old_client_gets_a_body_of_unknown_length_without_chunks():
    _, written = serve([b"GET / HTTP/1.0\r\n\r\n"], streams=True)
    head, _, body = written.partition(b"\r\n\r\n")
    assert body == b"ok"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


def test_a_client_that_wants_another_protocol_is_answered_in_this_one():
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n"
    found, written = serve([head + b"{}", head + b"[]"])
    assert [one.body for one in found] == [b"{}", b"[]"]
    assert written.count(b"200 OK") == 2


def test_an_answer_before_the_body_that_waits_for_100_continue_ends_the_connection():
    """The client may send the body or, having been refused, the next request: nobody can tell."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def drive(expect: bytes) -> bool:
        config = Config(refuse, lifespan="off", ws="none", log_config=None)
        config.load()
        wire = Wire()
        protocol = GuardedProtocol(config, ServerState(), Connections(limit=4), Deadlines(60.0, 60.0, 60.0))
        protocol.connection_made(wire)
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n" + expect + b"\r\n")
        while b" 413 " not in wire.written:
            await asyncio.sleep(0)
        closed = wire.closed
        protocol.connection_lost(None)
        return closed

    assert asyncio.run(drive(b"Expect: 100-continue\r\n"))
    assert not asyncio.run(drive(b""))
