"""The policy that learns, while it runs, which blocks are used again and after how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Block, Cache, PlainPolicy

# Classes of a block within its type. New blocks: four groups of four, by how much of the request is new. Blocks used
# before: 16 + fame * 6 + gap (fame: a step of the use count), or 58 + gap if several continuations are known.
KINDS: Final = 64
NEW_KINDS: Final = 16
SEVERAL: Final = 58
# Assumed rate of returns of a class without evidence, as a multiple of the rate of all classes together. It holds at
# ages beyond one cache-ful, where evidence comes late: the end of a prompt hardly ever returns, other new blocks return
# as all blocks do, often used ones more often. A few observed returns outweigh it. By level: four groups of new blocks,
# seven steps of fame.
PRIORS: Final = (0.1, 1.0, 1.0, 1.0, 4.0, 8.0, 16.0, 16.0, 16.0, 16.0, 16.0)
FIRST_LESSON: Final = 16.0  # block accesses; later lessons come every eighth of what has been seen, up to the plan's


@dataclass(frozen=True)
class AdaptivePlan:
    """Clock, ages and learning rates of one run of `AdaptiveSemantic`. Nothing in it looks ahead.

    The clock counts the requested blocks in the unit of the capacity: at an age of 1 capacity, as many blocks as fit in
    the cache have been requested since. So ages mean the same at every size and speed, and need no times in the trace.
    """

    clock: npt.NDArray[np.float64]  # per request
    edges: npt.NDArray[np.float64]  # of the ages
    priors: npt.NDArray[np.float64]  # by level and age, see `PRIORS`
    every: float  # least clock between two lessons
    blocks: float  # block accesses between two lessons, once as many have been seen eight times over
    memory: float  # clock after which half of the old evidence is left, if
    memory_blocks: float  # as many block accesses have also passed
    trust: float  # returns of a class that weigh as much as what is assumed of it
    hope: float  # returns expected over the youngest age before anything is known
    doubt: float  # returns at an age that weigh as much as those at the age before

    @staticmethod
    def build(forest: Forest, capacity: Capacity, options: Mapping[str, Any]) -> AdaptivePlan:
        """Build the plan of one run from the trace, the capacity and the policy's options."""
        sizes = forest.get_sizes(capacity.unit)
        total = np.concatenate(([0], np.cumsum(sizes[forest.node], dtype=np.int64)))
        unit = max(1.0, capacity.size / float(options.get("finest", 32.0)))
        bins, ratio = int(options.get("bins", 20)), float(options.get("ratio", 2.0**0.5))
        edges = np.array([0.0] + [unit * ratio**k for k in range(bins)])
        share = float(options.get("share", 1.0))  # of the blocks that are seen, when a sample stands for all
        return AdaptivePlan(
            clock=total[forest.trace.starts[:-1]].astype(np.float64),
            edges=edges,
            priors=np.where(edges[:-1] >= capacity.size, np.array(PRIORS)[:, None], 1.0),
            every=max(1.0, capacity.size / 8.0),
            blocks=float(options.get("lesson_blocks", 600.0)) * share,
            memory=max(1.0, float(options.get("memory", 100.0)) * capacity.size),
            memory_blocks=50_000.0 * share,
            trust=float(options.get("trust", 0.5)) * share,
            hope=float(options.get("hope", 0.05)),
            doubt=10.0 * share,
        )

    def lesson_is_due(self, clock: float, accesses: float, seen: float) -> bool:
        """Whether to learn again, ``clock`` and ``accesses`` after the last lesson and ``seen`` accesses in all."""
        return clock >= self.every and accesses >= min(self.blocks, max(FIRST_LESSON, seen / 8.0))

    def compute_fade(self, clock: float, accesses: float) -> float:
        """Compute the share of old evidence to keep."""
        left: float = 0.5 ** min(clock / self.memory, accesses / self.memory_blocks)
        return left

    def build_first_index(self) -> npt.NDArray[np.float64]:
        """Build the index before the first lesson, by level and age: the youngest blocks are worth most."""
        return self.priors / (1.0 + self.edges[1:])

    def compute_weights(self, ledger: npt.NDArray[np.float64], names: tuple[str, ...]) -> dict[str, float]:
        """Compute for each block type the returns per cache-ful of waiting: what the run learned, in one number."""
        by_type = ledger.reshape(len(names), -1, ledger.shape[1], 4).sum(axis=(1, 2))
        scale = self.every * 8.0
        return {name: float(row[0] / row[1] * scale) for name, row in zip(names, by_type, strict=True) if row[1] > 0}


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


