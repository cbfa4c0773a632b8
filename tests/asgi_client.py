"""A client of an ASGI application without a socket: sends a request, reads the answer as it comes, may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


class AsgiClient:
    """One request. ``async with`` runs the application; what it sends is read with `start`, `read` and `finish`."""

    def __init__(
        self, app: Any, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None,
        peer: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        path, _, query = path.partition("?")
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        if body:
            raw.append((b"content-length", str(len(body)).encode()))
        self._scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": raw, "client": (peer, 1234), "scheme": "http",
        }  # fmt: skip
        self._app = app
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_whole = False

    async def __aenter__(self) -> AsgiClient:
        self.task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.task.done():
            self.leave()
            await self.task

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._incoming.get, self._send)
        finally:
            self._outgoing.put_nowait(None)

    async def _send(self, message: Any) -> None:
        self._outgoing.put_nowait(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.leave()  # uvicorn too reports a disconnect once the answer is out
        for _ in range(3):
            await asyncio.sleep(0)

    def leave(self) -> None:
        """Close the connection, as the server sees it."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def start(self) -> int:
        """Wait for the status, and return it; 0 if the application ended without one."""
        message = await self._outgoing.get()
        if message is None:
            return 0
        assert message["type"] == "http.response.start"
        self.status = message["status"]
        self.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        return self.status

    async def read(self) -> bytes | None:
        """Wait for the next piece of the body; None at the end, and `is_whole` says which end it was."""
        message = await self._outgoing.get()
        if message is None:
            return None
        if not message.get("more_body", False):
            self.is_whole = True
            return message.get("body") or None
        return message["body"]

    async def finish(self) -> bytes:
        """Read everything; the body as far as it came."""
        if not self.status and not await self.start():
            await self.task
            return b""
        parts = []
        while (piece := await self.read()) is not None:
            parts.append(piece)
        await self.task
        return b"".join(parts)


async def ask(app: Any, method: str, path: str, **known: Any) -> tuple[AsgiClient, bytes]:
    """Send one request and read its whole answer."""
    async with AsgiClient(app, method, path, **known) as client:
        return client, await client.finish()
