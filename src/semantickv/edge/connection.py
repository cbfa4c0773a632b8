"""One HTTP/1.1 connection to an engine, one exchange at a time. The parser is httptools (llhttp).

Why not a client library: with an 8k-token prompt, uvicorn and httpx add 1.8 ms to a request, uvicorn and aiohttp
0.4 ms, this module 0.2 ms (docs/research/decisions/0095-forwarding-core.md).

A connection is used again only after an answer that ended where its head said, with nothing behind it. Bytes that
nobody asked for close it: they must never become part of the next client's answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import httptools

from semantickv.edge.faults import Fault, FaultKind
from semantickv.edge.headers import RawHeaders

MOST_HEAD_BYTES = 64 << 10
HIGH_WATER_BYTES = 256 << 10
"""Bytes of an answer held for a client that reads slowly; beyond that the engine is not read from."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Status and headers of an engine's answer; names in lower case."""

    status: int
    headers: RawHeaders


class EngineConnection(asyncio.Protocol):
    """Use `send`, `read_head`, then `read` until it returns no bytes. `fail` ends an exchange from outside."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self._is_paused = False
        self._is_clean = True
        self._is_lost = False
        self._reset()

    def _reset(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: AnswerHead | None = None
        self._head_bytes = 0
        self._has_ended = False
        self._ends_with_connection = False
        self._fault: Fault | None = None
        self.has_bytes = False
        """Whether anything has come back in this exchange."""

    # -- the exchange ----------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes) -> None:
        """Begin an exchange: write a request. Only on a connection that `is_reusable`, or a new one."""
        assert self._transport is not None
        self._reset()
        self._parser = httptools.HttpResponseParser(self)
        if len(body) <= 1 << 16:
            self._transport.write(head + body)  # one packet where it fits
        else:
            self._transport.writelines((head, body))

    async def read_head(self, timeout_s: float) -> AnswerHead | Fault:
        """Wait for status and headers."""
        while self._head is None and self._fault is None:
            if not await self._wait(timeout_s):
                self.fail(Fault(FaultKind.NO_ANSWER, f"no answer in {timeout_s:g} s"))
        if self._fault is not None:
            return replace(self._fault, is_mid_answer=False)  # nothing has been passed on, whatever came
        assert self._head is not None
        return self._head

    async def read(self, timeout_s: float) -> bytes | Fault:
        """Wait for bytes of the answer and return all that have come; no bytes at its end."""
        while not self._pieces and not self._has_ended and self._fault is None:
            if not await self._wait(timeout_s):
                self.fail(Fault(FaultKind.STALLED, f"nothing for {timeout_s:g} s", is_mid_answer=True))
        if self._pieces:  # what came before a fault is passed on first
            found = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._held_bytes = 0
            self._resume()
            return found
        return self._fault or b""

    @property
    def is_read(self) -> bool:
        """Whether the answer has ended and all of it was read."""
        return self._has_ended and not self._pieces

    def fail(self, fault: Fault) -> None:
        """End the exchange with a fault and close the connection, from the engine's side or from the client's."""
        if self._fault is None and not self._has_ended:
            self._fault = fault
        self._is_clean = False
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def close(self) -> None:
        """Close the connection."""
        self._is_clean = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_reusable(self) -> bool:
        """Whether another exchange may begin here. Bytes that nobody read would stand in front of its answer."""
        transport = self._transport
        return (
            self._is_clean
            and not self._is_lost
            and (self.is_read or self._parser is None)
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0
        )

    # -- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._has_ended:
            self.close()  # nobody asked for this
            return
        self.has_bytes = True
        if self._head is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(str(error))
            return
        if self._head is None and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(f"more than {MOST_HEAD_BYTES} bytes of headers")
            return
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._parser is not None and not self._has_ended and self._fault is None:
            if self._head is not None and self._ends_with_connection and exc is None:
                self._has_ended = True
            elif self._head is not None:
                self._fault = Fault(FaultKind.CUT_OFF, _describe(exc), is_mid_answer=True)
            else:
                self._fault = Fault(FaultKind.CLOSED_EARLY, _describe(exc))
        self._wake()

    # -- what the parser calls -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._has_ended:
            self._is_clean = False  # a second answer behind the first

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._has_ended:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            return  # on_message_complete drops it
        names = {name for name, _ in self._headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        self._head = AnswerHead(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._has_ended:
            return
        self._pieces.append(body)
        self._held_bytes += len(body)
        if self._held_bytes > HIGH_WATER_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._head is None:  # 100 Continue, 103 Early Hints: the answer is still to come
            self._headers = []
            return
        self._has_ended = True
        if not self._parser.should_keep_alive():
            self._is_clean = False

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _refuse(self, reason: str) -> None:
        """End the exchange because the engine's bytes are not HTTP."""
        if self._has_ended:
            self.close()
            self._wake()
            return
        self.fail(Fault(FaultKind.GARBAGE, reason[:200], is_mid_answer=self._head is not None))

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, timeout_s: float) -> bool:
        """Wait until something came; False if nothing did in time."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _expire, waiter)
        try:
            return await waiter is None
        except TimeoutError:
            return False
        finally:
            timer.cancel()
            self._waiter = None


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def _describe(error: Exception | None) -> str:
    return "the connection was closed" if error is None else type(error).__name__
