"""The open connections: how many there may be, and which one goes when room is needed.

A connection is in one of four phases. In `ANSWER` the client waits for us. In the other three we wait for the client,
and such a connection may be closed to make room for a new one. Without that rule a thousand silent sockets would take
every file descriptor of the process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from semblend.errors import ConfigError

RESERVED_DESCRIPTORS = 96
"""Files that are not connections: stores, donor files, logs, and the connections of one round of accepting."""
MIN_CONNECTIONS = 16
GRACE_S = 1.0
"""A connection that we wait for no longer than this is closed for room only if there is no other."""


class Phase(StrEnum):
    """Who waits for whom on a connection."""

    HEADER = "header"
    """We wait for the headers of a request, or for the end of a body that was answered before it ended."""
    IDLE = "idle"
    """We wait for the next request of a connection that was answered."""
    BODY = "body"
    """We wait for the rest of a request's body."""
    ANSWER = "answer"
    """The client waits for us."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a client may take, in seconds: to send its headers, between two requests, and to read what was written.

    ``write_s`` is how often progress is looked for: a client that reads less than `MIN_READ_BYTES_PER_S` is let go.
    """

    header_s: float
    idle_s: float
    write_s: float


class Evictable(Protocol):
    """A connection that can be closed at any moment."""

    def evict(self) -> None:
        """Close it now; what was not sent yet is dropped."""

    def shutdown(self) -> None:
        """Close it after the answer that is under way, or now where none is."""


class Connections:
    """The books of one server. ``on_room`` is called when a connection went, or may be closed from now on.

    >>> connections = Connections(limit=1)
    >>> connections.is_full
    False
    """

    def __init__(self, limit: int, on_room: Callable[[], None] | None = None) -> None:
        self.limit = limit
        self.evicted = 0
        self.on_room: Callable[[], None] = on_room or _do_nothing
        self._phases: dict[Evictable, Phase] = {}
        self._leaving: set[Evictable] = set()
        # Ordered by when the wait began, which is the time in seconds that they map to.
        self._silent: dict[Evictable, float] = {}
        self._sending: dict[Evictable, float] = {}

    @property
    def is_full(self) -> bool:
        return len(self._phases) - len(self._leaving) >= self.limit

    def __len__(self) -> int:
        return len(self._phases)

    def list_all(self) -> tuple[Evictable, ...]:
        """List the open connections, oldest first."""
        return tuple(self._phases)

    def count(self, phase: Phase) -> int:
        """Count the connections in a phase."""
        return sum(one is phase for one in self._phases.values())

    def enter(self, connection: Evictable, phase: Phase) -> None:
        """Note that a connection, new or known, is in ``phase`` from now on."""
        self._phases[connection] = phase
        self._silent.pop(connection, None)
        self._sending.pop(connection, None)
        if phase is Phase.ANSWER or connection in self._leaving:
            return
        queue = self._sending if phase is Phase.BODY else self._silent
        queue[connection] = time.monotonic()
        self.on_room()

    def remove(self, connection: Evictable) -> None:
        """Forget a connection whose socket is closed."""
        self._silent.pop(connection, None)
        self._sending.pop(connection, None)
        self._leaving.discard(connection)
        if self._phases.pop(connection, None) is not None:
            self.on_room()

    @property
    def can_take_one(self) -> bool:
        """Whether there is room for one more, or a connection that may be closed for it."""
        return not self.is_full or bool(self._silent or self._sending)

    def make_room(self) -> None:
        """Close the connection that has kept us waiting longest, if the limit is reached and one may go."""
        victim = self._choose_victim() if self.is_full else None
        if victim is None:
            return
        self._silent.pop(victim, None)
        self._sending.pop(victim, None)
        self._leaving.add(victim)
        self.evicted += 1
        victim.evict()

    def _choose_victim(self) -> Evictable | None:
        """Those without a request go before those that are sending a body; within each, the longest wait first."""
        latest = time.monotonic() - GRACE_S
        oldest = [next(iter(queue.items())) for queue in (self._silent, self._sending) if queue]
        patient = [connection for connection, since in oldest if since <= latest]
        return next(iter(patient or [connection for connection, _ in oldest]), None)


def plan_limit(wanted: int) -> int:
    """Raise the soft limit of file descriptors as needed; return how many of ``wanted`` connections they allow."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = _count_open_files() + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < taken + wanted:
        soft = taken + wanted if hard == resource.RLIM_INFINITY else min(hard, taken + wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fits = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - taken)
    if fits < min(wanted, MIN_CONNECTIONS):
        raise ConfigError(
            f"{soft} file descriptors leave room for {max(fits, 0)} connections",
            hint=f"allow at least {taken + MIN_CONNECTIONS}: ulimit -n {taken + wanted}",
        )
    return fits


def _count_open_files() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return 64  # more than a process has that serves nobody yet


class RareLines(logging.Filter):
    """Lets a message through once in ``every_s`` seconds: whoever sends nonsense must not fill the log with it.

    The next line of its kind says how many were left out. Messages of ``hidden`` never come through.
    """

    MAX_KINDS = 256

    def __init__(
        self, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic, hidden: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._hidden = frozenset(hidden)
        self._every_s = every_s
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg in self._hidden:
            return False
        kind, now = _find_kind(record), self._clock()
        if now - self._last.get(kind, -self._every_s) < self._every_s:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        if len(self._last) >= self.MAX_KINDS:
            self._last.clear()
            self._left_out.clear()
        self._last[kind] = now
        if left_out := self._left_out.pop(kind, 0):
            record.msg = f"{record.msg} (and {left_out} times more since the last such line)"
        return True


def _find_kind(record: logging.LogRecord) -> str:
    """The message without its arguments and, of an error, its type and the line that raised it."""
    kind, _, trace = record.exc_info or (None, None, None)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" {kind} {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{record.msg}{where}"


def _do_nothing() -> None:
    """For books that nobody waits on."""
