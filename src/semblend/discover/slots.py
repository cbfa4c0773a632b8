"""What is kept of donors by slot: a row of four numbers for the kernels (one cache line), and the tokens themselves."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from semblend.errors import CapacityError
from semblend.fingerprint.hashes import HashArray, PositionArray
from semblend.prompt import TokenArray

START, LENGTH, NAMESPACE, EXPIRES = 0, 1, 2, 3
NOWHERE = -1
NEVER = 1 << 62  # microseconds


def to_microseconds(unix_s: float | None) -> int:
    """Convert a Unix time in seconds to the microseconds that kernels compare; None means never."""
    return NEVER if unix_s is None else int(min(unix_s * 1e6, NEVER))


class SlotTable:
    """Rows (start in the token log, length, namespace id, expiry in microseconds); grows by doubling."""

    def __init__(self) -> None:
        self.rows: npt.NDArray[np.int64] = self._make_rows(1024)

    def ensure(self, slot: int) -> None:
        """Make room for a slot."""
        if slot >= len(self.rows):
            self.rows = np.concatenate([self.rows, self._make_rows(max(slot + 1 - len(self.rows), len(self.rows)))])

    def clear(self, slot: int) -> None:
        """Mark a slot as empty."""
        self.rows[slot] = (NOWHERE, 0, NOWHERE, 0)

    @staticmethod
    def _make_rows(count: int) -> npt.NDArray[np.int64]:
        """Make ``count`` empty rows."""
        rows = np.zeros((count, 4), np.int64)
        rows[:, (START, NAMESPACE)] = NOWHERE
        return rows


# -- The tokens of all donors: a ring of 32-bit ids with spare room, so that every donor is contiguous.
#
# New donors are written at the head. When the head meets the oldest extent, a dead one is dropped and a live one
# is copied to the head: room is freed without a pause to compact everything. At 80 % use that copies about four
# tokens for each one added, some tens of microseconds for 8k tokens.


FILL = 0.8  # share of the ring that live donors may take


class TokenLog:
    """Tokens by slot; START and LENGTH of a slot's row say where they are in ``tokens``."""

    def __init__(self, capacity: int, slots: SlotTable) -> None:
        self.tokens: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.live_tokens = 0
        self._slots = slots
        self._extents: deque[tuple[int, int, int]] = deque()  # (slot, start, length), oldest first
        self._head = 0

    @property
    def capacity(self) -> int:
        """Most tokens that live donors may hold together."""
        return int(len(self.tokens) * FILL)

    def view(self, slot: int) -> TokenArray:
        """Return a slot's tokens without a copy."""
        start, length = self._slots.rows[slot, START : LENGTH + 1]
        return self.tokens[start : start + length]

    def append(self, slot: int, tokens: TokenArray) -> None:
        """Write a donor's tokens; raise CapacityError if they do not fit."""
        if self.live_tokens + len(tokens) > self.capacity:
            raise CapacityError("the token log is full", hint="evict a donor first, or raise max_bytes")
        self._slots.ensure(slot)
        self.live_tokens += len(tokens)
        self._forget_dead_extents()
        waiting = deque([(slot, tokens)])
        moved = 0
        while waiting:
            mover, content = waiting.popleft()
            while not self._fits(len(content)):
                evacuated = self._drop_oldest()
                if evacuated is not None:
                    waiting.append(evacuated)
                    moved += len(evacuated[1])
            if moved > 2 * len(self.tokens):  # unlucky sizes: go round for ever, or compact once
                self._compact([(mover, content), *waiting])
                return
            self._write(mover, content)

    def remove(self, slot: int) -> None:
        """Free a slot's tokens."""
        self.live_tokens -= int(self._slots.rows[slot, LENGTH])
        self._slots.clear(slot)

    def _fits(self, length: int) -> bool:
        """Whether ``length`` tokens fit at the head; goes to the start of the ring if they fit only there."""
        if not self._extents:
            self._head = 0
            return length <= len(self.tokens)
        oldest = self._extents[0][1]
        if oldest >= self._head:
            return self._head + length <= oldest
        if self._head + length <= len(self.tokens):
            return True
        if length <= oldest:
            self._head = 0
            return True
        return False

    def _forget_dead_extents(self) -> None:
        """Drop the oldest extents that are dead: many short donors leave more extents than tokens are worth."""
        rows = self._slots.rows
        while self._extents and rows[self._extents[0][0], START] != self._extents[0][1]:
            self._extents.popleft()

    def _drop_oldest(self) -> tuple[int, TokenArray] | None:
        """Drop the oldest extent; return its slot and tokens if it is alive."""
        slot, start, length = self._extents.popleft()
        if self._slots.rows[slot, START] != start:
            return None
        return slot, self.tokens[start : start + length].copy()

    def _write(self, slot: int, content: TokenArray) -> None:
        """Write tokens at the head."""
        start = self._head
        self.tokens[start : start + len(content)] = content
        self._slots.rows[slot, START : LENGTH + 1] = (start, len(content))
        self._extents.append((slot, start, len(content)))
        self._head = start + len(content)

    def _compact(self, waiting: list[tuple[int, TokenArray]]) -> None:
        """Write all live tokens and the waiting ones again from the start of the ring."""
        rows = self._slots.rows
        live = [(slot, self.view(slot).copy()) for slot, start, _ in self._extents if rows[slot, START] == start]
        self._extents.clear()
        self._head = 0
        for slot, content in live + waiting:
            self._write(slot, content)


# -- The fingerprint index: the seeds of all donors, in flat arrays for `semblend.discover.kernels`.


MAX_REPEATS = 8  # postings of one k-gram within one donor: repeated text must not flood a chain


BYTES_PER_POSTING = 24 + 4  # a posting, and its share of the bucket heads


class FlatIndex:
    """Seeds of all donors; postings and buckets are reserved for ``capacity`` and touched only when used."""

    def __init__(self, capacity: int) -> None:
        from semblend.discover import kernels

        self._kernels = kernels
        self.capacity = capacity
        self.heads = np.zeros(max(capacity, kernels.FIRST_BUCKETS), np.uint32)
        self.postings = np.zeros((capacity + 1, 6), np.uint32)
        self.state = np.array([kernels.FIRST_BUCKETS, kernels.FIRST_BUCKETS, 0, 1, 0], np.int64)
        self.first_of_slot = np.zeros(1024, np.uint32)

    @property
    def used(self) -> int:
        return int(self.state[self._kernels.USED])

    def add(self, slot: int, positions: PositionArray, hashes: HashArray, namespace_key: np.uint64) -> int:
        """Index a donor's seeds; return how many postings they took."""
        if self.used + len(positions) > self.capacity:
            raise CapacityError("the fingerprint index is full", hint="evict a donor first, or raise max_bytes")
        if slot >= len(self.first_of_slot):
            self.first_of_slot = np.concatenate([self.first_of_slot, np.zeros(slot + 1, np.uint32)])
        return int(
            self._kernels.insert(
                slot,
                positions,
                hashes,
                namespace_key,
                MAX_REPEATS,
                self.heads,
                self.postings,
                self.state,
                self.first_of_slot,
            )
        )

    def remove(self, slot: int) -> None:
        """Remove a donor's seeds."""
        self._kernels.remove(slot, self.heads, self.postings, self.state, self.first_of_slot)

    def probe(self, hashes: HashArray, namespace_key: np.uint64) -> npt.NDArray[np.uint32]:
        """Return the newest posting of every seed, 0 if there is none."""
        first = np.empty(len(hashes), np.uint32)
        self._kernels.probe(hashes, namespace_key, self.heads, self.postings, self.state, first)
        return first
