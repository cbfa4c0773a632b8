"""Sends a request to an engine and passes its answer on: first byte, cancellation both ways, nothing changed.

::

    client ──receive──▶ ClientWatch ──left──▶ the engine's connection is closed: it stops computing
    engine ──read──▶ relay ──send──▶ client    a slow client holds 256 KiB of the answer, then the engine waits
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semantickv.edge.addresses import EngineAddress
from semantickv.edge.connection import AnswerHead, EngineConnection
from semantickv.edge.faults import Fault, FaultKind
from semantickv.edge.headers import RawHeaders, select_response_headers
from semantickv.edge.pool import ConnectionPool

if TYPE_CHECKING:
    from starlette.types import Receive, Send


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


class ClientWatch:
    """Waits for the client to leave and closes the engine's connection then. Start it once the body was read."""

    def __init__(self, receive: Receive) -> None:
        self.has_left = False
        self._connection: EngineConnection | None = None
        self._task = asyncio.ensure_future(self._watch(receive))

    def guard(self, connection: EngineConnection | None) -> None:
        """Name the connection to close, or None when its exchange is over."""
        self._connection = connection

    def stop(self) -> None:
        """Stop waiting."""
        self._connection = None
        self._task.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        if self._connection is not None:
            self._connection.fail(CLIENT_LEFT)


CLIENT_LEFT = Fault(FaultKind.CLIENT_LEFT)


class EngineAnswer:
    """An answer that has begun. `close` it in any case: a connection that was not read to its end is cut."""

    def __init__(
        self,
        head: AnswerHead,
        connection: EngineConnection,
        pool: ConnectionPool,
        watch: ClientWatch,
        silence_s: float,
    ) -> None:
        self.head = head
        self._connection = connection
        self._pool = pool
        self._watch = watch
        self._silence_s = silence_s
        self._is_closed = False

    async def read(self) -> bytes | Fault:
        """Wait for the next bytes; none at the end."""
        return await self._connection.read(self._silence_s)

    @property
    def is_read(self) -> bool:
        """Whether nothing more will come."""
        return self._connection.is_read

    def close(self) -> None:
        """Give the connection back. From here on it may serve another client: this one's watch must let go of it."""
        if not self._is_closed:
            self._is_closed = True
            self._watch.guard(None)
            self._pool.give_back(self._connection)


async def open_answer(
    pool: ConnectionPool, request: OutgoingRequest, timeouts: EngineTimeouts, watch: ClientWatch
) -> EngineAnswer | Fault:
    """Send the request and wait for the head of the answer.

    An idle connection may have been closed by the engine in this moment. Then the request goes out once more, on a new
    connection: not one byte had come back.
    """
    for fresh in (False, True):
        taken = await pool.take(fresh=fresh)
        if isinstance(taken, Fault):
            return taken
        connection = taken.connection
        answer: EngineAnswer | None = None
        try:
            watch.guard(connection)
            if watch.has_left:
                return CLIENT_LEFT
            connection.send(request.write_head(pool.address), request.body)
            head = await connection.read_head(timeouts.answer_s)
            if isinstance(head, AnswerHead):
                answer = EngineAnswer(head, connection, pool, watch, timeouts.silence_s)
                return answer
        except BaseException:
            connection.close()
            raise
        finally:
            if answer is None:
                watch.guard(None)
                pool.give_back(connection)
        if not (taken.is_used and head.kind is FaultKind.CLOSED_EARLY and not connection.has_bytes):
            return head
    return Fault(FaultKind.CLOSED_EARLY)  # not reached: the second connection is new


async def relay(
    answer: EngineAnswer,
    send: Send,
    watch: ClientWatch,
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    observe: Callable[[bytes], None] | None = None,
) -> Fault | None:
    """Pass an answer on to the client, with ``headers`` of ours; show every piece to ``observe``.

    After a fault the answer is left unfinished, and the server closes the client's connection: a client must not take
    half an answer for a whole one.
    """
    ours = list(headers)
    kept = select_response_headers(answer.head.headers, (name for name, _ in ours))
    await send({"type": "http.response.start", "status": answer.head.status, "headers": kept + ours})
    while True:
        piece = await answer.read()
        if isinstance(piece, Fault):
            return piece
        if watch.has_left:
            return CLIENT_LEFT
        if observe is not None and piece:
            observe(piece)
        if answer.is_read:
            answer.close()  # before the last send: once it is out, the server reports the client as gone
            await send({"type": "http.response.body", "body": piece})
            return None
        await send({"type": "http.response.body", "body": piece, "more_body": True})
