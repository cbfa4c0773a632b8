"""Candidates → maximal matches: runs of equal tokens that can't be made longer. The readable twin.

Each function here has a compiled one of the same meaning in `semblend.align.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from semblend.discover.search import Candidates
from semblend.discover.store import DonorStore
from semblend.prompt import TokenArray

MatchArray = npt.NDArray[np.int64]  # rows (start, end, slot, donor_start); target positions

MAX_CANDIDATES = 16
FREE_WORK = 65_536
WORK_PER_TOKEN = 16
COST_OF_A_LOOK = 16


@dataclass(slots=True)
class Scan:
    """How far a scan has come; it can be resumed seed by seed."""

    floor: int
    shortest: int
    covered: int = 0
    last_slot: int = -1
    last_shift: int = 0
    spent: int = 0
    candidates: int = 0
    matches: list[tuple[int, int, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    end: int
    slot: int
    donor_start: int

    def row(self) -> tuple[int, int, int, int]:
        return (self.start, self.end, self.slot, self.donor_start)


def agree(left: TokenArray, right: TokenArray) -> int:
    """How many leading tokens are equal.

    >>> agree(np.array([1, 2, 3], np.int32), np.array([1, 2, 9, 9], np.int32))
    2
    """
    room = min(len(left), len(right))
    parted = np.flatnonzero(left[:room] != right[:room])
    return int(parted[0]) if len(parted) else room


def extend_seed(scan: Scan, tokens: TokenArray, at: int, posting: int, candidates: Candidates, store: DonorStore,
                k: int, now: int) -> None:  # fmt: skip
    """Grow one seed on every donor that has it; keep the furthest-reaching run and, if it adds tokens, the
    furthest-beginning one."""
    right: _Run | None = None
    left: _Run | None = None
    covered = scan.covered
    looked = 0
    for slot, offset in store.index.walk(posting):
        if looked == MAX_CANDIDATES:
            break
        if not store.is_served(slot, candidates.namespace_id, now):
            continue
        if at < covered and slot == scan.last_slot and at - offset == scan.last_shift:
            continue
        looked += 1
        scan.spent += COST_OF_A_LOOK
        donor = store.log.view(slot)
        reach = right.end if right else covered
        beyond = offset + reach - at
        reaches = reach < at or (reach < len(tokens) and beyond < len(donor) and tokens[reach] == donor[beyond])
        leads = False
        if right and left and left.start > max(covered, scan.floor):
            before = offset + left.start - 1 - at
            leads = before >= 0 and tokens[left.start - 1] == donor[before]
        goes_on = right is not None and slot == scan.last_slot and slot != right.slot
        if not (reaches or leads or goes_on):
            continue
        end = at + agree(tokens[at:], donor[offset:])
        if end - at < k:
            continue
        start = at - agree(tokens[scan.floor : at][::-1], donor[:offset][::-1])
        scan.spent += end - start
        if end - start < scan.shortest:
            continue
        scan.candidates += 1
        run = _Run(start, end, slot, offset - (at - start))
        better = end > reach or (
            right is not None and end == reach and (start < right.start or (start == right.start and goes_on))
        )
        if better:
            right = run
        if left is None or start < left.start:
            left = run
    if right is None or left is None:
        return
    if left.start < right.start and right.start > covered:
        scan.matches.append(left.row())
    scan.matches.append(right.row())
    scan.covered, scan.last_slot, scan.last_shift = right.end, right.slot, right.start - right.donor_start


def extend(scan: Scan, tokens: TokenArray, candidates: Candidates, store: DonorStore, seed_from: int, seed_to: int,
           k: int, guaranteed: int, now: int) -> None:  # fmt: skip
    """Grow seeds [seed_from, seed_to); see `semblend.align.kernels.extend` for what is passed over and why."""
    for i in range(seed_from, seed_to):
        at, posting = int(candidates.fingerprint.positions[i]), int(candidates.first[i])
        if posting == 0 or at <= scan.covered - guaranteed or at < scan.floor:
            continue
        if scan.spent > FREE_WORK + WORK_PER_TOKEN * at:
            continue
        extend_seed(scan, tokens, at, posting, candidates, store, k, now)
