"""HTTP/1.1 on one connection: uvicorn's protocol with deadlines, limits for headers, and no room for smuggled requests.

A request's head is held back until it is whole, checked against the grammar, and only then parsed. The parser (llhttp,
by httptools) gets the bytes of one request at a time, and a new parser for each: what stands behind a request waits
until that one is answered. What llhttp accepts and two servers could read differently is refused here.

uvicorn's own timer starts only after the first answer, and every byte stops it; a write that nobody reads has none.
"""

from __future__ import annotations

import asyncio
import http
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from semblend.http.connections import Connections, Deadlines, Phase
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

MAX_HEADER_BYTES = 64 << 10
"""Also of what stands around a body: lengths of chunks, their extensions, trailers."""
MAX_HEADERS = 100
MIN_READ_BYTES_PER_S = 1024
LINGER_S = 5.0
"""A client may go on sending so long after its answer was sent."""
LAST_LOOK_S = 0.1
"""After a deadline we look once more: on a machine that was busy for long, what the client did may be unread as yet."""
MAX_PIPELINED = 16
"""Requests in a row that a client sends before it has the answer to the one before: then the connection ends. Clients
in use do not; who does not read either would have as much done for it as the system's buffers hold, megabytes."""
SMALL_CHUNKS = 1024
MIN_CHUNK_BYTES = 1024
"""Average of a body's chunks after the first `SMALL_CHUNKS`: to parse 16 MB in chunks of a byte takes a minute."""
CHUNK_LINE_BYTES = 16
"""What the length of a chunk and its line ends take at most."""
_HEAD_END = re.compile(rb"\n\r?\n")
_TOKEN = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_HEAD = re.compile(rb"(?!CONNECT )%b /[!\"$-~]* HTTP/1\.[01]\r\n(?:%b:[\t -~\x80-\xff]*\r\n)*\r\n" % (_TOKEN, _TOKEN))
"""A request line and headers (RFC 9112, 3 to 5) for a path of this server: no folded lines, no control characters."""
_UPGRADE = re.compile(rb"(?i)(?<=\n)upgrade:[^\n]*\n")
"""Taken out of a head: no other protocol is spoken here, and a parser that reads it would not read the body."""


class BadRequestError(Exception):
    """Bytes that are no request of ours: the status for them, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def find_refusal(headers: list[tuple[bytes, bytes]], version: str) -> BadRequestError | None:
    """Why a request is refused whose headers, names in lower case, are well-formed each for itself.

    >>> find_refusal([(b"host", b"a"), (b"host", b"b")], "1.1")
    BadRequestError('HTTP/1.1 needs one Host header')
    """
    names = [name for name, _ in headers]
    coding = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if len(names) > MAX_HEADERS:
        return BadRequestError(431, f"more than {MAX_HEADERS} headers")
    hosts = names.count(b"host")
    if hosts > 1 or (not hosts and version == "1.1"):
        return BadRequestError(400, f"HTTP/{version} needs one Host header")
    if coding and (b"content-length" in names or version != "1.1"):
        return BadRequestError(400, "the length of the body is given in two ways")
    if coding and coding != [b"chunked"]:
        return BadRequestError(501, "of transfer codings only chunked is known")
    return None


def send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let a body of unknown length end with the connection: HTTP/1.0 knows no chunks, and uvicorn sends them."""
    send, is_counted = cycle.send, False

    async def send_plain(message: ASGISendEvent) -> None:
        nonlocal is_counted
        if message["type"] == "http.response.start":
            is_counted = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not is_counted:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not is_counted:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


