"""Traces of live traffic, written by a process of their own.

To cut an 8k-token prompt into typed blocks takes 10 ms on one core. In the process that forwards, every other stream
would wait for that. Here a body is handed over and forgotten; where too many wait, a trace is dropped and counted.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from semantickv.traces.collection import Collector, TraceJob
from semantickv.traces.segmentation import Segmenter
from semantickv.traces.trace_writer import MAX_HELD, TraceWriter

MOST_WAITING_BYTES = 64 << 20
LATEST = 100


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Where traces go and what they may hold."""

    path: str
    redact: bool = True
    key: str = ""
    file_bytes: int = 256 << 20
    keep_files: int = 16

    @classmethod
    def in_folder(cls, folder: str, name: str, **known: Any) -> TraceOptions:
        """A new file in a folder, named by the time and ``name``."""
        stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
        return cls(str(Path(folder) / f"{stamp}_{name}.jsonl"), **known)


class TraceWorker:
    """Writes trace lines, in order of arrival. Lives in the process that writes."""

    def __init__(self, options: TraceOptions, first_ticket: int = 0) -> None:
        writer = TraceWriter(
            options.path, most_bytes=options.file_bytes, keep=options.keep_files, first_ticket=first_ticket
        )
        self._collector = Collector(writer, Segmenter(key=options.key), redact=options.redact)

    def write(self, ticket: int, job: TraceJob | None) -> str | None:
        """Write one line and return it; None where there is none."""
        line = None if job is None else self._build(ticket, job)
        writer, lost = self._collector.writer, self._collector.writer.dropped
        writer.put(ticket, line)
        if writer.dropped > lost:
            raise OSError("a line could not be written")
        return None if line is None else json.dumps(line, ensure_ascii=False)

    def _build(self, ticket: int, job: TraceJob) -> dict[str, Any] | None:
        try:
            return self._collector.describe(ticket, job)
        except Exception:  # whatever a body holds costs its own line: this worker writes the lines of all callers
            return None

    def close(self) -> None:
        """Write what waits and close the file."""
        self._collector.writer.close()


class TraceLog:
    """Hands requests to the worker. ``executor`` runs it: a process of its own, or whatever a test passes."""

    def __init__(self, options: TraceOptions, executor: Executor | None = None) -> None:
        self.options = options
        self.written = self.unread = self.dropped = 0
        self.latest: deque[str] = deque(maxlen=LATEST)
        self._make = _make_process if executor is None else lambda: executor
        self._executor: Executor | None = None
        self._tickets = self._first_ticket = 0
        self._open_tickets: set[int] = set()
        self._waiting_bytes = 0
        self._waiting: set[Future[str | None]] = set()

    def take_ticket(self) -> int:
        """Take a place in the order of arrival; every ticket is given back to `submit`."""
        self._tickets += 1
        self._open_tickets.add(self._tickets - 1)
        return self._tickets - 1

    def submit(self, ticket: int, job: TraceJob | None) -> None:
        """Give a ticket back with its request, or with None. Never waits, never raises."""
        size = 0 if job is None else len(job.body)
        if self._waiting_bytes + size > MOST_WAITING_BYTES:
            self.dropped += 1
            size, job = 0, None
        try:
            executor = self._executor or self._begin_worker()
            future = executor.submit(_write, self.options, ticket, job, self._first_ticket)
        except (BrokenExecutor, RuntimeError, OSError):
            self._give_up(job)
            return
        finally:
            self._open_tickets.discard(ticket)
        self._waiting_bytes += size
        self._waiting.add(future)
        future.add_done_callback(self._note_done(size, job))

    def _begin_worker(self) -> Executor:
        """Start a worker. Tickets that went with the one before are given back: nobody waits for their lines."""
        self._executor = self._make()
        self._first_ticket = max(min(self._open_tickets), self._tickets - MAX_HELD)
        for ticket in range(self._first_ticket, self._tickets):
            if ticket not in self._open_tickets:
                self._executor.submit(_write, self.options, ticket, None, self._first_ticket)
        return self._executor

    def close(self) -> None:
        """Wait until everything handed over is written."""
        if self._executor is not None:
            try:
                self._executor.submit(_close, self.options)
            except (BrokenExecutor, RuntimeError):
                pass
            self._executor.shutdown(wait=True)
            self._executor = None

    def _note_done(self, size: int, job: TraceJob | None) -> Callable[[Future[str | None]], None]:
        def note(future: Future[str | None]) -> None:
            self._waiting.discard(future)
            self._waiting_bytes -= size
            if future.cancelled() or isinstance(future.exception(), BrokenExecutor):
                self._give_up(job)
            elif future.exception() is not None:  # the worker lives: this line alone is lost
                self.dropped += job is not None
            elif (line := future.result()) is not None:
                self.written += 1
                self.latest.append(line)
            elif job is not None:
                self.unread += 1

        return note

    def _give_up(self, job: TraceJob | None) -> None:
        """The worker died or cannot start: count what was lost, and begin another one with the next request."""
        self.dropped += job is not None
        self._executor = None


_WORKERS: dict[str, TraceWorker] = {}


def _write(options: TraceOptions, ticket: int, job: TraceJob | None, first_ticket: int = 0) -> str | None:
    """Write one line, in the worker's process, whose first line has ``first_ticket``."""
    if options.path not in _WORKERS:
        _WORKERS[options.path] = TraceWorker(options, first_ticket)
    return _WORKERS[options.path].write(ticket, job)


def _close(options: TraceOptions) -> None:
    worker = _WORKERS.pop(options.path, None)
    if worker is not None:
        worker.close()


def _make_process() -> Executor:
    # Spawned, not forked: the parent has an event loop and sockets that a copy must not hold.
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
