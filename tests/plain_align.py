"""Alignment and its index in plain Python: the readable twins of `semblend.align.kernels` and `discover.index`.

Seeds become matches, matches become a cover. `semblend.align.kernels.extend` explains which seeds are skipped and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semblend.align.aligner import (
    COST_OF_A_LOOK,
    FREE_WORK,
    LOOK_BACK,
    MAX_CANDIDATES,
    MAX_EDIT,
    SEAM,
    WORK_PER_TOKEN,
    MatchArray,
)
from semblend.discover import kernels
from semblend.discover.slots import EXPIRES, MAX_REPEATS, NAMESPACE, FlatIndex
from semblend.discover.store import Candidates, DonorStore
from semblend.errors import CapacityError
from semblend.fingerprint.hashes import HashArray, HashScheme, PositionArray, mix64
from semblend.prompt import TokenArray


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
        for slot, offset in walk(self.store.index, posting):
            if looked == MAX_CANDIDATES:
                break
            row = self.store.slots.rows[slot]
            if row[NAMESPACE] != self.candidates.namespace_id or row[EXPIRES] <= now:
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


# -- Matches → cover: the pieces of overlapping matches that together save most prefill. The readable twin.


@dataclass(slots=True)
class _Cover:
    value: int
    begin: int
    previous: int


def drop_dominated(matches: MatchArray) -> MatchArray:
    """Return matches in target order without those inside another; of equal ones the first found stays.

    >>> drop_dominated(np.array([[0, 50, 1, 0], [10, 40, 2, 0], [40, 90, 3, 0]]))[:, :2].tolist()
    [[0, 50], [40, 90]]
    """
    if len(matches) < 2:
        return matches
    order = np.lexsort((-matches[:, 1], matches[:, 0]))
    ordered = matches[order]
    furthest = np.maximum.accumulate(ordered[:, 1])
    keep = np.ones(len(ordered), bool)
    keep[1:] = ordered[1:, 1] > furthest[:-1]
    return ordered[keep]


def choose_cover(matches: MatchArray, shortest: int, seam: int = SEAM) -> MatchArray:
    """Choose the pieces of a cover, in target order; see `semblend.align.kernels.choose_cover`."""
    best: list[_Cover] = []
    leader: list[int] = []
    for i, (start, end) in enumerate(matches[:, :2].tolist()):
        mine = _Cover(end - start - seam, start, -1)
        apart = int(np.searchsorted(matches[:i, 1], start, side="right"))
        if apart > 0:
            mine.previous = leader[apart - 1]
            mine.value += best[mine.previous].value
        for j in range(max(apart, i - LOOK_BACK), i):
            cut = min(int(matches[j, 1]), end - shortest)
            gained = best[j].value + end - int(matches[j, 1]) - seam
            if gained > mine.value and cut - best[j].begin >= shortest and cut >= start:
                mine = _Cover(gained, cut, j)
        best.append(mine)
        leader.append(i if i == 0 or mine.value > best[leader[i - 1]].value else leader[i - 1])
    pieces: list[tuple[int, int, int, int]] = []
    at = leader[-1] if leader else -1
    limit = int(matches[-1, 1]) if leader else 0
    while at >= 0:
        start, end, slot, donor_start = matches[at].tolist()
        begin = best[at].begin
        pieces.append((begin, min(end, limit), slot, donor_start + begin - start))
        limit, at = begin, best[at].previous
    return np.array(pieces[::-1], np.int64).reshape(-1, 4)


# -- Matches across small edits: the short runs between two changes, which no seed guarantees.
#
# From the end of a piece we look a few tokens ahead in prompt and donor for the place where they agree again, as a
# genome aligner does between its anchors. Only runs beside a found piece of the same donor are taken, so there is
# never a short run alone. With ``min_span_tokens`` at or above the seed guarantee nothing here runs.


class ChainPiece(NamedTuple):
    """Target tokens [start, end) equal the donor's from ``donor_start``."""

    start: int
    end: int
    slot: int
    donor_start: int

    @property
    def donor_end(self) -> int:
        return self.donor_start + self.end - self.start


def resync(target: TokenArray, donor: TokenArray, shortest: int) -> tuple[int, int, int] | None:
    """Find the nearest (skipped in target, skipped in donor, run) after which at least ``shortest`` tokens agree.

    >>> import numpy as np
    >>> a = np.array([9, 1, 2, 3, 4], np.int32); b = np.array([7, 8, 1, 2, 3, 4], np.int32)
    >>> resync(a, b, 3)
    (1, 2, 4)
    """
    for skipped in range(1, 2 * MAX_EDIT + 1):
        for in_target in range(max(0, skipped - MAX_EDIT), min(skipped, MAX_EDIT) + 1):
            in_donor = skipped - in_target
            if in_target + shortest > len(target) or in_donor + shortest > len(donor):
                continue
            if target[in_target] != donor[in_donor]:
                continue
            run = count_equal(target[in_target:], donor[in_donor:])
            if run >= shortest:
                return in_target, in_donor, run
    return None


