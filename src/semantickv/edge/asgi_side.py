"""A client's side behind any ASGI server: what an exchange writes at once is sent as fast as the server takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semantickv.edge.exchange import ForwardedRequest

if TYPE_CHECKING:
    from starlette.types import Receive, Send

HIGH_WATER_BYTES = 256 << 10
"""Bytes of an answer held for a client that reads slowly; beyond that the engine is not read from."""


class AsgiSide:
    """Takes an answer as a `ClientSide`. `run` sends it, until it has ended or the client has left."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._messages: deque[dict[str, Any]] = deque()
        self._held_bytes = 0
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None
        self._forwarded: ForwardedRequest | None = None

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._messages.append({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, piece: bytes, *, is_last: bool) -> None:
        if piece or is_last:
            self._messages.append({"type": "http.response.body", "body": piece, "more_body": not is_last})
            self._held_bytes += len(piece)
        self._is_over = is_last
        if self._held_bytes > HIGH_WATER_BYTES and self._forwarded is not None:
            self._forwarded.pause()
        self._wake()

    def cut(self) -> None:
        self._is_over = True
        self._wake()

    async def run(self, receive: Receive, forwarded: ForwardedRequest | None) -> None:
        """Send what is written, and tell ``forwarded`` when the client leaves; None: it was refused."""
        self._forwarded = forwarded = forwarded or _Refused()
        watch = asyncio.ensure_future(self._watch(receive, forwarded))
        try:
            while self._messages or not self._is_over:
                if not self._messages:
                    await self._wait()
                    continue
                message = self._messages.popleft()
                self._held_bytes -= len(message.get("body", b""))
                await self._send(message)
                if self._held_bytes <= HIGH_WATER_BYTES:
                    forwarded.resume()
        except asyncio.CancelledError:
            forwarded.stop()
            raise
        finally:
            watch.cancel()
            forwarded.leave()  # does nothing where the answer has ended

    async def _watch(self, receive: Receive, forwarded: ForwardedRequest) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        forwarded.leave()
        self._messages.clear()
        self.cut()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Refused:
    """A request that was answered before it was forwarded: there is nothing to hold up or to stop."""

    def _do_nothing(self) -> None:
        """Nothing."""

    leave = pause = resume = stop = _do_nothing
