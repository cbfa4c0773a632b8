"""Sends a request to an engine and passes its answer on, byte for byte: deadlines, cancellation, back-pressure.

::

    Forwarding ──begin──▶ EngineExchange ──send──▶ EngineConnection ──▶ engine
        ▲                     │ take_head, take_piece, take_fault ◀──────┘
        └─────────────────────┘
    leave, pause, resume ──▶ the client's side left, does not keep up, keeps up again

Nothing of it waits, and no task runs for a request: one call leads to the next, from the socket that bytes came in at
to the socket that they go out at. Only a new connection is opened by a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from semantickv.edge.addresses import EngineAddress
from semantickv.edge.connection import AnswerHead, AnswerTaker, EngineConnection
from semantickv.edge.faults import Fault, FaultKind
from semantickv.edge.headers import RawHeaders
from semantickv.edge.pool import ConnectionPool

CLIENT_LEFT = Fault(FaultKind.CLIENT_LEFT)


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long an engine may take, in seconds: to begin its answer, and between two pieces of it."""

    answer_s: float = 600.0
    silence_s: float = 600.0


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request for an engine. ``target`` is the path with its query; ``headers`` hold no host and no length."""

    method: str
    target: str
    headers: RawHeaders
    body: bytes

    def write_head(self, address: EngineAddress) -> bytes:
        """Write the request line and the headers for one engine."""
        lines = [
            f"{self.method} {address.path}{self.target} HTTP/1.1\r\nhost: {address.authority}\r\n".encode("latin-1")
        ]
        lines += [b"%b: %b\r\n" % header for header in self.headers]
        if self.body or self.method not in ("GET", "DELETE"):
            lines.append(b"content-length: %d\r\n" % len(self.body))
        lines.append(b"\r\n")
        return b"".join(lines)


class ClientSide(Protocol):
    """Where an answer goes. Nothing here waits: a side that does not keep up says `ForwardedRequest.pause`."""

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Begin the answer. A piece follows at once; it may be empty."""

    def write(self, piece: bytes, *, is_last: bool) -> None:
        """Write bytes of the answer."""

    def cut(self) -> None:
        """Leave the answer unfinished and close: a client must not take half an answer for a whole one."""


class ForwardedRequest(Protocol):
    """A request under way, as its client's side sees it."""

    def leave(self) -> None:
        """The client has left: the engine's connection is closed, and it stops computing."""

    def pause(self) -> None:
        """The client does not keep up: read no more of the answer for now."""

    def resume(self) -> None:
        """The client keeps up again."""

    def stop(self) -> None:
        """This server stops: cut the answer."""


