"""HTTP/1.1 on one connection: uvicorn's protocol with deadlines, limits for headers, and no room for smuggled requests.

uvicorn's own timer starts only after the first answer, and every byte stops it; a write that nobody reads has none.
"""

from __future__ import annotations

import asyncio
import http
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from semblend.http.connections import Connections, Deadlines, Phase
from semblend.wire.errors import ApiError

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100
PIECE_BYTES = 1 << 10
"""Bytes handed to the parser at once while headers are read: it measures only what it could not parse yet."""
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
"""Average of a body's chunks after the first `SMALL_CHUNKS`: parsing 16 MB in chunks of a byte takes minutes."""


class StrictConnection(h11.Connection):
    """The parser, and what it lets pass although two servers could read it differently (RFC 9112, 6.1)."""

    refusal: h11.RemoteProtocolError | None = None
    _chunks = _chunk_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event; a request that must be refused raises, and ``refusal`` keeps the reason."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._chunk_bytes = 0
                _refuse_ambiguous(event)
            elif isinstance(event, h11.Data):
                self._count_chunk(event)
            return event
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise

    def _count_chunk(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._chunk_bytes += len(data.data)
        if self._chunks > SMALL_CHUNKS and self._chunk_bytes < self._chunks * MIN_CHUNK_BYTES:
            raise h11.RemoteProtocolError("the body comes in too many small chunks")


def _refuse_ambiguous(request: h11.Request) -> None:
    names = {name for name, _ in request.headers}
    if len(request.headers) > MAX_HEADERS:
        raise h11.RemoteProtocolError(f"more than {MAX_HEADERS} headers", error_status_hint=431)
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError("the length of the body is given in two ways")


class LingeringTransport:
    """A transport that closes only our side while the client still sends; then `on_linger` is called.

    To close both sides would reset the connection, and a client that sends a large body would lose our answer to it.
    """

    def __init__(self, transport: asyncio.Transport, conn: h11.Connection, on_linger: Callable[[], None]) -> None:
        self._transport = transport
        self._conn = conn
        self._on_linger = on_linger
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        sends = self._conn.their_state is h11.SEND_BODY or self._conn.trailing_data[0]
        if sends and self._transport.can_write_eof():
            self.lingers = True
            self._transport.write_eof()
            self._on_linger()
        else:
            self._transport.close()


class GuardedProtocol(H11Protocol):
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
        self.conn: h11.Connection = StrictConnection(h11.SERVER, MAX_HEADER_BYTES)
        self._books = connections
        self._deadlines = deadlines
        self._known: tuple[Phase, object] | None = None
        self._evicted = False
        self._pipelined = 0
        self._wait: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    # -- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport: Any = LingeringTransport(transport, self.conn, self._linger)
        if self._evicted:
            transport.abort()
        else:
            self._review()

    def data_received(self, data: bytes) -> None:
        while data and self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            piece, data = data[:PIECE_BYTES], data[PIECE_BYTES:]
            super().data_received(piece)
        if data and not self.transport.is_closing():
            super().data_received(data)
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

    # -- what uvicorn calls ----------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        answered = self.cycle
        self._pipelined = self._pipelined + 1 if self.conn.trailing_data[0] else 0
        super().on_response_complete()
        if self._pipelined >= MAX_PIPELINED and self.cycle is not answered:
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]
        self._unset_keepalive_if_required()  # the phases have a timer of their own
        self._review()
        self._watch_writes()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not a request, with the parser's reason."""
        error = self.conn.refusal if isinstance(self.conn, StrictConnection) else None
        self._refuse(error.error_status_hint if error else 400, str(error or msg))

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

    def _find_phase(self) -> Phase:
        if self.cycle is not None and not self.cycle.response_complete:
            return Phase.BODY if self.cycle.more_body else Phase.ANSWER
        is_between = self.cycle is not None and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        return Phase.IDLE if is_between else Phase.HEADER

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
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
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
        if self.conn.our_state is h11.DONE:
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
