"""A request that goes from its client's socket to an engine's without an ASGI task, and its answer back.

It stands in the place of uvicorn's own cycle: `ClientConnection` hands it the parser's calls, uvicorn's protocol reads
``response_complete`` and sets ``keep_alive``. Importing this module imports uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from semantickv.edge.exchange import ClientSide, ForwardedRequest
from semantickv.edge.intake import BODY_LATE, IncomingBody, Intake
from semblend.wire.errors import ApiError

WITHOUT_BODY = (204, 304)
log = logging.getLogger("semantickv")


class DirectApp(Protocol):
    """An application that forwards requests from socket to socket."""

    intake: Intake

    def is_forwarded(self, method: str, path: str) -> bool:
        """Whether a request goes to an engine."""

    def forward(
        self, scope: Mapping[str, Any], body: bytes, began: float, client: ClientSide
    ) -> ForwardedRequest | None:
        """Send a request on that has a place in the intake; None if it was refused, and answered."""

    def refuse(self, scope: Mapping[str, Any], error: ApiError, client: ClientSide) -> None:
        """Answer a request with an error."""

    def note_left(self, scope: Mapping[str, Any]) -> None:
        """Count a client that left before its request was whole."""


class DirectRequest:
    """One request and its answer: a `ClientSide`. ``on_complete`` is called when the whole answer is written."""

    __slots__ = (
        "_app", "_began", "_body", "_forwarded", "_has_place", "_head", "_is_chunked", "_on_complete", "_scope",
        "_timer", "_transport", "keep_alive", "response_complete",
    )  # fmt: skip

    def __init__(
        self,
        app: DirectApp,
        scope: Mapping[str, Any],
        transport: asyncio.Transport,
        *,
        keep_alive: bool,
        on_complete: Callable[[], None],
    ) -> None:
        self._app = app
        self._scope = scope
        self._transport = transport
        self._on_complete = on_complete
        self._began = time.perf_counter()
        self._body: IncomingBody | None = None
        self._forwarded: ForwardedRequest | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head = b""
        self._has_place = self._is_chunked = False
        self.keep_alive = keep_alive
        self.response_complete = False

    # -- the request, as the parser finds it -----------------------------------------------------------------------

    def begin(self) -> None:
        """Take a place, or refuse the request before its body is read."""
        error = self._app.intake.enter()
        if error is None:
            self._has_place = True
            self._body = IncomingBody(self._app.intake)
            error = self._body.check_length(self._scope["headers"])
        if error is not None:
            self._refuse(error)

    def add(self, part: bytes) -> None:
        """Take a part of the body."""
        error = None if self._body is None else self._body.add(part)
        if error is not None:
            self._refuse(error)

    def finish(self) -> None:
        """The request is whole: send it on."""
        if self._body is None:
            return  # it was refused
        self._stop_timer()
        body, self._body, self._has_place = self._body.join(), None, False
        try:
            self._forwarded = self._app.forward(self._scope, body, self._began, self)
        except Exception:  # a defect of ours costs this request, and is seen in the log
            log.exception("a request could not be forwarded")
            if not self.response_complete and not self._transport.is_closing():
                self._refuse(_FAILED)

    def wait_for_rest(self, loop: asyncio.AbstractEventLoop) -> None:
        """All bytes so far were read. If the body is not whole, the rest must come in time."""
        if self._body is not None and self._timer is None:
            self._timer = loop.call_later(self._app.intake.limits.body_s, self._refuse, BODY_LATE)

    # -- what the connection says ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """The client has left."""
        self.response_complete = True
        if self._forwarded is not None:
            self._forwarded.leave()
        elif self._has_place:
            self._give_up()
            self._app.note_left(self._scope)

    def pause(self) -> None:
        """The client does not keep up."""
        if self._forwarded is not None:
            self._forwarded.pause()

    def resume(self) -> None:
        """The client keeps up again."""
        if self._forwarded is not None:
            self._forwarded.resume()

    # -- the answer ------------------------------------------------------------------------------------------------

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        lines = [STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status]
        self._is_chunked = status not in WITHOUT_BODY
        for name, value in headers:
            if name == b"content-length":
                self._is_chunked = False
            lines += (name, b": ", value, b"\r\n")
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    def write(self, piece: bytes, *, is_last: bool) -> None:
        """Write a piece, and the head before the first one: one packet for both wakes the client once."""
        head, self._head = self._head, b""
        if self._is_chunked:
            size = b"%x\r\n" % len(piece) if piece else b""
            end = b"\r\n" if piece else b""
            data = b"".join((head, size, piece, end, b"0\r\n\r\n" if is_last else b""))
        else:
            data = head + piece
        if data:
            self._transport.write(data)
        if is_last:
            self.response_complete = True
            self._forwarded = None
            if not self.keep_alive:
                self._transport.close()
            self._on_complete()

    def cut(self) -> None:
        self.response_complete = True
        self._forwarded = None
        self._transport.close()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        self._give_up()
        self._app.refuse(self._scope, error, self)

    def _give_up(self) -> None:
        """Give back the place and the room of a request that is not forwarded."""
        self._stop_timer()
        if self._body is not None:
            self._body.drop()
            self._body = None
        if self._has_place:
            self._has_place = False
            self._app.intake.leave(b"")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_FAILED = ApiError(500, "this server failed", hint="its log says why", code="internal_error")
