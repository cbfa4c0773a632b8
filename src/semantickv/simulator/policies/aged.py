"""Two published policies whose value of a block falls with its age: LHD, and the one of Alibaba's Bailian.

Both keep evidence by class and age, and compute a table of values from it once a cache-ful; a block is worth its
class's value at its age, for each unit of its space. The clock counts requested blocks in the unit of the capacity.
Blocks are priced again after a lesson, or after as many accesses as there are leaves, as in `adaptive_semantic`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import exp
from typing import Any, Final

from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Block, Cache, PlainPolicy
from semblend.eviction.plan import AdaptivePlan

FADE: Final = 0.9  # of the evidence that is left after a lesson
TURNS: Final = 4  # turns of a conversation that are told apart; later ones are the last
LHD_CLASSES: Final = 12  # new, or by the age at the last hit
EXPLORER_EVERY: Final = 32
EXPLORED_PART: Final = 64


def build_edges(capacity: int) -> list[float]:
    """Build the limits of the ages, those of the learning policy."""
    edges: list[float] = AdaptivePlan.build(max(1, capacity)).edges.tolist()
    return edges


class Aged(PlainPolicy, ABC):
    """What both have in common. A subclass files uses and evictions, and computes the table of values."""

    bypass = True
    kinds = 1  # classes of one block type

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.edges = build_edges(capacity)
        self.ages = len(self.edges) - 1
        self.sizes = forest.get_sizes(options["unit"]).tolist()
        self.types = forest.types.tolist()
        classes = self.kinds * len(forest.trace.type_names)
        first = [1.0 / (1.0 + edge) for edge in self.edges[:-1]]
        self.table = [list(first) for _ in range(classes)]
        self.evidence = [[[0.0, 0.0] for _ in range(self.ages)] for _ in range(classes)]
        self.last: dict[int, int] = {}
        self.kind: dict[int, int] = {}
        self.cached: set[int] = set()
        self.now = self.clock = self.taught = self.scored = self.accesses = 0
        self.due = False

    def find_age(self, node: int) -> int:
        """Find the age range of a block."""
        waited, age = self.now - self.last[node], 0
        while age < self.ages - 1 and waited >= self.edges[age + 1]:
            age += 1
        return age

    def on_request(self, r: int, nodes: list[int], first: int) -> None:  # noqa: ARG002
        self.now = self.clock
        self.file_uses(nodes)
        self.clock += sum(self.sizes[node] for node in nodes)
        self.accesses = first + len(nodes)
        self.due = self.clock - self.taught >= max(1, self.capacity)
        if self.due:
            self.learn()
            for row in self.evidence:
                for cell in row:
                    cell[0] *= FADE
                    cell[1] *= FADE
            self.taught = self.clock

    @abstractmethod
    def file_uses(self, nodes: list[int]) -> None:
        """File the uses of a request's blocks, the last one first."""

    @abstractmethod
    def learn(self) -> None:
        """Compute the table from the evidence."""

    def priority(self, block: Block) -> float:
        return self.table[self.kind[block.node]][self.find_age(block.node)] / block.size

    def on_insert(self, block: Block) -> None:
        self.cached.add(block.node)
        super().on_insert(block)

    def on_request_end(self, cache: Cache) -> None:
        self.cache = cache
        leaves = list(cache.find_evictable())
        if self.due or self.accesses - self.scored >= len(leaves):
            for block in leaves:
                block.priority = self.priority(block)
            self.scored = self.accesses

    def on_evict(self, block: Block) -> None:
        self.cached.discard(block.node)
        parent = self.cache.blocks.get(block.parent)
        if parent is not None and parent.children == 0:
            parent.priority = self.priority(parent)


class Lhd(Aged):
    """Least hit density (Beckmann, Chen, Cidon: NSDI 2018): expected hits for the space and time that they take.

    Evidence: hits and evictions of cached blocks by age. A class is a block's type (the paper's application) and the
    age at its last hit. The paper samples 64 blocks for an eviction; here the least of all leaves goes. As there, a few
    newcomers explore: they stay until they are hit or reach the last age, or hits behind the present age of eviction
    would never be seen. They may take a 64th of the cache, and come from every 32nd block.
    """

    kinds = LHD_CLASSES

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.explorers: set[int] = set()
        self.budget = max(1, capacity // EXPLORED_PART)

    def file_uses(self, nodes: list[int]) -> None:
        for node in reversed(nodes):
            kind = 0
            if node in self.cached:
                age = self.find_age(node)
                self.evidence[self.kind[node]][age][0] += 1.0
                kind = 1 + age // 2
            self.end_exploring(node)
            if kind == 0 and node % EXPLORER_EVERY == 0 and self.budget >= self.sizes[node]:
                self.explorers.add(node)
                self.budget -= self.sizes[node]
            self.kind[node] = self.types[node] * self.kinds + kind
            self.last[node] = self.now

    def end_exploring(self, node: int) -> None:
        """Give back what an explorer takes of the budget."""
        if node in self.explorers:
            self.explorers.discard(node)
            self.budget += self.sizes[node]

    def priority(self, block: Block) -> float:
        explores = block.node in self.explorers and self.find_age(block.node) < self.ages - 1
        return super().priority(block) + (1.0 if explores else 0.0)

    def on_evict(self, block: Block) -> None:
        self.evidence[self.kind[block.node]][self.find_age(block.node)][1] += 1.0
        self.end_exploring(block.node)
        super().on_evict(block)

    def learn(self) -> None:
        for kind, row in enumerate(self.evidence):
            hits = events = lifetime = 0.0
            for age in range(self.ages - 1, -1, -1):
                hits += row[age][0]
                events += row[age][0] + row[age][1]
                lifetime += events * (self.edges[age + 1] - self.edges[age])
                if lifetime > 0.0:
                    self.table[kind][age] = hits / lifetime


class WorkloadAware(Aged):
    """As Alibaba's Bailian evicts (Wang and others: KVCache Cache in the Wild, ATC 2025): the chance of a reuse soon.

    Evidence: how many blocks of a category came back, cached or not, and the mean of their gaps. A category is a
    block's type and the turn of the conversation that used it last, which is one more than that of the deepest block
    known of it. Gaps are taken as exponential, and "soon" is the next cache-ful.
    """

    kinds = TURNS

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.turn: dict[int, int] = {}

    def file_uses(self, nodes: list[int]) -> None:
        turn = 1
        for node in nodes:
            if node not in self.turn:
                break
            turn = self.turn[node] + 1
        for node in reversed(nodes):
            if node in self.kind:
                returned = self.evidence[self.kind[node]]
                returned[0][0] += 1.0
                returned[0][1] += float(self.now - self.last[node])
            self.turn.setdefault(node, turn)
            self.kind[node] = self.types[node] * self.kinds + min(turn, TURNS) - 1
            self.evidence[self.kind[node]][1][0] += 1.0
            self.last[node] = self.now

    def learn(self) -> None:
        soon = float(max(1, self.capacity))
        for kind, row in enumerate(self.evidence):
            returns, gaps, uses = row[0][0], row[0][1], row[1][0]
            if uses <= 0.0:
                continue
            mean = max(1.0, gaps / returns) if returns > 0.0 else 1.0
            for age in range(self.ages):
                begin = self.edges[age]
                self.table[kind][age] = min(1.0, returns / uses) * (exp(-begin / mean) - exp(-(begin + soon) / mean))
