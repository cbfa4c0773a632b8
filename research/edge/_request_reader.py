"""What the engines of the edge's benchmarks share: a connection that hands over whole requests."""

from __future__ import annotations

import asyncio
from abc import abstractmethod


class RequestReader(asyncio.Protocol):
    """Reads whole requests by their Content-Length, one at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._held = bytearray()

    @abstractmethod
    def take(self, head: bytes, body: bytes) -> None:
        """Answer a request; ``head`` is in lower case."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._held[:end]).lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n")[0]) if at >= 0 else 0
        if len(self._held) < end + 4 + length:
            return
        body = bytes(self._held[end + 4 :])
        self._held.clear()
        self.take(head, body)
