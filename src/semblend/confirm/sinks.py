"""Where events go. A sink that fails costs its own events and nothing else: the caller never sees it."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from semblend.config import SemBlendConfig
from semblend.confirm.events import Event
from semblend.errors import ConfigError

_log = logging.getLogger("semblend")

FAILURE_LIMIT = 10
"""A sink that failed so often in a row is given up."""


class Sink(Protocol):
    """Takes events. ``emit`` may raise: the `EventStream` around it counts that."""

    def emit(self, event: Event) -> None:
        """Take one event, quickly."""

    def close(self) -> None:
        """Write what is left and release what is held. Called once."""


class MemorySink:
    """Keeps the newest ``limit`` events."""

    def __init__(self, limit: int = 10_000) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self._lock = threading.Lock()

    @property
    def events(self) -> tuple[Event, ...]:
        """Oldest first."""
        with self._lock:
            return tuple(self._events)

    def emit(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def close(self) -> None:
        pass


class CallbackSink:
    """Hands every event to a function, in the caller's thread."""

    def __init__(self, callback: Callable[[Event], object]) -> None:
        self._callback = callback

    def emit(self, event: Event) -> None:
        self._callback(event)

    def close(self) -> None:
        pass


class FileSink:
    """Appends JSON lines to a file that only its owner may read.

    Each line is one ``write`` to a file opened for appending, so several processes may share the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # O_NONBLOCK: a pipe that nobody reads must cost events, not a request. A file is not changed by it.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._fd: int | None = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write events to {self.path}: {error.strerror}",
                hint="name a file in a folder you may write to (SEMBLEND_EVENTS)",
            ) from None
        self._torn = _ends_inside_a_line(self._fd)

    def emit(self, event: Event) -> None:
        line = event.to_json_line().encode("ascii") + b"\n"
        with self._lock:  # also keeps close() from freeing the descriptor's number under a write
            if self._fd is None:
                raise ValueError(f"{self.path} is closed")
            if self._torn:
                line = b"\n" + line
            written = os.write(self._fd, line)
            self._torn = written < len(line)
            if self._torn:
                raise OSError(f"wrote {written} of {len(line)} bytes to {self.path}; is the disk full?")

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def _ends_inside_a_line(fd: int) -> bool:
    """Whether a crash left half a line, which must not swallow our first one."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


@dataclass(frozen=True, slots=True)
class SinkHealth:
    """How a sink of a stream fares."""

    name: str
    failures: int
    dropped: bool


class _Watched:
    """A sink and its record."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.active = True
        self.failures = 0
        self.in_a_row = 0
        self.dropped = False

    @property
    def name(self) -> str:
        return type(self.sink).__name__


class EventStream:
    """Hands each event to every sink; falsy when it has none, so that a caller can skip making events.

    A failing sink never raises into the caller: its failures are counted, the first one is logged, and after
    `FAILURE_LIMIT` in a row the sink is dropped.

    >>> memory = MemorySink()
    >>> bool(EventStream()), bool(EventStream([memory]))
    (False, True)
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._watched = tuple(_Watched(sink) for sink in sinks)
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return any(watched.active for watched in self._watched)

    @property
    def health(self) -> tuple[SinkHealth, ...]:
        """One entry per sink, in the order they were given."""
        return tuple(SinkHealth(watched.name, watched.failures, watched.dropped) for watched in self._watched)

    def emit(self, event: Event) -> None:
        for watched in self._watched:
            if not watched.active:
                continue
            try:
                watched.sink.emit(event)
            except Exception as error:  # telemetry must never break a request; the failure is counted and logged
                self._log_failure(watched, error)
            else:
                watched.in_a_row = 0

    def close(self) -> None:
        """Close every sink; events that come later go nowhere."""
        for watched in self._watched:
            if watched.active:
                self._shut(watched)

    def _log_failure(self, watched: _Watched, error: Exception) -> None:
        with self._lock:
            watched.failures += 1
            watched.in_a_row += 1
            first = watched.failures == 1
            last = watched.in_a_row >= FAILURE_LIMIT and not watched.dropped
            watched.dropped |= last
        if first:
            _log.warning("event sink %s failed: %s", watched.name, error or type(error).__name__)
        if last:
            _log.warning("event sink %s is given up after %d failures in a row", watched.name, FAILURE_LIMIT)
            self._shut(watched)

    def _shut(self, watched: _Watched) -> None:
        watched.active = False
        try:
            watched.sink.close()
        except Exception as error:  # as in emit
            _log.warning("event sink %s did not close: %s", watched.name, error or type(error).__name__)


def open_stream(config: SemBlendConfig, *sinks: Sink) -> EventStream:
    """The stream that the settings ask for (``events``, ``nats_url``), plus the sinks given."""
    chosen: list[Sink] = list(sinks)
    if config.events:
        chosen.append(FileSink(Path(config.events).expanduser()))
    if config.nats_url:
        from semblend.confirm.nats_sink import NatsSink  # brings asyncio, which few need

        chosen.append(NatsSink(config.nats_url, config.nats_subject))
    return EventStream(chosen)
