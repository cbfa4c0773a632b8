"""Events over NATS. A module of its own, because it alone needs asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from semblend.confirm.events import Event
from semblend.errors import ConfigError, MissingDependencyError

_log = logging.getLogger("semblend")


class NatsSink:
    """Publishes JSON lines to a NATS subject from a thread of its own; never waits in the caller.

    Events queue up while the server is away. Those that find the queue full are dropped and counted.
    """

    def __init__(self, url: str, subject: str = "semblend.events", *, limit: int = 10_000) -> None:
        self._server = _nats_server(url)
        if not subject or any(letter.isspace() or letter in "*>" for letter in subject):
            raise ConfigError(f"NATS subject {subject!r} cannot be published to", hint="for example semblend.events")
        try:
            import nats.aio.client
        except ImportError:
            raise MissingDependencyError(
                "the NATS sink needs nats-py", hint="pip install 'semblend-suite[telemetry]'"
            ) from None
        self._client: Any = nats.aio.client.Client()
        self._url, self._subject, self._limit = url, subject, limit
        self._lock = threading.Lock()
        self._queue: deque[Event] = deque()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self._deadline = math.inf
        self._dropped = 0
        self._warned = False

    @property
    def dropped(self) -> int:
        """Events that were lost: the queue was full, the server refused them, or it was away at the end."""
        with self._lock:
            return self._dropped

    def emit(self, event: Event) -> None:
        with self._lock:
            if self._closing or len(self._queue) >= self._limit:
                self._dropped += 1
                return
            self._queue.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="semblend-nats", daemon=True)
                self._thread.start()
            elif len(self._queue) == 1:  # otherwise the thread is awake or was told already
                self._rouse()

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, for at most ``timeout_s`` seconds; the rest counts as dropped."""
        with self._lock:
            self._closing = True
            self._deadline = time.monotonic() + timeout_s
            self._rouse()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        with self._lock:
            self._dropped += len(self._queue)
            self._queue.clear()

    def _rouse(self) -> None:
        """Wake the thread. The lock is held, so the loop cannot close meanwhile."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # whatever the client library meets must end here, in our own thread
            self._warn(error)
            with self._lock:
                self._closing = True  # nobody will read the queue again

    async def _serve(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
        try:
            if await self._connect():
                await self._publish_all()
                if self._client.is_connected:
                    await self._client.flush(timeout=1)
        finally:
            with self._lock:
                self._loop = None
            await self._client.close()

    async def _connect(self) -> bool:
        """Try until the server answers; once the sink is closing, only the attempt that is under way."""
        connecting = asyncio.ensure_future(
            self._client.connect(
                self._url,
                connect_timeout=2,
                reconnect_time_wait=1,
                max_reconnect_attempts=-1,
                error_cb=self._on_error,
                reconnected_cb=self._on_reconnect,
            )
        )
        await asyncio.sleep(0)  # let the attempt begin: the client can be closed only after that
        while not connecting.done() and not self._must_leave():
            waiting = asyncio.ensure_future(self._wake.wait())
            left_s = max(0.0, self._deadline - time.monotonic()) if self._closing else None
            await asyncio.wait({connecting, waiting}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            self._wake.clear()
        if not connecting.done():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            return False
        await connecting  # raises what the connection raised
        return True

    def _must_leave(self) -> bool:
        return self._closing and (self._warned or time.monotonic() >= self._deadline)

    async def _publish_all(self) -> None:
        while True:
            while self._client.is_connected and (event := self._take()) is not None:
                await self._publish(event)
            if self._closing:
                return
            await self._wake.wait()
            self._wake.clear()

    def _take(self) -> Event | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    async def _publish(self, event: Event) -> None:
        try:
            await self._client.publish(self._subject, event.to_json_line().encode("ascii"))
        except Exception as error:  # one event must not end the stream: count it, say it once, go on
            with self._lock:
                self._dropped += 1
            self._warn(error)

    async def _on_error(self, error: Exception) -> None:
        self._warn(error)
        self._wake.set()

    async def _on_reconnect(self) -> None:
        self._wake.set()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("events do not reach NATS at %s: %s", self._server, error or type(error).__name__)


def _nats_server(url: str) -> str:
    """Host and port for messages: a URL may hold a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("nats", "tls", "ws", "wss") or not parts.hostname:
        raise ConfigError("the NATS URL is not one", hint="for example nats://localhost:4222 (SEMBLEND_NATS_URL)")
    return f"{parts.hostname}:{parts.port or 4222}"
