"""`semblend.eviction.adaptive.Adaptive` in plain Python: what the compiled code must do, and how it works."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from semblend.eviction.plan import (
    BLOCK_KINDS,
    ENDS,
    FIRST_LESSON,
    GROUPS,
    KINDS,
    NEW,
    NEW_KINDS,
    OWN,
    SESSION,
    SEVERAL,
    SHARED,
    AdaptivePlan,
    find_group,
)


@dataclass
class Cell:
    """Evidence about blocks of one class at one age."""

    returns: float = 0.0
    exposure: float = 0.0  # clock spent waiting, summed over blocks
    at_risk: int = 0
    since: float = 0.0

    def settle(self, now: float, change: int) -> None:
        """Bring the exposure up to date, then add ``change`` blocks."""
        self.exposure += self.at_risk * (now - self.since)
        self.since = now
        self.at_risk += change


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of one block."""

    turn: int
    uses: int = 0
    fan: int = 0
    age: int = 0
    last: int = 0
    classes: tuple[int, int] = (-1, -1)
    place: int = -1


@dataclass(frozen=True, slots=True)
class Context:
    """What a request is, as far as its known blocks or its session say."""

    seen: int
    unseen: int
    kind: int = 0
    silence: int = 0
    turn: int = 1
    last: int = -1


def count_steps(value: float, limits: Iterable[float]) -> int:
    """Count how many limits a value reaches."""
    return sum(value >= limit for limit in limits)


def classify_by_block(end: bool, seen: int, unseen: int, uses: int, gap: float, fan: int, unit: float) -> int:
    """Find the class of a use in the view by block."""
    if uses == 1:
        group = 0 if end else 1 if seen <= 1 else 2 if unseen < 6 else 3
        return group * 4 + count_steps(unseen, (3, 12, 40))
    level = count_steps(gap, (unit * 4.0**step for step in range(1, 6)))
    fame = min(uses, 5) - 2 + sum(uses > limit for limit in (8, 32, 128))
    return SEVERAL + level if fan > 1 and fame < 4 else NEW_KINDS + fame * 6 + level


def classify_by_conversation(
    context: Context, end: bool, uses: int, own: bool, gap: float, fan: int, unit: float
) -> int:
    """Find the class of a use in the view by conversation."""
    length = count_steps(context.unseen, (3, 12, 40))
    if uses == 1:
        if end:
            return ENDS + context.kind * 4 + length
        return NEW + (context.kind * 4 + context.silence) * 4 + length
    if own:
        return OWN + (context.kind * 4 + context.silence) * 2 + (fan > 1)
    return SHARED + classify_by_block(False, 0, 0, uses, gap, fan, unit) - NEW_KINDS


def find_context(turn: int, uses: int) -> int:
    """Find the context of a request from the turn and the uses of its deepest known block.

    >>> [find_context(*pair) for pair in ((2, 1), (3, 1), (9, 1), (2, 2), (2, 5), (2, 99))]
    [4, 5, 7, 3, 2, 1]
    """
    if uses >= 32:  # a system prompt: whoever stands behind it is somebody new
        return 1
    if uses >= 2:
        return 2 if uses >= 4 else 3
    return 4 + count_steps(turn, (3, 4, 6))


