"""An engine that does what a test tells it to, on a real socket: answers, streams, hangs, refuses, dies, lies.

async with ScriptedEngine() as engine:
    engine.plan(stream(b"data: 1\\n\\n", b"data: 2\\n\\n"), die_after(b"data: 1\\n\\n"))
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it came over the wire; names of headers in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class EngineSide:
    """What a behaviour has in hand: the request, and the wire to answer on."""

    request: SeenRequest
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    engine: ScriptedEngine

    async def say(self, data: bytes) -> None:
        """Put bytes on the wire as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def begin_stream(self, status: int = 200, headers: str = "") -> None:
        """Begin an answer of events in chunks."""
        await self.say(
            f"HTTP/1.1 {status} OK\r\ncontent-type: text/event-stream\r\n{headers}"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )

    async def send_chunk(self, data: bytes) -> None:
        """Put one chunk of a chunked answer on the wire; an empty one ends it."""
        await self.say(b"%x\r\n%s\r\n" % (len(data), data))

    async def wait_for_leaving(self) -> None:
        """Wait until the other side closes the connection, and note it."""
        await self.reader.read()
        self.engine.left.set()


Behaviour = Callable[[EngineSide], Awaitable[None]]


def answer_json(value: Any, *, status: int = 200, headers: str = "") -> Behaviour:
    """Answer with JSON and its length."""

    async def behave(side: EngineSide) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        await side.say(head.encode() + body)

    return behave


def stream(*pieces: bytes, gate: asyncio.Event | None = None, headers: str = "") -> Behaviour:
    """Stream pieces, one chunk each; with a ``gate``, all but the first wait for it."""

    async def behave(side: EngineSide) -> None:
        await side.begin_stream(headers=headers)
        for number, piece in enumerate(pieces):
            if number and gate is not None:
                await gate.wait()
            await side.send_chunk(piece)
        await side.send_chunk(b"")

    return behave


def die_after(*pieces: bytes) -> Behaviour:
    """Stream some pieces, then cut the connection without an end; without pieces, before the answer begins."""

    async def behave(side: EngineSide) -> None:
        if pieces:
            await side.begin_stream()
        for piece in pieces:
            await side.send_chunk(piece)
        side.writer.transport.abort() if not pieces else side.writer.close()

    return behave


def hang(*pieces: bytes) -> Behaviour:
    """Send nothing more after these pieces, until the other side leaves."""

    async def behave(side: EngineSide) -> None:
        if pieces:
            await side.begin_stream()
        for piece in pieces:
            await side.send_chunk(piece)
        await side.wait_for_leaving()

    return behave


def send_raw(data: bytes, *, close: bool = True) -> Behaviour:
    """Put any bytes on the wire, HTTP or not."""

    async def behave(side: EngineSide) -> None:
        await side.say(data)
        if close:
            side.writer.close()

    return behave


@dataclass(slots=True)
class ScriptedEngine:
    """Behaves as planned, request by request; without a plan it answers ``{"ok": true}``."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    default: Behaviour = field(default_factory=lambda: answer_json({"ok": True}))
    health: Behaviour | None = field(default_factory=lambda: answer_json({"status": "ok"}))
    """What it says to health checks, beside the plan and uncounted; None: they are requests like any other."""
    requests: list[SeenRequest] = field(default_factory=list)
    connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the other side closed a connection on which the engine hung."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request has come in."""
    _plans: deque[Behaviour] = field(default_factory=deque)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}"

    def plan(self, *behaviours: Behaviour) -> None:
        """Add what the engine does with its next requests."""
        self._plans.extend(behaviours)

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after `stop`, on the same port again."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port, ssl=self.tls, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while not writer.is_closing() and (request := await _read_request(reader)) is not None:
                if self.health is not None and request.target == "/health":
                    await self.health(EngineSide(request, reader, writer, self))
                    continue
                self.requests.append(request)
                self.arrived.set()
                behaviour = self._plans.popleft() if self._plans else self.default
                await behaviour(EngineSide(request, reader, writer, self))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the other side left: what a test wants to see is in `left`
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> SeenRequest | None:
    """Read a request with a Content-Length or without a body; None if the other side closed before it."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return SeenRequest(method, target, headers, body)