class LingeringTransport:
    """A transport that closes only our side while the client still sends; then `on_linger` is called.

    To close both sides would reset the connection, and a client that sends a large body would lose our answer to it.
    """

    def __init__(
        self, transport: asyncio.Transport, is_sending: Callable[[], bool], on_linger: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._is_sending = is_sending
        self._on_linger = on_linger
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if self._is_sending() and self._transport.can_write_eof():
            self.lingers = True
            self._transport.write_eof()
            self._on_linger()
        else:
            self._transport.close()


class GuardedProtocol(HttpToolsProtocol):
    """One connection of a server. Every phase in which we wait for the client has an end."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        connections: Connections,
        deadlines: Deadlines,
        app_state: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(config, state, app_state or {})
        self._books = connections
        self._deadlines = deadlines
        self._known: tuple[Phase, object] | None = None
        self._evicted = False
        self._pipelined = 0
        self._wait: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unread = b""
        """What came and was not parsed: part of a head, or what stands behind a request that is not answered yet."""
        self._searched = 0
        """Bytes of it in which no head ends."""
        self._has_begun = self._reads_body = False
        self._length: int | None = 0
        """Bytes of the body that are still to come; None where it comes in chunks."""
        self._chunks = self._body_bytes = self._around_bytes = 0
        self._tail = b""
        """The last bytes that were parsed of a body in chunks."""

    # -- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport: Any = LingeringTransport(transport, self._is_sending, self._linger)
        if self._evicted:
            transport.abort()
        else:
            self._review()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unread = self._unread + data if self._unread else data
        self._read_on()
        self._review()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._books.remove(self)
        super().connection_lost(exc)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        """Parse what has come, up to the end of a request that is not answered yet."""
        try:
            while self._unread and not self.transport.is_closing():
                if self._reads_body:
                    (self._read_chunks if self._length is None else self._read_body)()
                elif self.cycle is not None and not self.cycle.response_complete:
                    self.flow.pause_reading()
                    return
                elif not self._read_head():
                    return
        except (httptools.HttpParserError, BadRequestError) as error:
            inner = error.__context__  # what was raised while the parser called us
            reason = inner if isinstance(inner, BadRequestError) else error
            self.logger.warning("a request was refused: %s", reason)
            self._refuse(getattr(reason, "status", 400), str(reason))

    def _read_head(self) -> bool:
        """Parse a head that is whole; False where it is not yet."""
        found = _HEAD_END.search(self._unread, self._searched)
        end = found.end() if found else len(self._unread)
        if end > MAX_HEADER_BYTES:
            raise BadRequestError(431, f"more than {MAX_HEADER_BYTES} bytes of headers")
        if found is None and self._unread[0] > 0x20:
            self._searched = max(0, end - 2)
            return False
        head, self._unread, self._searched = self._unread[:end], self._unread[end:], 0
        if not _HEAD.fullmatch(head):
            raise BadRequestError(400, "the request line or a header is malformed")
        self._has_begun = False
        self._chunks = self._body_bytes = self._around_bytes = 0
        self._tail = b""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(_UPGRADE.sub(b"", head))
        return True

    def _read_body(self) -> None:
        """Parse a body of known length, and nothing of what stands behind it."""
        assert self._length is not None
        piece, self._unread = self._unread[: self._length], self._unread[self._length :]
        self._length -= len(piece)
        self.parser.feed_data(piece)
        if self._reads_body == (self._length == 0):
            raise BadRequestError(400, "the length of the body is given in two ways")

    def _read_chunks(self) -> None:
        """Parse a body in chunks. It ends with an empty line, so it is parsed from one such end to the next."""
        data, at = self._tail + self._unread, len(self._tail)
        self._around_bytes += len(self._unread)
        while at < len(data) and self._reads_body:
            found = data.find(b"\r\n\r\n", max(0, at - 3))
            end = len(data) if found < 0 else found + 4
            self.parser.feed_data(data[at:end])
            at = end
            if found >= 0:
                self.on_chunk_header()  # it costs as much as a chunk
        self._unread, self._tail = data[at:], data[max(0, at - 3) : at]
        self._around_bytes -= len(self._unread)
        if self._around_bytes > MAX_HEADER_BYTES + CHUNK_LINE_BYTES * self._chunks:
            raise BadRequestError(431, f"more than {MAX_HEADER_BYTES} bytes around the chunks of a body")

    # -- what uvicorn calls ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._has_begun:
            raise BadRequestError(400, "the body ends in two places")  # a second head that nobody has checked
        self._has_begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._reads_body:  # else it is a trailer: it could name another caller, and is dropped
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if refusal := find_refusal(self.headers, version):
            raise refusal
        self.expect_100_continue &= version == "1.1"
        super().on_headers_complete()
        known = dict(self.headers)
        self._length = None if b"transfer-encoding" in known else int(known.get(b"content-length", 0))
        self._reads_body = True
        if version != "1.1":
            send_without_chunks(self.cycle)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > SMALL_CHUNKS and self._body_bytes < self._chunks * MIN_CHUNK_BYTES:
            raise BadRequestError(400, "the body comes in too many small chunks")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._around_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reads_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        answered = self.cycle
        self._pipelined = self._pipelined + 1 if self._unread else 0
        super().on_response_complete()
        if self._reads_body and self.expect_100_continue:
            self._close()  # nobody knows whether the body that was announced comes, or the next request
        self._read_on()
        if self._pipelined >= MAX_PIPELINED and self.cycle is not answered:
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]
        self._unset_keepalive_if_required()  # the phases have a timer of their own
        self._review()
        self._watch_writes()

    # -- what the server calls -------------------------------------------------------------------------------------

    def evict(self) -> None:
        self._evicted = True
        if self.transport is not None:
            self.transport.abort()

    def shutdown(self) -> None:
        """Close the connection now, or after the answer that is under way."""
        if self.transport is None:  # accepted a moment ago, and not made yet
            self.evict()
        elif self._find_phase() in (Phase.HEADER, Phase.IDLE):
            self._close()
        else:
            self.cycle.keep_alive = False

    # -- phases ----------------------------------------------------------------------------------------------------

    def _is_sending(self) -> bool:
        """Whether the client is in the middle of a request."""
        return self._reads_body or bool(self._unread)

    def _find_phase(self) -> Phase:
        if self.cycle is not None and not self.cycle.response_complete:
            return Phase.BODY if self.cycle.more_body else Phase.ANSWER
        return Phase.HEADER if self.cycle is None or self._is_sending() else Phase.IDLE

    def _review(self) -> None:
        """Note the phase; a new one, or the same one of another request, starts its deadline anew."""
        if self.transport.is_closing():
            if not self.transport.lingers:
                self._stop_waiting()
            return
        known = (self._find_phase(), self.cycle)
        if known == self._known:
            return
        self._known = known
        self._books.enter(self, known[0])
        self._stop_waiting()
        # The body's deadline is the application's: it reads the body, and answers 408.
        seconds = {Phase.HEADER: self._deadlines.header_s, Phase.IDLE: self._deadlines.idle_s}.get(known[0])
        self._wait = None if seconds is None else self.loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._wait = self.loop.call_later(LAST_LOOK_S, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        self._wait = None
        if self._unread and not self._reads_body:
            self._refuse(408, "the headers did not come in time")
        else:
            self._close()

    def _stop_waiting(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    # -- the end ---------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Answer an error and close; without an answer where this request has one."""
        if self._reads_body and self.cycle.response_complete:
            self._close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # its request is broken: the application is told that the client left
            self.cycle.message_event.set()
        error = ApiError(status, message[:200], hint="send HTTP/1.1 as RFC 9112 has it")
        body = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self._close()

    def _close(self) -> None:
        self._stop_waiting()
        if self.transport.lingers:
            self.transport.abort()
        self.transport.close()
        self._watch_writes()

    def _linger(self) -> None:
        """Drop what the client still sends, until it has seen our answer and closes, or for a while."""
        self._stop_waiting()
        self.flow.resume_reading()
        self._books.enter(self, Phase.HEADER)
        self._wait = self.loop.call_later(min(LINGER_S, self._deadlines.header_s), self.transport.abort)

    def _watch_writes(self) -> None:
        """Look after a while whether the client reads; closing alone would wait for ever for one that does not."""
        size = self.transport.get_write_buffer_size()
        if size and self._stall is None:
            self._stall = self.loop.call_later(self._deadlines.write_s, self._check_writes, size)

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _check_writes(self, before: int) -> None:
        self._stall = None
        left = self.transport.get_write_buffer_size()
        if left and before - left < MIN_READ_BYTES_PER_S * self._deadlines.write_s:
            self._stall = self.loop.call_later(LAST_LOOK_S, self._give_up_writing, left)
        else:
            self._watch_writes()

    def _give_up_writing(self, before: int) -> None:
        self._stall = None
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_writes()