def find_level(kind: int) -> int:
    """Find the row of a class in `PRIORS`: the group of a new block, or the use count of an older one."""
    if kind < NEW_KINDS:
        return kind // 4
    return 4 if kind >= SEVERAL else 4 + (kind - NEW_KINDS) // 6


class AdaptiveSemantic(PlainPolicy):
    """Learns which blocks return and after how long; keeps those with the most returns for their space and time.

    Every use of a block is filed under a class: its type, whether it is the end of its prompt, how much of the request
    had been seen before, how often and after what gap the block was used, and whether several continuations of it are
    known. For every class and age it counts how long blocks waited and how many returned, cached or not: a return after
    an eviction (regret) teaches as much as a hit. These rates give an index: the best ratio of expected returns to
    expected waiting that keeping a block of this class and age can still bring. Blocks with the smallest index are
    evicted first, new blocks included.
    """

    bypass = True

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.plan = AdaptivePlan.build(forest, Capacity(options["unit"], capacity), options)
        self.ages = len(self.plan.edges) - 1
        self.ledger: dict[tuple[int, int], Cell] = {}
        self.index: dict[int, list[float]] = {}
        self.unknown: list[list[float]] = self.plan.build_first_index().tolist()  # per level
        self.uses: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.last: dict[int, tuple[int, float, int]] = {}  # node -> access, clock, class
        self.waiting: list[tuple[int, float, int, int]] = []  # node, clock, class, access; in order of time
        self.age_of: dict[int, int] = {}  # access -> age it has reached, while its block has not come back
        self.taught = (0.0, 0)  # clock and accesses at the last lesson
        self.scored = self.accesses = 0

    def get_cell(self, kind: int, age: int) -> Cell:
        """Return the evidence of a class at an age, empty at first."""
        return self.ledger.setdefault((kind, age), Cell())

    def find_age(self, waited: float) -> int:
        """Find the index of the age range that a waiting time falls into."""
        return sum(waited >= edge for edge in self.plan.edges[1:-1].tolist())

    def on_request(self, r: int, nodes: list[int], first: int) -> None:
        self.now = now = float(self.plan.clock[r])
        self._grow_older()
        seen = next((place for place, node in enumerate(nodes) if node not in self.uses), len(nodes))
        for place in range(len(nodes) - 1, -1, -1):
            node, parent = nodes[place], int(self.forest.parent[nodes[place]])
            gap = 0.0
            if node in self.last:
                access, then, kind = self.last[node]
                gap = now - then
                cell = self.get_cell(kind, self.find_age(gap))
                cell.returns += 1.0
                cell.settle(now, -1)
                self.age_of.pop(access, None)
            elif parent >= 0:
                self.children[parent] = self.children.get(parent, 0) + 1
            self.uses[node] = self.uses.get(node, 0) + 1
            kind = int(self.forest.types[node]) * KINDS + self._classify_use(
                first + place, len(nodes) - seen, seen, node, gap
            )
            self.get_cell(kind, 0).settle(now, +1)
            self.last[node] = (first + place, now, kind)
            self.age_of[first + place] = 0
            self.waiting.append((node, now, kind, first + place))
        self.accesses = first + len(nodes)

    def _grow_older(self) -> None:
        """Move uses that have not returned to the next age."""
        for _, then, kind, access in self.waiting:
            age = self.age_of.get(access)
            while age is not None and age < self.find_age(self.now - then):
                self.get_cell(kind, age).settle(self.now, -1)
                age += 1
                self.get_cell(kind, age).settle(self.now, +1)
                self.age_of[access] = age

    def _classify_use(self, access: int, unseen: int, seen: int, node: int, gap: float) -> int:
        """Find the class of a use within its block type."""
        uses = self.uses[node]
        if uses == 1:
            group = 0 if self.forest.tail[access] else 1 if seen <= 1 else 2 if unseen < 6 else 3
            return group * 4 + sum(unseen >= limit for limit in (3, 12, 40))
        level = sum(gap >= float(self.plan.edges[1]) * 4.0**step for step in range(1, 6))
        fame = min(uses, 5) - 2 + sum(uses > limit for limit in (8, 32, 128))
        several = self.children.get(node, 0) > 1
        return SEVERAL + level if several and fame < 4 else NEW_KINDS + fame * 6 + level

    def on_touch(self, block: Block) -> None:
        block.priority = self._find_index(self.last[block.node][2])[0]

    on_insert = on_touch

    def _find_index(self, kind: int) -> list[float]:
        """Return the index of a class by age; that of its level if nothing is known about it."""
        return self.index[kind] if kind in self.index else self.unknown[find_level(kind % KINDS)]

    def on_request_end(self, cache: Cache) -> None:
        self.cache = cache
        clock, accesses = self.now - self.taught[0], self.accesses - self.taught[1]
        if self.plan.lesson_is_due(clock, accesses, self.accesses):
            self._learn(self.plan.compute_fade(clock, accesses))
            self.taught, self.scored = (self.now, self.accesses), -1
        leaves = list(cache.find_evictable())
        if self.scored < 0 or self.accesses - self.scored >= len(leaves):
            for block in leaves:
                self._score(block)
            self.scored = self.accesses

    def _score(self, block: Block) -> None:
        """Compute the priority of a block again, for its present age."""
        _, then, kind = self.last[block.node]
        block.priority = self._find_index(kind)[self.find_age(self.now - then)]

    def on_evict(self, block: Block) -> None:
        parent = self.cache.blocks.get(block.parent)
        if parent is not None and parent.children == 0:
            self._score(parent)

    def _learn(self, fade: float) -> None:
        """Compute the index of every known class from the evidence, then let the evidence fade."""
        for cell in self.ledger.values():
            cell.settle(self.now, 0)
        common, edges, trust = self._estimate_common_rates(), self.plan.edges.tolist(), self.plan.trust
        assumed = (self.plan.priors * common).tolist()
        nothing = [Cell()] * self.ages
        self.unknown = [find_best_rates(estimate_rates(nothing, level, trust), edges) for level in assumed]
        for kind in {kind for kind, _ in self.ledger}:
            within = kind % KINDS
            prior = assumed[find_level(within)]
            if within >= NEW_KINDS:
                self.index[kind] = find_best_rates(estimate_rates(self._list_cells(kind), prior, trust), edges)
                continue
            group = range(kind - within % 4, kind - within % 4 + 4)
            together = estimate_rates(
                [add_cells(cells) for cells in zip(*map(self._list_cells, group), strict=True)], prior, trust
            )
            for member in group:
                self.index[member] = find_best_rates(estimate_rates(self._list_cells(member), together, trust), edges)
        for cell in self.ledger.values():
            cell.returns *= fade
            cell.exposure *= fade

    def _list_cells(self, kind: int) -> list[Cell]:
        """List the evidence of a class at every age."""
        return [self.ledger.get((kind, age), Cell()) for age in range(self.ages)]

    def _estimate_common_rates(self) -> list[float]:
        """Estimate the rate of returns by age over all classes except the ends of prompts.

        An age without evidence takes the rate of the age before.
        """
        edges, plan, common = self.plan.edges.tolist(), self.plan, list[float]()
        for age in range(self.ages):
            known = add_cells(self.ledger[key] for key in sorted(self.ledger) if key[1] == age and key[0] % KINDS >= 4)
            prior = plan.hope / (0.5 * (edges[age] + edges[age + 1]))
            prior = max(prior, common[-1]) if common else prior
            common.append((known.returns + plan.doubt) / (known.exposure + plan.doubt / prior))
        return common

    def report_weights(self) -> dict[str, float]:
        names = self.forest.trace.type_names
        ledger = np.zeros((len(names) * KINDS, self.ages, 4))
        for (kind, age), cell in self.ledger.items():
            ledger[kind, age, :2] = cell.returns, cell.exposure
        return self.plan.compute_weights(ledger, names)


