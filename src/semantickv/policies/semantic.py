"""Policies that know what a block is: fixed weights, and weights learnt from what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from semantickv.capacity import Capacity
from semantickv.forest import Forest
from semantickv.plain import Block, Cache, PlainPolicy

TYPE_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "system": 2.4,
        "template": 2.0,
        "code": 1.6,
        "legal_evidence": 1.4,
        "retrieved_context": 1.4,
        "tool_output": 1.1,
        "assistant": 1.0,
        "other": 0.8,
        "user": 0.7,
    }
)


class StaticSemantic(PlainPolicy):
    """Worth = weight of the type x log of the uses x prefill time saved / square root of the tokens.

    Newcomers and residents are weighed in the same unit (milliseconds at 0.08 a token); a newcomer that is worth less
    than everything cached is refused.
    """

    bypass = True

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.type_weights = options["type_weights"]

    def priority(self, block: Block) -> float:
        fame = max(1.0, math.log(1.0 + block.uses))
        weight: float = self.type_weights.get(block.type, 1.0)
        return weight * fame * max(1.0, block.tokens * 0.08) / math.sqrt(block.tokens)

    def weights(self) -> dict[str, float]:
        return dict(self.type_weights)


KINDS: Final = 52


@dataclass(frozen=True)
class AdaptivePlan:
    """Clock, ages and rates of learning of one run of `AdaptiveSemantic`.

    The clock counts what has been asked for, in the unit of the capacity: an age of 1 capacity means that a cache-ful
    of blocks went by. Ages therefore mean the same at every size and speed, and need no times in the trace.
    """

    clock: npt.NDArray[np.float64]  # per request
    edges: npt.NDArray[np.float64]  # of the ages
    every: float  # clock between two lessons
    fade: float  # what is left of old evidence after a lesson
    trust: float  # returns of a class that weigh as much as those of all classes together
    hope: float  # returns expected over an age of which nothing is known yet

    @staticmethod
    def of(forest: Forest, capacity: Capacity, options: Mapping[str, Any]) -> AdaptivePlan:
        sizes = forest.sizes(capacity.unit)
        total = np.concatenate(([0], np.cumsum(sizes[forest.node], dtype=np.int64)))
        clock = total[forest.trace.starts[:-1]].astype(np.float64)
        mean = float(total[-1]) / max(1, len(forest.node))
        unit = max(1.0, capacity.size / float(options.get("finest", 32.0)))
        bins, ratio = int(options.get("bins", 20)), float(options.get("ratio", 2.0**0.5))
        edges = np.array([0.0] + [unit * ratio**k for k in range(bins)])
        every = max(1.0, capacity.size / 8.0, float(options.get("lesson_blocks", 600.0)) * mean)
        memory = max(1.0, float(options.get("memory", 100.0)) * capacity.size, 50_000.0 * mean)
        fade = 0.5 ** (every / memory)
        return AdaptivePlan(
            clock, edges, every, fade, float(options.get("trust", 0.5)), float(options.get("hope", 0.05))
        )

    def first_index(self, types: int) -> npt.NDArray[np.float64]:
        """Before the first lesson the youngest are worth most: LRU."""
        return np.tile(1.0 / (1.0 + self.edges[1:]), (types * KINDS, 1))

    def weights(self, ledger: npt.NDArray[np.float64], names: tuple[str, ...]) -> dict[str, float]:
        """Returns per cache-ful of waiting, by type: what the run learnt, in one number each."""
        by_type = ledger.reshape(len(names), -1, ledger.shape[1], 4).sum(axis=(1, 2))
        scale = self.edges[1] * 32
        return {name: float(row[0] / row[1] * scale) for name, row in zip(names, by_type, strict=True) if row[1] > 0}


class AdaptiveSemantic(PlainPolicy):
    """Learns, while it runs, which blocks come back and after how long; keeps those that are soonest worth their space.

    Every use of a block is filed under a class: its type, whether it is the end of its prompt, how much of the request
    had been seen before, how often and after what gap the block was used, whether several continuations of it are
    known. For every class and age it counts how long blocks waited and how many came back, whether they were cached or
    not: a return after an eviction (regret) teaches as much as a hit. From these rates follows an index: the best ratio
    of expected returns to expected waiting that can still be had by keeping a block of this class and age. Blocks with
    the smallest index go first, the newcomers included.
    """

    bypass = True

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.plan = AdaptivePlan.of(forest, Capacity(options["unit"], capacity), options)
        self.ages = len(self.plan.edges) - 1
        self.ledger: dict[tuple[int, int], Cell] = {}
        self.index: dict[int, list[float]] = {}
        self.common_index: list[float] = [1.0 / (1.0 + edge) for edge in self.plan.edges[1:].tolist()]
        self.uses: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.last: dict[int, tuple[int, float, int]] = {}  # node -> access, clock, class
        self.waiting: list[tuple[int, float, int, int]] = []  # node, clock, class, access; in order of time
        self.age_of: dict[int, int] = {}  # access -> age it has reached, while its block has not come back
        self.next_lesson, self.scored = self.plan.every, 0

    def cell(self, kind: int, age: int) -> Cell:
        return self.ledger.setdefault((kind, age), Cell())

    def age(self, waited: float) -> int:
        return sum(waited >= edge for edge in self.plan.edges[1:-1].tolist())

    def asked(self, r: int, nodes: list[int], first: int) -> None:
        self.now = now = float(self.plan.clock[r])
        self._grow_older()
        seen = next((place for place, node in enumerate(nodes) if node not in self.uses), len(nodes))
        for place in range(len(nodes) - 1, -1, -1):
            node, parent = nodes[place], int(self.forest.parent[nodes[place]])
            gap = 0.0
            if node in self.last:
                access, then, kind = self.last[node]
                gap = now - then
                cell = self.cell(kind, self.age(gap))
                cell.returns += 1.0
                cell.settle(now, -1)
                self.age_of.pop(access, None)
            elif parent >= 0:
                self.children[parent] = self.children.get(parent, 0) + 1
            self.uses[node] = self.uses.get(node, 0) + 1
            kind = int(self.forest.types[node]) * KINDS + self._kind(first + place, len(nodes) - seen, seen, node, gap)
            self.cell(kind, 0).settle(now, +1)
            self.last[node] = (first + place, now, kind)
            self.age_of[first + place] = 0
            self.waiting.append((node, now, kind, first + place))
        self.accesses = first + len(nodes)

    def _grow_older(self) -> None:
        for _, then, kind, access in self.waiting:
            age = self.age_of.get(access)
            while age is not None and age < self.age(self.now - then):
                self.cell(kind, age).settle(self.now, -1)
                age += 1
                self.cell(kind, age).settle(self.now, +1)
                self.age_of[access] = age

    def _kind(self, access: int, unseen: int, seen: int, node: int, gap: float) -> int:
        uses = self.uses[node]
        if uses == 1:
            return 0 if self.forest.tail[access] else 1 if seen <= 1 else 2 if unseen < 6 else 3
        level = sum(gap >= float(self.plan.edges[1]) * 4.0**step for step in range(1, 6))
        fame = min(uses, 5) - 2 + sum(uses > limit for limit in (8, 32, 128))
        several = self.children.get(node, 0) > 1
        return 46 + level if several and fame < 4 else 4 + fame * 6 + level

    def touched(self, block: Block) -> None:
        block.priority = self.index.get(self.last[block.node][2], self.common_index)[0]

    inserted = touched

    def settled(self, cache: Cache) -> None:
        self.cache = cache
        if self.now >= self.next_lesson:
            self._lesson()
            self.next_lesson, self.scored = self.now + self.plan.every, -1
        leaves = list(cache.evictable())
        if self.scored < 0 or self.accesses - self.scored >= len(leaves):
            for block in leaves:
                self._score(block)
            self.scored = self.accesses

    def _score(self, block: Block) -> None:
        _, then, kind = self.last[block.node]
        block.priority = self.index.get(kind, self.common_index)[self.age(self.now - then)]

    def evicted(self, block: Block) -> None:
        parent = self.cache.blocks.get(block.parent)
        if parent is not None and parent.children == 0:
            self._score(parent)

    def _lesson(self) -> None:
        plan, edges = self.plan, self.plan.edges.tolist()
        for cell in self.ledger.values():
            cell.settle(self.now, 0)
        common = []
        for age in range(self.ages):
            cells = [self.ledger[key] for key in sorted(self.ledger) if key[1] == age and key[0] % KINDS]
            waited = sum((cell.exposure for cell in cells), 0.0)
            returns = sum((cell.returns for cell in cells), 0.0)
            middle = 0.5 * (edges[age] + edges[age + 1])
            common.append((returns + 10.0) / (waited + 10.0 * middle / plan.hope))
        self.common_index = best_rates([Cell()] * self.ages, common, edges, plan.trust)
        for kind in {kind for kind, _ in self.ledger}:
            cells = [self.ledger.get((kind, age), Cell()) for age in range(self.ages)]
            self.index[kind] = best_rates(cells, common, edges, plan.trust)
        for cell in self.ledger.values():
            cell.returns *= plan.fade
            cell.exposure *= plan.fade

    def weights(self) -> dict[str, float]:
        names = self.forest.trace.type_names
        ledger = np.zeros((len(names) * KINDS, self.ages, 4))
        for (kind, age), cell in self.ledger.items():
            ledger[kind, age, :2] = cell.returns, cell.exposure
        return self.plan.weights(ledger, names)


@dataclass
class Cell:
    """Evidence about blocks of one class at one age."""

    returns: float = 0.0
    exposure: float = 0.0  # clock spent waiting, summed over blocks
    at_risk: int = 0
    since: float = 0.0

    def settle(self, now: float, change: int) -> None:
        self.exposure += self.at_risk * (now - self.since)
        self.since = now
        self.at_risk += change


def best_rates(cells: list[Cell], common: list[float], edges: list[float], trust: float) -> list[float]:
    """For every age, the best ratio of returns to waiting over all times one might decide to give up."""
    chance = []
    for age, cell in enumerate(cells):
        expected = (cell.returns + trust) / (cell.exposure + trust / common[age]) * (edges[age + 1] - edges[age])
        chance.append(expected / (1.0 + expected))
    rates = []
    for age in range(len(cells)):
        best, gain, cost, alive = 0.0, 0.0, 0.0, 1.0
        for later in range(age, len(cells)):
            gain += alive * chance[later]
            cost += alive * (edges[later + 1] - edges[later]) * (1.0 - 0.5 * chance[later])
            alive *= 1.0 - chance[later]
            best = max(best, gain / cost)
        rates.append(best)
    return rates
