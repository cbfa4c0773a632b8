"""HTTP/1.1 on one connection of a client: uvicorn's fast protocol with deadlines, a bound on headers, and fewer writes.

Of its own uvicorn waits for ever for the headers of a first request, takes headers without end, and never gives up on a
client that does not read. Requests for an engine are taken here, without an ASGI task (`direct_request`); everything
else, and what is rare (a second request before the first was answered, HTTP/1.0, an upgrade, Expect), is uvicorn's.
Importing this module imports uvicorn.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semantickv.edge.direct_request import DirectApp, DirectRequest
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
    """One connection. Every phase in which we wait for the client has an end, and ``books`` knows who may go.

    ``direct`` is the application, if it can forward from socket to socket.
    """

    def __init__(
        self, *args: Any, books: Connections, deadlines: Deadlines, direct: DirectApp | None = None, **known: Any
    ) -> None:
        super().__init__(*args, **known)
        self._direct_app = direct
        self._direct: DirectRequest | None = None
        """The request that is answered directly; None while uvicorn answers one, or none is running."""
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
        self._wire = transport
        self.transport: Any = JoiningTransport(transport, self.loop)
        self._enter(Phase.HEADER)
        if is_full:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._reads_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._direct is not None:
            self._direct.wait_for_rest(self.loop)
        if self._reads_head and self._head_bytes:
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")
            elif self._wait is None and (self.cycle is None or self.cycle.response_complete):
                self._enter(Phase.HEADER)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._direct is not None:
            self._direct.pause()
        if self._stall is None:
            self._stall = self.loop.call_later(self._deadlines.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()
        if self._direct is not None:
            self._direct.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_stall()
        self._books.remove(self)
        direct, self._direct = self._direct, None
        if isinstance(self.cycle, DirectRequest):
            self.cycle = None  # type: ignore[assignment]
        super().connection_lost(exc)
        if direct is not None:
            direct.leave()

    # -- what the parser and uvicorn call --------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, and drop a trailer: behind the body it could name a caller whom no front has checked."""
        if self._reads_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reads_head = False
        self._enter(Phase.ANSWER)
        if self._direct_app is None or not self._begin_direct(self._direct_app):
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        cycle: Any = self.cycle
        if isinstance(cycle, DirectRequest):
            cycle.add(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        cycle: Any = self.cycle
        self._reads_head, self._head_bytes = True, 0
        if isinstance(cycle, DirectRequest):
            cycle.finish()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._direct = None
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._enter(Phase.IDLE)

    # -- what the books call ---------------------------------------------------------------------------------------

    def evict(self) -> None:
        """Close now: another connection needs the room."""
        self.transport.abort()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _begin_direct(self, app: DirectApp) -> bool:
        """Take the request whose headers were just read, if it goes to an engine and nothing about it is rare."""
        parser, cycle = self.parser, self.cycle
        if (
            self._direct is not None
            or self.expect_100_continue
            or (cycle is not None and not cycle.response_complete)
            or self.flow.write_paused  # the last answer is not out yet, and nobody will say again that it waits
            or parser.should_upgrade()
            or parser.get_http_version() != "1.1"
        ):
            return False
        url = httptools.parse_url(self.url)
        path, method = url.path.decode("ascii"), parser.get_method().decode("ascii")
        if "%" in path or not app.is_forwarded(method, path):
            return False
        scope: Any = self.scope
        scope |= {"method": method, "path": path, "raw_path": url.path, "query_string": url.query or b""}
        request = DirectRequest(
            app,
            scope,
            self._wire,
            keep_alive=parser.should_keep_alive(),
            on_complete=self.on_response_complete,
        )
        self.cycle = request  # type: ignore[assignment]
        self._direct = request
        request.begin()
        return True

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