def add_cells(cells: Any) -> Cell:
    """Add up the evidence of several cells."""
    whole = Cell()
    for cell in cells:
        whole.returns += cell.returns
        whole.exposure += cell.exposure
    return whole


def estimate_rates(cells: list[Cell], assumed: list[float], trust: float) -> list[float]:
    """Estimate the returns per unit of waiting at every age; little evidence leans on ``assumed``."""
    return [(cell.returns + trust) / (cell.exposure + trust / rate) for cell, rate in zip(cells, assumed, strict=True)]


def find_best_rates(rate: list[float], edges: list[float]) -> list[float]:
    """Find for every age the best ratio of returns to waiting over all times at which one might give up.

    >>> [round(value, 3) for value in find_best_rates([0.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0])]
    [0.286, 0.667, 0.0]
    """
    chance = []
    for age, value in enumerate(rate):
        expected = value * (edges[age + 1] - edges[age])
        chance.append(expected / (1.0 + expected))
    best = []
    for age in range(len(rate)):
        most, gain, cost, alive = 0.0, 0.0, 0.0, 1.0
        for later in range(age, len(rate)):
            gain += alive * chance[later]
            cost += alive * (edges[later + 1] - edges[later]) * (1.0 - 0.5 * chance[later])
            alive *= 1.0 - chance[later]
            most = max(most, gain / cost)
        best.append(most)
    return best
