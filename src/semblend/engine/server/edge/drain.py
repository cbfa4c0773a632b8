"""The end of a server: no new requests, time for those that run, and then an error instead of a cut answer."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semblend.wire.errors import ApiError

STOPPING = ApiError(
    503, "the server is shutting down", hint="ask again in a moment", code="shutting_down", retry_after_s=5
)


class Drain:
    """The requests that run. `begin` refuses new ones; `end` stops those that still run."""

    def __init__(self) -> None:
        self.has_begun = False
        self.has_ended = False
        self._running: set[asyncio.Task[object]] = set()

    def begin(self) -> None:
        self.has_begun = True

    def end(self) -> None:
        """Interrupt every request; each tells its client so (see `DrainRequests`)."""
        self.has_begun = self.has_ended = True
        for task in self._running:
            task.cancel()

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, task: asyncio.Task[object]) -> None:
        self._running.add(task)

    def discard(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)


class DrainRequests:
    """Refuses requests while the server drains, and gives those that it ends their last words.

    A stream ends with an error event and ``[DONE]``, a whole answer becomes a 503. The interrupted request itself gives
    back its place and stops the engine, as it does when its client leaves.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = _Reply(send)
        task = asyncio.current_task()
        if self._drain.has_begun or task is None:
            await reply.end_with(STOPPING)
            return
        self._drain.add(task)
        try:
            await self._app(scope, receive, reply.send)
        except asyncio.CancelledError:
            if not self._drain.has_ended:
                raise
            task.uncancel()
            with suppress(asyncio.CancelledError):  # the server waits no longer for a client that does not read
                await reply.end_with(STOPPING)
        finally:
            self._drain.discard(task)


class _Reply:
    """What was sent of an answer so far."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = self._has_ended = self._is_stream = False

    async def send(self, message: Message) -> None:
        await self._send(message)  # noted only when it was written: an interrupted send wrote nothing
        if message["type"] == "http.response.start":
            self._has_begun = True
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif not message.get("more_body", False):
            self._has_ended = True

    async def end_with(self, error: ApiError) -> None:
        """Complete the answer with an error, as far as its shape allows."""
        if not self._has_begun:
            headers = error.headers() | {"Connection": "close"}
            response = JSONResponse(error.body(), status_code=error.status, headers=headers)
            await self._send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
            await self._send({"type": "http.response.body", "body": response.body})
        elif self._is_stream and not self._has_ended:
            last = f"data: {json.dumps(error.body(), separators=(',', ':'))}\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": last.encode()})