def _extend_right(
    tokens: TokenArray, donor: TokenArray, piece: ChainPiece, limit: int, shortest: int
) -> list[ChainPiece]:
    """Find the short runs to the right of a piece, up to ``limit``."""
    found: list[ChainPiece] = []
    while (step := resync(tokens[piece.end : limit], donor[piece.donor_end :], shortest)) is not None:
        skipped, skipped_donor, run = step
        start = piece.end + skipped
        piece = ChainPiece(start, start + run, piece.slot, piece.donor_end + skipped_donor)
        found.append(piece)
    return found


def _extend_left(
    tokens: TokenArray, donor: TokenArray, piece: ChainPiece, floor: int, shortest: int
) -> list[ChainPiece]:
    """Find the short runs to the left of a piece, down to ``floor``: the same walk on reversed tokens."""
    size, donor_size = len(tokens), len(donor)
    mirrored = ChainPiece(size - piece.end, size - piece.start, piece.slot, donor_size - piece.donor_end)
    found = _extend_right(tokens[::-1], donor[::-1], mirrored, size - floor, shortest)
    return [
        ChainPiece(size - run.end, size - run.start, run.slot, donor_size - run.donor_end) for run in reversed(found)
    ]


def chain_pieces(
    tokens: TokenArray, pieces: list[ChainPiece], donors: dict[int, TokenArray], shortest: int, floor: int
) -> list[ChainPiece]:
    """Return the pieces with the short runs between and beside them, in target order."""
    chained: list[ChainPiece] = []
    end = floor
    for i, piece in enumerate(pieces):
        donor = donors[piece.slot]
        chained += _extend_left(tokens, donor, piece, end, shortest)
        limit = pieces[i + 1].start if i + 1 < len(pieces) else len(tokens)
        onward = _extend_right(tokens, donor, piece, limit, shortest)
        chained += [piece, *onward]
        end = chained[-1].end
    return chained


def align_plainly(
    store: DonorStore, scheme: HashScheme, tokens: TokenArray, candidates: Candidates, min_span: int, floor: int
) -> list[tuple[int, int, int, int]]:
    """Find the pieces of the prompt that donors hold, as `semblend.align.aligner.Aligner` does."""
    shortest = max(min_span, scheme.k)
    scan = PlainScan(tokens, candidates, store, floor, shortest, scheme.k, scheme.guaranteed_tokens)
    scan.extend(0, len(candidates.fingerprint))
    pieces = [ChainPiece(*piece) for piece in choose_cover(drop_dominated(scan.get_matches()[0]), shortest).tolist()]
    if pieces and min_span < scheme.guaranteed_tokens:
        donors = {piece.slot: store.log.view(piece.slot) for piece in pieces}
        pieces = chain_pieces(tokens, pieces, donors, min_span, floor)
    return [tuple(piece) for piece in pieces]


def walk(index: FlatIndex, posting: int) -> Iterator[tuple[int, int]]:
    """Yield (slot, offset) of a posting and of the older ones with the same tag."""
    tag = index.postings[posting, kernels.TAG]
    steps = 0
    while posting and steps < kernels.MAX_STEPS:
        if index.postings[posting, kernels.TAG] == tag:
            yield int(index.postings[posting, kernels.SLOT]), int(index.postings[posting, kernels.OFFSET])
        posting = int(index.postings[posting, kernels.NEXT])
        steps += 1


class PlainIndex:
    """Same interface and same answers as `FlatIndex`, at some hundred bytes a posting."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chains: dict[int, list[int]] = {}  # key -> postings, newest last
        self._postings: dict[int, tuple[int, int, int]] = {}  # posting -> (key, slot, offset)
        self._of_slot: dict[int, list[int]] = {}
        self._next = 1

    @property
    def used(self) -> int:
        return len(self._postings)

    def add(self, slot: int, positions: PositionArray, hashes: HashArray, namespace_key: np.uint64) -> int:
        if self.used + len(positions) > self.capacity:
            raise CapacityError("the fingerprint index is full", hint="evict a donor first, or raise max_bytes")
        mine = self._of_slot[slot] = []
        repeats: dict[int, int] = {}
        for offset, key in zip(positions.tolist(), mix64(hashes ^ namespace_key).tolist(), strict=True):
            repeats[key] = repeats.get(key, 0) + 1
            if repeats[key] > MAX_REPEATS:
                continue
            self._postings[self._next] = (key, slot, offset)
            self._chains.setdefault(key, []).append(self._next)
            mine.append(self._next)
            self._next += 1
        return len(mine)

    def remove(self, slot: int) -> None:
        for posting in self._of_slot.pop(slot, ()):
            key, _, _ = self._postings.pop(posting)
            chain = self._chains[key]
            chain.remove(posting)
            if not chain:
                del self._chains[key]

    def probe(self, hashes: HashArray, namespace_key: np.uint64) -> npt.NDArray[np.uint32]:
        keys = mix64(hashes ^ namespace_key).tolist()
        return np.array([self._chains.get(key, (0,))[-1] for key in keys], np.uint32)

    def walk(self, posting: int) -> Iterator[tuple[int, int]]:
        for other in reversed(self._chains[self._postings[posting][0]]):
            yield self._postings[other][1:]
