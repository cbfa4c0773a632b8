"""Messages that wait for Redis, and when a router may tell all that it knows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from semantickv.shared_state.messages import MOST_KEYS, Message

MOST_OUTGOING = 4096
"""Messages that wait for Redis. When it is gone, the oldest make room; a `Hello` brings what was missed."""
MOST_SNAPSHOT_KEYS = 64_000
"""Of one replica, the most recent so many hashes are told to a router that comes; some 2 million tokens."""
SNAPSHOT_PAUSE_S = 10.0


class Sync(Protocol):
    """What the link to Redis asks of a router. Nothing here waits."""

    def note_joined(self) -> None:
        """Redis is there, for the first time or again."""

    def list_outgoing(self, most: int) -> list[Message]:
        """Take the next messages that wait."""

    def list_loads(self) -> list[Message]:
        """What changes all the time, twice a second."""

    def take(self, sender: str, messages: list[Message]) -> None:
        """Take what another router says."""

    def update_loads(self) -> None:
        """Let what is old no longer count."""

    def describe(self) -> dict[str, Any]:
        """Counts for the operator."""


SyncT = TypeVar("SyncT", bound=Sync)


class Outbox:
    """A bounded queue of messages, and the pause between two snapshots.

    >>> outbox = Outbox(clock=lambda: 0.0)
    >>> outbox.is_snapshot_due(), outbox.is_snapshot_due(), outbox.owes_snapshot
    (True, False, True)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.dropped = 0
        self.owes_snapshot = False
        self._clock = clock
        self._waiting: deque[Message] = deque()
        self._snapshot_at = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Message) -> None:
        if len(self._waiting) >= MOST_OUTGOING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(message)

    def take(self, most: int) -> list[Message]:
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def is_snapshot_due(self) -> bool:
        """Whether everything may be told now. Not again before a pause is over; until then it is owed."""
        self.owes_snapshot = self._clock() - self._snapshot_at < SNAPSHOT_PAUSE_S
        if not self.owes_snapshot:
            self._snapshot_at = self._clock()
        return not self.owes_snapshot

    def forget_pause(self) -> None:
        """The next snapshot need not wait."""
        self._snapshot_at = float("-inf")


def split_entries(entries: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Keys and tokens of a memory, in parts that fit into a message."""
    for at in range(0, len(entries), MOST_KEYS):
        part = entries[at : at + MOST_KEYS]
        yield [key for key, _ in part], [tokens for _, tokens in part]
