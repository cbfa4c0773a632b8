"""Listens to one engine's KV events and keeps their order: gaps are filled from the engine's replay buffer.

::

    PUB ──[topic, number, batch]──▶ SUB     number = last + 1: apply
                                            number > last + 1: ask ROUTER for what was missed, then apply
                                            number < last:     the engine began anew, its cache is empty
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from semantickv.engine_state.events import MOST_BYTES, AllBlocksCleared, BadEventsError, KvEvent, read_batch
from semblend.errors import ConfigError, MissingDependencyError

REPLAY_S = 2.0
"""How long to wait for the next batch of a replay."""
MOST_WAITING = 10_000
"""Batches that ZMQ holds for us; vLLM and SGLang keep as many for a replay."""
_END = (1 << 64) - 1


class EventSink(Protocol):
    """Who takes events, in order."""

    async def take(self, events: list[KvEvent]) -> None:
        """Take the events of one batch."""

    def note_loss(self) -> None:
        """Events were lost for good."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine publishes, and where it answers for what was missed; empty if it does not.

    >>> EventSource.parse("tcp://10.0.0.1:5557|tcp://10.0.0.1:5558").replay
    'tcp://10.0.0.1:5558'
    """

    endpoint: str
    replay: str = ""

    @classmethod
    def parse(cls, text: str) -> EventSource:
        """Read ``endpoint`` or ``endpoint|replay``."""
        endpoint, _, replay = (part.strip() for part in text.partition("|"))
        for one in (endpoint, replay):
            if one and not one.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{one!r} is no address of KV events", hint="for example tcp://127.0.0.1:5557")
        return cls(endpoint, replay)


class EventSubscriber:
    """Runs until cancelled. Counts what it saw: ``batches``, ``replayed``, ``bad``, ``losses``, ``restarts``.

    ``is_catching_up``: what is taken now happened before we listened, and perhaps long before.
    """

    def __init__(self, source: EventSource, sink: EventSink) -> None:
        self.source = source
        self.batches = self.replayed = self.bad = self.losses = self.restarts = 0
        self.is_catching_up = False
        self._sink = sink
        self._last = self._last_live = -1
        self._last_data = b""
        self._was_cut = False

    async def run(self) -> None:
        """Connect, take what the engine still has in its buffer, then listen. ZMQ connects again by itself."""
        zmq = import_zmq()
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        watch: asyncio.Task[None] | None = None
        try:
            socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
            socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
            watch = asyncio.ensure_future(self._watch(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)))
            socket.connect(self.source.endpoint)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            await self._catch_up(context)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
                else:
                    self.bad += 1
        finally:
            if watch is not None:
                watch.cancel()
            socket.disable_monitor()
            context.destroy(0)

    async def _catch_up(self, context: Any) -> None:
        """Take what happened before we listened, as far as the engine still has it."""
        self.is_catching_up = True
        try:
            await self._fill(await self._ask(context, 0))
        finally:
            self.is_catching_up = False

    async def _watch(self, monitor: Any) -> None:
        """Note that the connection was cut: behind it there may be another engine now."""
        while True:
            await monitor.recv_multipart()
            self._was_cut = True

    async def _take(self, context: Any, number: int, data: bytes) -> None:
        """Take one batch as it comes from the engine."""
        if self._was_cut:
            self._was_cut = False
            await self._compare(context, number)
        elif number <= self._last_live:
            await self._begin_anew()
        self._last_live = number
        if number <= self._last:
            return  # a replay brought it
        if number > self._last + 1:
            await self._fill(await self._ask(context, self._last + 1))
        if number <= self._last:
            return
        self._check(number)
        await self._apply(number, data)

    async def _compare(self, context: Any, number: int) -> None:
        """After a cut: the same engine has the batch that we saw last, another one has not."""
        found = await self._ask(context, 0)
        if number <= self._last_live or (found and (self._last, self._last_data) not in found):
            await self._begin_anew()
        await self._fill(found)

    async def _begin_anew(self) -> None:
        self.restarts += 1
        self._last = self._last_live = -1
        await self._sink.take([AllBlocksCleared()])

    async def _fill(self, batches: list[tuple[int, bytes]]) -> None:
        """Apply what a replay brought and we have not seen."""
        for number, data in batches:
            if number > self._last:
                self._check(number)
                self.replayed += 1
                await self._apply(number, data)

    def _check(self, number: int) -> None:
        """Tell of a gap that nothing can fill any more."""
        if number > self._last + 1 and self._last >= 0:
            self.losses += 1
            self._sink.note_loss()

    async def _apply(self, number: int, data: bytes) -> None:
        self._last, self._last_data = number, data
        self.batches += 1
        try:
            events = read_batch(data)
        except BadEventsError:
            self.bad += 1
            self._sink.note_loss()  # what it would have told is not known
            return
        await self._sink.take(events)

    async def _ask(self, context: Any, start: int) -> list[tuple[int, bytes]]:
        """Ask for every batch from ``start`` on that the engine still has; nothing if it does not answer."""
        found: list[tuple[int, bytes]] = []
        if not self.source.replay:
            return found
        zmq = import_zmq()
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
            socket.connect(self.source.replay)
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while len(found) < MOST_WAITING:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                number = int.from_bytes(frames[-2], "big") if len(frames) >= 3 else _END
                if number == _END:
                    break
                found.append((number, frames[-1]))
        except TimeoutError:
            pass
        finally:
            socket.close(0)
        return found


def import_zmq() -> Any:
    """Import pyzmq with its sockets for asyncio; an error with a hint where it is not installed."""
    try:
        import zmq
        import zmq.asyncio
    except ImportError:
        raise MissingDependencyError("KV events need pyzmq", hint="pip install 'semblend-suite[edge]'") from None
    return zmq