class EngineExchange:
    """One request on one engine. After `begin` the taker gets the answer or a fault, unless `cancel` comes first.

    An idle connection may have been closed by the engine in this moment. Then the request goes out once more, on a new
    connection: not one byte had come back.
    """

    __slots__ = (
        "_connection", "_heard_at", "_is_over", "_is_paused", "_is_used", "_limit_s", "_loop", "_opening", "_pool",
        "_request", "_taker", "_timeouts", "_timer",
    )  # fmt: skip

    def __init__(
        self, pool: ConnectionPool, request: OutgoingRequest, timeouts: EngineTimeouts, taker: AnswerTaker
    ) -> None:
        self._pool = pool
        self._request = request
        self._timeouts = timeouts
        self._taker = taker
        self._loop = asyncio.get_running_loop()
        self._connection: EngineConnection | None = None
        self._opening: asyncio.Task[EngineConnection | Fault] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._limit_s = timeouts.answer_s
        self._is_used = self._is_over = self._is_paused = False

    def begin(self) -> None:
        """Send the request, on an idle connection if there is one."""
        connection = self._pool.take_idle()
        if connection is None:
            self._open()
        else:
            self._is_used = True
            self._send(connection)

    def cancel(self) -> None:
        """Stop: close the engine's connection. The taker hears no more."""
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.let_go()
        self._end()

    def pause(self) -> None:
        """Read no more of the answer for now."""
        if not self._is_paused and self._connection is not None:
            self._is_paused = True
            self._connection.pause()

    def resume(self) -> None:
        """Read on. The silence so far was ours."""
        if self._is_paused and self._connection is not None:
            self._is_paused = False
            self._heard_at = self._loop.time()
            self._connection.resume()

    # -- what the connection calls ---------------------------------------------------------------------------------

    def take_head(self, head: AnswerHead) -> None:
        self._heard_at = self._loop.time()
        self._limit_s = self._timeouts.silence_s
        if self._timeouts.silence_s < self._timeouts.answer_s:
            self._set_timer(self._limit_s)
        self._taker.take_head(head)

    def take_piece(self, piece: bytes, *, is_last: bool) -> None:
        if is_last:
            self._end()  # the connection is free for the next request before the client has all of this one's answer
        else:
            self._heard_at = self._loop.time()
        self._taker.take_piece(piece, is_last=is_last)

    def take_fault(self, fault: Fault) -> None:
        connection = self._connection
        assert connection is not None
        if self._is_used and fault.kind is FaultKind.CLOSED_EARLY and not connection.has_bytes:
            self._is_used = False
            self._connection = None
            self._pool.give_back(connection)
            self._open()
            return
        self._end()
        self._taker.take_fault(fault)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._opening = asyncio.ensure_future(self._pool.connect())
        self._opening.add_done_callback(self._note_opened)

    def _note_opened(self, opening: asyncio.Task[EngineConnection | Fault]) -> None:
        self._opening = None
        if opening.cancelled():
            return
        error = opening.exception()
        found = Fault(FaultKind.REFUSED, type(error).__name__) if error is not None else opening.result()
        if isinstance(found, EngineConnection):
            if self._is_over:
                self._pool.give_back(found)
            else:
                self._send(found)
        elif not self._is_over:
            self._end()
            self._taker.take_fault(found)

    def _send(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._heard_at = self._loop.time()
        self._set_timer(self._limit_s)
        connection.send(self._request.write_head(self._pool.address), self._request.body, self)

    def _set_timer(self, in_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(in_s, self._check_silence)

    def _check_silence(self) -> None:
        """Give the engine up if it was silent too long. One timer is set for a request, not one for every piece."""
        self._timer = None
        now = self._loop.time()
        if self._is_paused:
            self._heard_at = now
        left_s = self._heard_at + self._limit_s - now
        if left_s > 0:
            self._set_timer(left_s)
            return
        assert self._connection is not None
        if self._connection.has_head:
            fault = Fault(FaultKind.STALLED, f"nothing for {self._limit_s:g} s", is_mid_answer=True)
        else:
            fault = Fault(FaultKind.NO_ANSWER, f"no answer in {self._limit_s:g} s")
        self._connection.close()
        self._end()
        self._taker.take_fault(fault)

    def _end(self) -> None:
        """Give the connection back, whole or closed. From here on it may serve another client."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._is_paused:
                connection.resume()
            self._pool.give_back(connection)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that was read to its end."""

    status: int
    body: bytes


async def fetch(
    pool: ConnectionPool, request: OutgoingRequest, timeouts: EngineTimeouts, *, most_bytes: int = 1 << 20
) -> WholeAnswer | Fault:
    """Ask an engine something of our own, and wait for the whole answer; longer than ``most_bytes`` is a fault."""
    reader = _WholeReader(most_bytes)
    exchange = EngineExchange(pool, request, timeouts, reader)
    exchange.begin()
    try:
        return await reader.done
    finally:
        if not reader.has_ended:
            exchange.cancel()


class _WholeReader:
    """Collects an answer."""

    def __init__(self, most_bytes: int) -> None:
        self.done: asyncio.Future[WholeAnswer | Fault] = asyncio.get_running_loop().create_future()
        self.has_ended = False
        self._status = 0
        self._pieces: list[bytes] = []
        self._room = most_bytes

    def take_head(self, head: AnswerHead) -> None:
        self._status = head.status

    def take_piece(self, piece: bytes, *, is_last: bool) -> None:
        self._pieces.append(piece)
        self._room -= len(piece)
        self.has_ended = is_last
        if self._room < 0:
            self._finish(Fault(FaultKind.GARBAGE, "the answer is too long", is_mid_answer=True))
        elif is_last:
            self._finish(WholeAnswer(self._status, b"".join(self._pieces)))

    def take_fault(self, fault: Fault) -> None:
        self.has_ended = True
        self._finish(fault)

    def _finish(self, result: WholeAnswer | Fault) -> None:
        if not self.done.done():
            self.done.set_result(result)
