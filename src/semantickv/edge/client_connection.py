"""HTTP/1.1 on one connection of a client: uvicorn's fast protocol with deadlines, a bound on headers, and fewer writes.

Of its own uvicorn waits for ever for the headers of a first request, takes headers without end, and never gives up on a
client that does not read. Importing this module imports uvicorn.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semblend.engine.server.edge.connections import Connections, Deadlines, Phase

MOST_HEAD_BYTES = 64 << 10
_REFUSAL = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class JoiningTransport:
    """A transport that holds the head of an answer until the first piece of its body, or for one turn of the loop.

    One write instead of two wakes the client once: a fifth of what the proxy adds to a short answer.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write; what looks like a head waits a moment. Nothing depends on that guess but the number of writes."""
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._held = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()


class ClientConnection(HttpToolsProtocol):
    """One connection. Every phase in which we wait for the client has an end, and ``books`` knows who may go."""

    def __init__(self, *args: Any, books: Connections, deadlines: Deadlines, **known: Any) -> None:
        super().__init__(*args, **known)
        self._books = books
        self._deadlines = deadlines
        self._wait: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._reads_head = True

    # -- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._books.make_room()
        is_full = self._books.is_full
        super().connection_made(transport)
        self.transport: Any = JoiningTransport(transport, self.loop)
        self._enter(Phase.HEADER)
        if is_full:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._reads_head:
            self._head_bytes += len(data)
            if self._wait is None and (self.cycle is None or self.cycle.response_complete):
                self._enter(Phase.HEADER)
        super().data_received(data)
        if self._reads_head and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._deadlines.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_stall()
        self._books.remove(self)
        super().connection_lost(exc)

    # -- what the parser and uvicorn call --------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._reads_head = False
        self._enter(Phase.ANSWER)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_head, self._head_bytes = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._enter(Phase.IDLE)

    # -- what the books call ---------------------------------------------------------------------------------------

    def evict(self) -> None:
        """Close now: another connection needs the room."""
        self.transport.abort()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        """Note the phase. For headers there is a deadline here, for the next request uvicorn has one, for the body the
        application.
        """
        self._stop_waiting()
        self._books.enter(self, phase)
        if phase is Phase.HEADER:
            self._wait = self.loop.call_later(self._deadlines.header_s, self._refuse, b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        """Close because of a head that does not end; with an answer where something of it has come."""
        self._wait = None
        if self.transport.is_closing():
            return
        if self._head_bytes and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(_REFUSAL % status)
        self.transport.close()

    def _stop_waiting(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