class PlainAdaptive:
    """See the text of `semblend.eviction.adaptive`."""

    def __init__(
        self, capacity: int, *, types: int = 1, chained: bool = True, plan: AdaptivePlan | None = None
    ) -> None:
        self.plan = plan or AdaptivePlan.build(capacity)
        self.types, self.chained = types, chained
        self.ages = len(self.plan.edges) - 1
        self.edges: list[float] = self.plan.edges.tolist()
        self.entries: dict[int, Entry] = {}
        self.ring: deque[tuple[int, int, int]] = deque()  # place, key, clock
        self.places = self.clock = self.now = self.seen = self.epoch = 0
        self.taught = (0, 0)  # clock and accesses at the last lesson
        self.ledger: dict[int, list[Cell]] = {}  # by class; what was never filed is not there
        self.index: dict[int, list[float]] = {}
        first = (self.plan.priors / (1.0 + self.plan.edges[1:])).tolist()
        self.rates: list[list[list[float]]] = []  # by type, group and age, as the last lesson found them
        self.unknown = {(one, group): first[group] for one in range(types) for group in range(GROUPS)}

    # -- the interface ---------------------------------------------------------------------------------------------

    def use(
        self,
        keys: Sequence[int],
        *,
        told: int = 0,
        session: int = 0,
        sizes: Sequence[int] | None = None,
        types: Sequence[int] | None = None,
    ) -> None:
        """Hear that a request used these blocks; see `policy.EvictionPolicy.use`."""
        self.now = self.clock
        self._grow_older()
        context = self._find_context(keys, told, session)
        self._meet(keys, context, told)
        for place in range(len(keys) - 1, told - 1, -1):
            self._file(keys[place], context, place == len(keys) - 1, 0 if types is None else types[place])
        if session and not told:
            self._file_session(session ^ SESSION, context)
        self.clock += len(keys) - told if sizes is None else sum(sizes[told:])
        self.seen += len(keys) - told
        self._learn_if_due()

    def price(self, keys: Sequence[int]) -> list[float]:
        """Return the value of each block; the smallest leaves first. What is not known is worth nothing."""
        return [self._price(self.entries.get(key)) for key in keys]

    def forget(self, key: int) -> None:
        """A block left the cache; what was learned of it stays until the ring has passed it."""

    # -- parts -----------------------------------------------------------------------------------------------------

    def _price(self, entry: Entry | None) -> float:
        if entry is None or entry.classes[0] < 0:
            return 0.0
        age = self.find_age(self.now - entry.last)
        if not self.chained:
            return self._find_index(entry.classes[0])[age]
        return sqrt(self._find_index(entry.classes[0])[age] * self._find_index(entry.classes[1])[age])

    def _find_index(self, kind: int) -> list[float]:
        """Return the index of a class by age; that of its group if nothing is known about it."""
        if kind in self.index:
            return self.index[kind]
        place = kind // KINDS, find_group(kind % KINDS)
        if place not in self.unknown:
            self.unknown[place] = find_best_rates(self.rates[place[0]][place[1]], self.edges)
        found: list[float] = self.unknown[place]
        return found

    def _get_cells(self, kind: int) -> list[Cell]:
        """Return the evidence of a class at every age, empty at first."""
        return self.ledger.setdefault(kind, [Cell() for _ in range(self.ages)])

    def find_age(self, waited: float) -> int:
        """Find the index of the age range that a waiting time falls into."""
        return count_steps(waited, self.edges[1:-1])

    def _settle(self, entry: Entry, age: int, change: int) -> None:
        for kind in entry.classes:
            if kind >= 0:
                self._get_cells(kind)[age].settle(self.now, change)

    def _grow_older(self) -> None:
        """Move uses that have not returned to the age they have reached."""
        for place, key, clock in self.ring:
            entry = self.entries.get(key)
            if entry is None or entry.place != place:
                continue
            while entry.age < self.find_age(self.now - clock):
                self._settle(entry, entry.age, -1)
                entry.age += 1
                self._settle(entry, entry.age, +1)

    def _find_context(self, keys: Sequence[int], told: int, session: int) -> Context:
        seen = next((place for place, key in enumerate(keys) if key not in self.entries), len(keys))
        known = self.entries.get(session ^ SESSION) if session else None
        if told and seen:  # the same request goes on
            turn = self.entries[keys[min(seen, told) - 1]].turn
            return Context(seen, len(keys) - seen, find_context(turn, 1), 0, turn)
        if known is not None:
            turn, kind, last = known.uses + 1, find_context(known.uses + 1, 1), known.last
        elif session or not seen:
            return Context(seen, len(keys) - seen, 1 if seen else 0)
        else:
            deepest = self.entries[keys[seen - 1]]
            turn, last = deepest.turn + 1, deepest.last
            kind = find_context(turn, deepest.uses)
            turn = 1 if kind == 1 else turn
        silence = count_steps(self.now - last, (self.edges[1] * 16, self.edges[1] * 64, self.edges[1] * 256))
        return Context(seen, len(keys) - seen, kind, silence, turn, last)

    def _meet(self, keys: Sequence[int], context: Context, told: int) -> None:
        """Make an entry for every block that has none, and count it as a child of the block before it."""
        for place in range(context.seen, len(keys)):
            if keys[place] in self.entries:
                continue
            if place >= told:
                self.entries[keys[place]] = Entry(context.turn)
                if self.chained and place and keys[place - 1] in self.entries:
                    self.entries[keys[place - 1]].fan += 1

    def _file(self, key: int, context: Context, end: bool, kind: int) -> None:
        """Count a return of the block, and file its new use."""
        entry = self.entries.get(key)
        if entry is None:  # the ring is shorter than this request
            return
        own = entry.uses > 0 and entry.last == context.last
        gap = self.now - entry.last if entry.uses else 0
        if entry.place >= 0:
            for old in entry.classes:
                if old >= 0:
                    self._get_cells(old)[entry.age].returns += 1.0
            self._settle(entry, entry.age, -1)
        entry.uses += 1
        unit = self.edges[1]
        by_block = classify_by_block(end, context.seen, context.unseen, entry.uses, gap, entry.fan, unit)
        by_conversation = classify_by_conversation(context, end, entry.uses, own, gap, entry.fan, unit)
        entry.classes = (kind * KINDS + by_block, kind * KINDS + by_conversation)
        entry.age, entry.last = 0, self.now
        self._settle(entry, 0, +1)
        self._join_ring(key, entry)

    def _file_session(self, key: int, context: Context) -> None:
        """Note when a session spoke last, and its turn; it has no class and is worth nothing."""
        entry = self.entries.setdefault(key, Entry(context.turn))
        entry.uses += 1
        entry.last = self.now
        self._join_ring(key, entry)

    def _join_ring(self, key: int, entry: Entry) -> None:
        """Remember the use; the oldest one leaves a full ring."""
        if len(self.ring) >= self.plan.history:
            place, oldest, _ = self.ring.popleft()
            gone = self.entries.get(oldest)
            if gone is not None and gone.place == place and gone is not entry:
                self._settle(gone, gone.age, -1)
                del self.entries[oldest]
        entry.place = self.places
        self.ring.append((self.places, key, self.now))
        self.places += 1

    def _learn_if_due(self) -> None:
        clock, accesses = self.clock - self.taught[0], self.seen - self.taught[1]
        plan = self.plan
        if clock >= plan.every and accesses >= min(plan.blocks, max(FIRST_LESSON, self.seen / 8.0)):
            self._learn(0.5 ** min(clock / plan.memory, accesses / plan.memory_blocks))
            self.taught = (self.clock, self.seen)
            self.epoch += 1

    def _learn(self, fade: float) -> None:
        """Compute the index of every class from the evidence, then let the evidence fade."""
        for row in self.ledger.values():
            for cell in row:
                cell.settle(self.now, 0)
        assumed = (self.plan.priors * np.array(self._estimate_common_rates())).tolist()
        trust = self.plan.trust
        self.rates, self.unknown = [], {}
        for one in range(self.types):
            known = {kind: row for kind, row in self.ledger.items() if kind // KINDS == one and has_evidence(row)}
            together = [[Cell() for _ in range(self.ages)] for _ in range(GROUPS)]
            for kind in sorted(known):
                for sum_, cell in zip(together[find_group(kind % KINDS)], known[kind], strict=True):
                    sum_.returns += cell.returns
                    sum_.exposure += cell.exposure
            rates = [estimate_rates(*pair, trust) for pair in zip(together, assumed, strict=True)]
            self.rates.append(rates)
            for kind, row in known.items():
                rate = estimate_rates(row, rates[find_group(kind % KINDS)], trust)
                self.index[kind] = find_best_rates(rate, self.edges)
                for cell in row:
                    cell.returns *= fade
                    cell.exposure *= fade

    def _estimate_common_rates(self) -> list[float]:
        """Estimate the rate of returns by age over all blocks except the ends of prompts.

        An age without evidence takes the rate of the age before.
        """
        plan, common = self.plan, list[float]()
        rows = [self.ledger[kind] for kind in sorted(self.ledger) if 4 <= kind % KINDS < BLOCK_KINDS]
        for age in range(self.ages):
            returns = sum(row[age].returns for row in rows)
            exposure = sum(row[age].exposure for row in rows)
            prior = plan.hope / (0.5 * (self.edges[age] + self.edges[age + 1]))
            prior = max(prior, common[-1]) if common else prior
            common.append((returns + plan.doubt) / (exposure + plan.doubt / prior))
        return common

    @property
    def returns_by_type(self) -> list[float]:
        """Returns per cache-ful of waiting, by block type."""
        ledger = np.zeros((self.types * KINDS, self.ages, 4))
        for kind, row in self.ledger.items():
            ledger[kind, :, :2] = [(cell.returns, cell.exposure) for cell in row]
        return self.plan.compute_returns(ledger, self.types)


def has_evidence(cells: list[Cell]) -> bool:
    """Whether a block of this class ever waited or came back."""
    return any(cell.exposure > 0.0 or cell.returns > 0.0 for cell in cells)


def estimate_rates(cells: list[Cell], assumed: list[float], trust: float) -> list[float]:
    """Estimate the returns per unit of waiting at every age; little evidence leans on ``assumed``."""
    return [(cell.returns + trust) / (cell.exposure + trust / rate) for cell, rate in zip(cells, assumed, strict=True)]


def find_best_rates(rate: list[float], edges: list[float]) -> list[float]:
    """Find for every age the best ratio of returns to waiting over all times at which one might give up.

    From the last age to the first: a stretch of ages takes in the next one while that has the better ratio. Ratios of
    the stretches that follow each other fall, so that this is the best time to give up, in one pass.

    >>> [round(value, 3) for value in find_best_rates([0.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0])]
    [0.286, 0.667, 0.0]
    """
    stretches: list[tuple[float, float, float]] = []  # returns, waiting and chance to be left; the earliest comes last
    best = [0.0] * len(rate)
    for age in range(len(rate) - 1, -1, -1):
        width = edges[age + 1] - edges[age]
        expected = rate[age] * width
        chance = expected / (1.0 + expected)
        gain, cost, left = chance, width * (1.0 - 0.5 * chance), 1.0 - chance
        while stretches and stretches[-1][0] * cost > gain * stretches[-1][1]:  # going on is better than giving up
            more, longer, later = stretches.pop()
            gain += left * more
            cost += left * longer
            left *= later
        stretches.append((gain, cost, left))
        best[age] = gain / cost
    return best
