"""Appends trace lines to a file in the order in which requests arrived. Whatever fails costs lines, never a request."""

from __future__ import annotations

import heapq
import json
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from semblend.errors import InputError

MAX_HELD = 4096
Json = dict[str, Any]
log = logging.getLogger("semantickv.traces")


class TraceWriter:
    """Appends lines to a file in order of arrival, from any thread.

    Requests end in another order than they arrive. A finished one waits until all before it are finished or given up.
    With ``most_bytes``, a file that has grown so large is followed by another, and of these the last ``keep`` stay.
    A writer that takes over from one that died begins with ``first_ticket``.
    """

    def __init__(self, path: str | Path, *, most_bytes: int = 0, keep: int = 16, first_ticket: int = 0) -> None:
        self.path = self._first = Path(path)
        self.written = self.dropped = 0
        self._most_bytes, self._keep = most_bytes, keep
        self._older: list[Path] = []
        self._lock = threading.Lock()
        self._next_ticket = self._next_out = first_ticket
        self._held: list[tuple[int, str]] = []
        self._complained = False
        self._stream = self._open(self.path)

    def _open(self, path: Path) -> IO[bytes]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = open(path, "ab", buffering=0, opener=_open_private)  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            hint = "pass another --output or --output-dir"
            raise InputError(f"cannot write {path}: {error.strerror}", hint=hint) from None
        self._bytes = os.fstat(stream.fileno()).st_size
        return stream

    def take_ticket(self) -> int:
        """Take a place in the order of arrival; every ticket must be given back to `put`."""
        with self._lock:
            self._next_ticket += 1
            return self._next_ticket - 1

    def put(self, ticket: int, line: Json | None) -> None:
        """Give a ticket back with its line, or with None if there is none. Never raises; `dropped` counts what is lost.

        Half a character (a lone surrogate) is written as JSON escapes it, so that the file can be read by everybody.
        """
        try:
            text = "" if line is None else json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            self._complain(error)
            text, self.dropped = "", self.dropped + 1
        with self._lock:
            if ticket < self._next_out or self._stream.closed:  # its place has been given away, or we have stopped
                self.dropped += 1
                return
            heapq.heappush(self._held, (ticket, text))
            if len(self._held) > MAX_HELD:  # one request hangs; the others do not wait for ever
                self._next_out = self._held[0][0]
            self._flush()

    def _flush(self) -> None:
        """Write the lines whose turn has come, all of them or none: a full disk leaves no half line behind."""
        due: list[str] = []
        while self._held and self._held[0][0] <= self._next_out:
            ticket, text = heapq.heappop(self._held)
            self._next_out = ticket + 1
            if text:
                due.append(text + "\n")
        if not due:
            return
        try:
            self._append("".join(due).encode("utf-8", "backslashreplace"))
        except OSError as error:
            self.dropped += len(due)
            self._complain(error)
            return
        self.written += len(due)
        if self._most_bytes and self._bytes >= self._most_bytes:
            self._begin_file()

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError:
            with suppress(OSError):  # a pipe has no length
                self._stream.truncate(self._bytes)
            raise
        self._bytes += len(data)
        self._complained = False

    def _begin_file(self) -> None:
        """Begin the next file and remove the oldest if there are too many; where none can be begun, this one grows."""
        path = self._first.with_name(f"{self._first.stem}.{self.written:09d}{self._first.suffix}")
        full, size = self._stream, self._bytes
        try:
            self._stream = self._open(path)
        except InputError as error:
            self._bytes = size
            self._complain(error)
            return
        full.close()
        self._older.append(self.path)
        self.path = path
        while len(self._older) >= self._keep:
            with suppress(OSError):
                self._older.pop(0).unlink(missing_ok=True)

    def _complain(self, error: Exception) -> None:
        """Say once why lines are lost, until one is written again."""
        if not self._complained:
            self._complained = True
            log.warning("trace lines are lost: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Write the lines that still wait and close the file."""
        with self._lock:
            while self._held and not self._stream.closed:
                self._next_out = self._held[0][0]
                self._flush()
            self._stream.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner may read."""
    return os.open(path, flags, 0o600)
