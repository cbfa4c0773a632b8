"""One HTTP/1.1 connection to an engine, one exchange at a time. The parser is httptools (llhttp).

Why not a client library: with an 8k-token prompt, uvicorn and httpx add 1.8 ms to a request, uvicorn and aiohttp
0.4 ms, this module 0.2 ms (docs/research/decisions/forwarding.md). Nothing waits here: whoever sent the
request is called when something of its answer has come (docs/research/decisions/forwarding.md).

A connection is used again only after an answer that ended where its head said, with nothing behind it. Bytes that
nobody asked for close it: they must never become part of the next client's answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import httptools

from semantickv.edge.faults import Fault, FaultKind
from semantickv.edge.headers import RawHeaders

MOST_HEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Status and headers of an engine's answer; names in lower case."""

    status: int
    headers: RawHeaders


class AnswerTaker(Protocol):
    """Who sent a request: it is called as the answer comes. After a last piece or a fault nothing comes any more."""

    def take_head(self, head: AnswerHead) -> None:
        """Take status and headers. A piece follows at once; it may be empty."""

    def take_piece(self, piece: bytes, *, is_last: bool) -> None:
        """Take bytes of the answer."""

    def take_fault(self, fault: Fault) -> None:
        """Take the reason for which there is no answer, or no end of it."""


class EngineConnection(asyncio.Protocol):
    """Use `send`; the taker gets what comes. `let_go` ends an exchange from outside, and the taker hears no more."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._taker: AnswerTaker | None = None
        self._is_clean = True
        self._is_lost = False
        self._reset()

    def _reset(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: AnswerHead | None = None
        self._is_head_taken = False
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._has_ended = False
        self._ends_with_connection = False
        self.has_bytes = False
        """Whether anything has come back in this exchange."""

    # -- the exchange ----------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, taker: AnswerTaker) -> None:
        """Begin an exchange: write a request. Only on a connection that `is_reusable`, or a new one."""
        assert self._transport is not None
        self._reset()
        self._taker = taker
        self._parser = httptools.HttpResponseParser(self)
        if len(body) <= 1 << 16:
            self._transport.write(head + body)  # one packet where it fits
        else:
            self._transport.writelines((head, body))

    def pause(self) -> None:
        """Read no more for now: the client does not keep up."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def let_go(self) -> None:
        """Call the taker no more. An answer that has not ended is cut."""
        self._taker = None
        if not self._has_ended:
            self.close()

    def close(self) -> None:
        """Close the connection; its taker hears no more of it."""
        self._is_clean = False
        self._taker = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def has_head(self) -> bool:
        """Whether the answer has begun."""
        return self._head is not None

    @property
    def is_reusable(self) -> bool:
        """Whether another exchange may begin here: `send` drops what nobody read of the last answer."""
        transport = self._transport
        return (
            self._is_clean
            and not self._is_lost
            and (self._has_ended or self._parser is None)
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0
        )

    # -- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        if self._taker is None:
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
        self._deliver()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._transport = None
        if self._head is None:
            self._fail(Fault(FaultKind.CLOSED_EARLY, _describe(exc)))
        elif self._ends_with_connection and exc is None:
            self._has_ended = True
            self._deliver()
        else:
            self._fail(Fault(FaultKind.CUT_OFF, _describe(exc), is_mid_answer=True))

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
        self._ends_with_connection = True
        for name, _ in self._headers:
            if name in _FRAMING:
                self._ends_with_connection = False
        self._head = AnswerHead(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if not self._has_ended:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._head is None:  # 100 Continue, 103 Early Hints: the answer is still to come
            self._headers = []
            return
        self._has_ended = True
        if not self._parser.should_keep_alive():
            self._is_clean = False

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Give the taker what the last bytes held: a head, the pieces of the body as one, the end."""
        taker = self._taker
        if taker is None or self._head is None:
            return
        is_new = not self._is_head_taken
        if is_new:
            self._is_head_taken = True
            taker.take_head(self._head)
            if self._taker is not taker:
                return  # it wanted no more than the head
        if not (is_new or self._pieces or self._has_ended):
            return
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        if self._has_ended:
            self._taker = None
        taker.take_piece(piece, is_last=self._has_ended)

    def _refuse(self, reason: str) -> None:
        """End the exchange because the engine's bytes are not HTTP. An answer that was whole before them stays so."""
        self._is_clean = False
        if self._has_ended:
            self._deliver()
        elif self._is_head_taken:
            self._deliver()  # what came before the garbage is passed on first
            self._fail(Fault(FaultKind.GARBAGE, reason[:200], is_mid_answer=True))
        else:
            self._fail(Fault(FaultKind.GARBAGE, reason[:200]))

    def _fail(self, fault: Fault) -> None:
        """End the exchange with a fault, if there is one under way."""
        taker = self._taker
        self.close()
        if taker is not None:
            taker.take_fault(fault)


_FRAMING = (b"content-length", b"transfer-encoding")


def _describe(error: Exception | None) -> str:
    return "the connection was closed" if error is None else type(error).__name__
