"""Candidates → maximal matches: runs of equal tokens that cannot be extended. The readable twin.

`semblend.align.kernels.extend` is the compiled one; it explains which seeds are skipped and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from semblend.discover.search import Candidates
from semblend.discover.store import DonorStore
from semblend.prompt import TokenArray

MatchArray = npt.NDArray[np.int64]  # rows (start, end, slot, donor_start); target positions

MAX_CANDIDATES = 8  # donors compared for one seed, newest first; 16 recovered no more on the recall corpus
FREE_WORK = 65_536  # token comparisons that every lookup may spend
WORK_PER_TOKEN = 16  # and what each scanned token adds to that: bounds the time on repetitive text
COST_OF_A_LOOK = 16  # comparisons charged for touching a candidate at all (a cache miss or two)
LIMITS = (MAX_CANDIDATES, FREE_WORK, WORK_PER_TOKEN, COST_OF_A_LOOK)


@dataclass(frozen=True, slots=True)
class Run:
    """Target tokens [start, end) equal the donor's from ``donor_start``."""

    start: int
    end: int
    slot: int
    donor_start: int

    @property
    def shift(self) -> int:
        return self.start - self.donor_start

    def to_row(self) -> tuple[int, int, int, int]:
        """Return the run as one row of a match array."""
        return (self.start, self.end, self.slot, self.donor_start)


def count_equal(left: TokenArray, right: TokenArray) -> int:
    """Count the leading tokens that are equal.

    >>> count_equal(np.array([1, 2, 3], np.int32), np.array([1, 2, 9, 9], np.int32))
    2
    """
    room = min(len(left), len(right))
    parted = np.flatnonzero(left[:room] != right[:room])
    return int(parted[0]) if len(parted) else room


@dataclass(slots=True)
class PlainScan:
    """Extends seeds to maximal matches; `semblend.align.kernels.extend` says which are skipped and why."""

    tokens: TokenArray
    candidates: Candidates
    store: DonorStore
    floor: int
    shortest: int
    k: int
    guaranteed: int
    covered: int = field(init=False)
    last: Run | None = None
    spent: int = 0
    examined: int = 0
    matches: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.covered = self.floor

    def get_matches(self) -> tuple[MatchArray, int]:
        return np.array(self.matches, np.int64).reshape(-1, 4), self.examined

    def extend(self, seed_from: int, seed_to: int) -> None:
        now = self.candidates.now
        for i in range(seed_from, seed_to):
            at, posting = int(self.candidates.fingerprint.positions[i]), int(self.candidates.first[i])
            if posting == 0 or at <= self.covered - self.guaranteed or at < self.floor:
                continue
            if self.spent <= FREE_WORK + WORK_PER_TOKEN * at:
                self._extend_seed(at, posting, now)

    def _extend_seed(self, at: int, posting: int, now: int) -> None:
        """Extend one seed on the donors that have it; keep one run or two.

        It keeps the run that reaches furthest right and, if it adds tokens, the one that begins furthest left.
        """
        right: Run | None = None
        left: Run | None = None
        looked = 0
        for slot, offset in self.store.index.walk(posting):
            if looked == MAX_CANDIDATES:
                break
            if not self.store.is_served(slot, self.candidates.namespace_id, now):
                continue
            if self.last and at < self.covered and (slot, at - offset) == (self.last.slot, self.last.shift):
                continue
            looked += 1
            self.spent += COST_OF_A_LOOK
            goes_on = right is not None and self.last is not None and slot == self.last.slot != right.slot
            if not (goes_on or self._promises(at, slot, offset, right, left)):
                continue
            run = self._grow(at, slot, offset)
            if run is None:
                continue
            reach = right.end if right else self.covered
            level = right is not None and run.end == reach
            if run.end > reach or (
                level and right and (run.start < right.start or (run.start == right.start and goes_on))
            ):
                right = run
            if left is None or run.start < left.start:
                left = run
        if right is None or left is None:
            return
        if left.start < right.start and right.start > self.covered:
            self.matches.append(left.to_row())
        self.matches.append(right.to_row())
        self.covered, self.last = right.end, right

    def _promises(self, at: int, slot: int, offset: int, right: Run | None, left: Run | None) -> bool:
        """Whether one token shows that the candidate could reach further right or begin further left."""
        donor = self.store.log.view(slot)
        reach = right.end if right else self.covered
        beyond = offset + reach - at
        if reach < at:
            return True
        if reach < len(self.tokens) and beyond < len(donor) and self.tokens[reach] == donor[beyond]:
            return True
        if right is None or left is None or left.start <= max(self.covered, self.floor):
            return False
        before = offset + left.start - 1 - at
        return bool(before >= 0 and self.tokens[left.start - 1] == donor[before])

    def _grow(self, at: int, slot: int, offset: int) -> Run | None:
        """Return the maximal run through a seed; None if it is no match or too short."""
        donor = self.store.log.view(slot)
        end = at + count_equal(self.tokens[at:], donor[offset:])
        if end - at < self.k:
            return None
        start = at - count_equal(self.tokens[self.floor : at][::-1], donor[:offset][::-1])
        self.spent += end - start
        if end - start < self.shortest:
            return None
        self.examined += 1
        return Run(start, end, slot, offset - (at - start))
