"""Writes a trace from the KV events that an engine publishes, while it serves. No token leaves this process."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any

from semantickv.engine_state.events import KvEvent
from semantickv.engine_state.subscriber import EventSource, EventSubscriber
from semantickv.traces.kv_events import EventTrace
from semantickv.traces.request import TraceRequest
from semantickv.traces.trace_writer import TraceWriter

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
        blocks = zip(request.block_ids, request.block_tokens, strict=True)
        return {
            "request_id": request.request_id,
            "timestamp_ms": round(request.arrival_s * 1000, 3),
            "blocks": [
                {"content_hash": self._hash(f"{content}"), "semantic_type": "other", "token_count": tokens}
                for content, tokens in blocks
            ],
            "tenant_id": "default" if request.tenant == "default" else self._hash(request.tenant),
            "metadata": {"source": "kv_events"},
        }

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).hexdigest()
