"""A trace from KV events. An event says which blocks were stored behind which; requests are put together from that.

A request is the chain of blocks from the first to the last one that it stored: what stands before the stored blocks was
hit. Three things are not in the events. A request that hits completely stores nothing and is missing, so true hit rates
are higher than those of the trace. The blocks of an answer are stored as they fill: one block behind the end of a
request belongs to it. A long prompt is stored in several steps: blocks behind the end of a request that was stored less
than `JOIN_S` before belong to it too.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from semantickv.engine_state.events import (
    MOST_BLOCKS,
    AllBlocksCleared,
    BadEventsError,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEvent,
    encode_batch,
    read_timed_batch,
)
from semantickv.engine_state.subscriber import EventSource, EventSubscriber
from semantickv.traces.engine_logs import Parser, TraceRequest, hash_tokens
from semantickv.traces.trace_writer import TraceWriter
from semblend.text.log_formats import BadFieldError

JOIN_S = 2.0


@dataclass(slots=True)
class _Chain:
    """A request that may still grow."""

    arrival_s: float
    latest_s: float
    salt: str
    block_size: int
    ids: list[int] = field(default_factory=list)


class EventTrace:
    """Takes events in order of time, gives requests in order of arrival. ``left_out`` counts what has no beginning."""

    def __init__(self) -> None:
        self.left_out = self._number = 0
        self._begin: float | None = None
        self._blocks: OrderedDict[BlockHash, tuple[BlockHash | None, int, str]] = OrderedDict()
        self._tails: dict[BlockHash, _Chain] = {}
        self._open: list[_Chain] = []

    def take(self, time_s: float, events: Iterable[KvEvent]) -> list[TraceRequest]:
        """Take the events of one moment; return the requests that have ended by then."""
        self._begin = time_s if self._begin is None else self._begin
        now = max(0.0, time_s - self._begin)
        for event in events:
            if isinstance(event, BlockStored):
                self._store(now, event)
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    self._blocks.pop(one, None)
                    self._tails.pop(one, None)
            elif isinstance(event, AllBlocksCleared):
                self.forget()
        return self._give(now - JOIN_S)

    def forget(self) -> None:
        """Events were lost, or the cache is empty: no block has a known beginning any more."""
        self._blocks.clear()
        self._tails.clear()

    def finish(self) -> list[TraceRequest]:
        """Return the requests that were still open."""
        return self._give(float("inf"))

    def _store(self, now: float, event: BlockStored) -> None:
        size, parent, count = event.block_size, event.parent, len(event.block_hashes)
        chain = None if parent is None else self._tails.pop(parent, None)
        if chain is None or not (count == 1 or now - chain.latest_s < JOIN_S):
            before = self._list_ids(parent)
            if before is None:
                self.left_out += 1
                return
            chain = _Chain(now, now, event.salt if parent is None else self._blocks[parent][2], size, before)
            self._open.append(chain)
        stored = [hash_tokens(event.token_ids[at * size : (at + 1) * size]) for at in range(count)]
        if now - chain.latest_s < JOIN_S:  # later blocks are of its answer
            chain.latest_s = now
            chain.ids += stored
        for block_hash, content in zip(event.block_hashes, stored, strict=True):
            self._blocks[block_hash] = (parent, content, chain.salt)
            parent = block_hash
        if parent is not None:
            self._tails[parent] = chain
        while len(self._blocks) > MOST_BLOCKS:
            self._tails.pop(self._blocks.popitem(last=False)[0], None)

    def _list_ids(self, last: BlockHash | None) -> list[int] | None:
        """The contents of the blocks up to ``last``, from the first one on; None where one of them is not known."""
        found: list[int] = []
        while last is not None:
            if last not in self._blocks or len(found) > len(self._blocks):  # the second: a chain that bites its tail
                return None
            last, content, _ = self._blocks[last]
            found.append(content)
        return found[::-1]

    def _give(self, before_s: float) -> list[TraceRequest]:
        ready = 0
        while ready < len(self._open) and self._open[ready].latest_s <= before_s:
            ready += 1
        given, self._open = self._open[:ready], self._open[ready:]
        return [self._build(chain) for chain in given]

    def _build(self, chain: _Chain) -> TraceRequest:
        self._number += 1
        count = len(chain.ids)
        return TraceRequest(
            str(self._number), chain.arrival_s, tuple(chain.ids), (chain.block_size,) * count, ("other",) * count,
            tenant=chain.salt or "default",
        )  # fmt: skip


class EventParser(Parser):
    """Lines of batches: ``{"batch": "<base64 of the message>"}``, or the batch as JSON, ``[time, events, rank]``."""

    hint = 'one batch a line: {"batch": base64 of the ZMQ message}, or [time, [events], rank]'

    def __init__(self) -> None:
        self._trace = EventTrace()
        self.left_out = 0

    def parse(self, line: bytes | None, _: int) -> Iterable[TraceRequest]:
        if line is None:
            raise BadFieldError("line", "too long")
        try:
            time_s, events = read_timed_batch(_read_message(json.loads(line)))
        except (ValueError, RecursionError, BadEventsError) as error:
            self._trace.forget()  # what it would have told is not known
            raise BadFieldError("batch", str(error)) from None
        found = self._trace.take(time_s, events)
        self.left_out = self._trace.left_out
        return found

    def finish(self) -> Iterable[TraceRequest]:
        return self._trace.finish()


def _read_message(record: Any) -> bytes:
    """The message as the engine sent it."""
    if isinstance(record, dict) and isinstance(record.get("batch"), str):
        try:
            return base64.b64decode(record["batch"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from None
    return encode_batch(record)


LOOK_AGAIN_S = 0.5


class EventCollector:
    """Takes events as an `EventSink` and writes a line for each request that they show.

    ``key`` hashes the ids of blocks, so that nobody can guess short texts from them. ``clock`` gives seconds.
    """

    def __init__(
        self, source: EventSource, writer: TraceWriter, *, key: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.subscriber = EventSubscriber(source, self)
        self._writer, self._key, self._clock = writer, key.encode()[:64], clock
        self._trace = EventTrace()

    @property
    def left_out(self) -> int:
        """Stored blocks whose beginning was not seen."""
        return self._trace.left_out

    async def take(self, events: list[KvEvent]) -> None:
        """Take the events of one batch."""
        self._write(self._trace.take(self._clock(), events))

    def note_loss(self) -> None:
        """Events were lost for good."""
        self._trace.forget()

    async def run(self, most_requests: int | None = None) -> None:
        """Listen until so many requests are written, or until cancelled; what is still open is written at the end."""
        listening = asyncio.ensure_future(self.subscriber.run())
        try:
            while most_requests is None or self._writer.written < most_requests:
                done, _ = await asyncio.wait([listening], timeout=LOOK_AGAIN_S)
                if done:
                    listening.result()
                    return
                self._write(self._trace.take(self._clock(), ()))
        finally:
            listening.cancel()
            self._write(self._trace.finish())

    def _write(self, requests: list[TraceRequest]) -> None:
        for request in requests:
            self._writer.put(self._writer.take_ticket(), self._describe(request))

    def _describe(self, request: TraceRequest) -> dict[str, Any]:
        line = request.as_json()
        for block in line["blocks"]:
            block["content_hash"] = self._hash(f"{block['content_hash']}")
        tenant = request.tenant if request.tenant == "default" else self._hash(request.tenant)
        return line | {"tenant_id": tenant, "metadata": {"source": "kv_events"}}

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).hexdigest()
