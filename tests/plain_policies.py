"""The policies of `semantickv.simulator` in plain Python: short enough to read, and what the compiled code must do.

`Belady` needs what comes next: for blocks of one size it is the best possible number of block hits among policies that
must cache what a request brings, `BeladyBypass` among all. Both hold in prefix mode too: a parent is needed no later
than its children.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from math import exp
from typing import Any

import numpy as np

from semantickv.simulator.forest import Forest
from semantickv.simulator.kernels import EXPLORED_PART, EXPLORER_EVERY, FADE, LHD_CLASSES, SEGMENT, TURNS
from semantickv.simulator.plain import Block, Cache, PlainPolicy
from semantickv.simulator.policies import (
    POLICIES,
    Policy,
    build_edges,
    build_plan,
    count_tokens_to_end,
    number_sessions,
)
from semblend.eviction.adaptive import Adaptive


class Lru(PlainPolicy):
    """Evicts the block unused for the longest time."""


class Fifo(PlainPolicy):
    """Evicts the block cached for the longest time."""

    def priority(self, block: Block) -> float:
        return block.inserted


class Lfu(PlainPolicy):
    """Evicts the block used least often since it was inserted."""

    def priority(self, block: Block) -> float:
        return block.uses


class LfuAll(PlainPolicy):
    """Evicts the block used least often since the run began; what was evicted keeps its count."""

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.counts: dict[int, int] = {}

    def priority(self, block: Block) -> float:
        self.counts[block.node] = self.counts.get(block.node, 0) + 1
        return self.counts[block.node]


class Lru2(PlainPolicy):
    """LRU-2: evicts the block whose last use but one is oldest, those used once first; history survives eviction."""

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.last: dict[int, tuple[int, int]] = {}

    def priority(self, block: Block) -> float:
        self.last[block.node] = (self.last.get(block.node, (0, 0))[1], block.used)
        return self.last[block.node][0]


class SizeAwareLru(PlainPolicy):
    """Evicts the smallest last use divided by tokens: of two equally old blocks, the larger one."""

    def priority(self, block: Block) -> float:
        return block.used / block.tokens


class Lfuda(PlainPolicy):
    """Least often used with dynamic ageing: every eviction raises the value that new blocks start from."""

    floor = 0.0

    def priority(self, block: Block) -> float:
        return self.floor + block.uses

    def on_evict(self, block: Block) -> None:
        self.floor = block.priority


class Gdsf(Lfuda):
    """Greedy dual size frequency: as LFUDA, with uses counted per unit of space."""

    def priority(self, block: Block) -> float:
        return self.floor + block.uses / block.size


class Slru(PlainPolicy):
    """LRU in two segments: what was used once since it came leaves before what was used again."""

    def priority(self, block: Block) -> float:
        return block.used + (SEGMENT if block.uses > 1 else 0)


class Tlru(PlainPolicy):
    """Tail-optimized LRU (arXiv:2510.15152): the last ``tail_tokens`` of the longest prompt through a block go first.

    Computing them again keeps the next turn within its time to the first token. With 0 it is LRU.
    """

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.tail = int(options["tail_tokens"])
        self.to_end = count_tokens_to_end(forest)
        self.longest: dict[int, int] = {}

    def on_request(self, r: int, nodes: list[int], first: int) -> None:
        self.first = {node: first + place for place, node in reversed(list(enumerate(nodes)))}

    def priority(self, block: Block) -> float:
        to_end = int(self.to_end[self.first[block.node]])
        self.longest[block.node] = max(self.longest.get(block.node, 0), to_end)
        return block.used - (SEGMENT if self.longest[block.node] <= self.tail else 0)


Queue = dict[int, int]  # node -> size, oldest first


def sum_sizes(queue: Queue) -> int:
    """Sum the sizes in a queue."""
    return sum(queue.values())


def find_oldest(queue: Queue) -> int:
    """Return the oldest node of a queue."""
    return next(iter(queue))


def renew(queue: Queue, node: int) -> None:
    """Make a node the newest of its queue."""
    queue[node] = queue.pop(node)


class Sieve(PlainPolicy):
    """A hand walks from old to new, clears the mark of what was used and evicts the first one without a mark.

    Nothing moves on a hit; a newcomer joins at the new end without a mark. The hand stays where it evicted.
    """

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.queue: list[int] = []  # oldest first
        self.marked: set[int] = set()
        self.hand = 0

    def on_touch(self, block: Block) -> None:
        self.marked.add(block.node)

    def on_insert(self, block: Block) -> None:
        self.queue.append(block.node)

    def choose_victim(self, cache: Cache, coming: Block | None) -> Block | None:
        for _ in range(2 * len(self.queue)):
            self.hand %= len(self.queue)
            node = self.queue[self.hand]
            if node not in self.marked and cache.blocks[node].evictable:
                return cache.blocks[node]
            self.marked.discard(node)
            self.hand += 1
        return None

    def on_evict(self, block: Block) -> None:
        self.queue.remove(block.node)  # what stood behind it now stands under the hand
        if self.hand >= len(self.queue):
            self.hand = 0


class S3Fifo(PlainPolicy):
    """Three queues: newcomers pass through a small one (a tenth), what was used twice there moves to the main one.

    Blocks that leave the small queue are remembered; if one comes back soon it joins the main queue at once. The main
    queue gives a block one more round for each use, three at most. While the cache fills for the first time, what the
    small queue has no room for joins the main one.
    """

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.small: Queue = {}
        self.main: Queue = {}
        self.ghost: Queue = {}
        self.uses: dict[int, int] = {}
        self.main_limit = capacity - max(1, capacity // 10)
        self.filling = True

    def on_touch(self, block: Block) -> None:
        self.uses[block.node] = min(3, self.uses[block.node] + 1)

    def on_insert(self, block: Block) -> None:
        known = self.ghost.pop(block.node, None) is not None
        full = self.filling and sum_sizes(self.small) >= self.capacity - self.main_limit
        (self.main if known or full else self.small)[block.node] = block.size
        self.uses[block.node] = 0

    def choose_victim(self, cache: Cache, coming: Block | None) -> Block | None:
        stuck_small = stuck_main = 0
        while True:
            small_done, main_done = stuck_small >= len(self.small), stuck_main >= len(self.main)
            if small_done and main_done:
                return None
            if (sum_sizes(self.main) > self.main_limit and not main_done) or small_done:
                node = find_oldest(self.main)
                if not self.uses[node] and cache.blocks[node].evictable:
                    return cache.blocks[node]
                stuck_main = 0 if self.uses[node] else stuck_main + 1
                self.uses[node] = max(0, self.uses[node] - 1)
                renew(self.main, node)
            else:
                node = find_oldest(self.small)
                if self.uses[node] > 1:
                    self.main[node] = self.small.pop(node)
                    self.uses[node] = stuck_main = 0
                elif cache.blocks[node].evictable:
                    return cache.blocks[node]
                else:
                    stuck_small += 1
                    renew(self.small, node)

    def on_evict(self, block: Block) -> None:
        self.filling = False
        del self.uses[block.node]
        if self.main.pop(block.node, None) is None:
            self.ghost[block.node] = self.small.pop(block.node)
            while sum_sizes(self.ghost) > self.main_limit:
                del self.ghost[find_oldest(self.ghost)]


class Arc(PlainPolicy):
    """Adaptive replacement: one LRU list for blocks seen once, one for the rest, and a border that learns.

    What left either list is remembered; a miss on a remembered block moves the border towards the list it left.
    """

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.once: Queue = {}
        self.often: Queue = {}
        self.left_once: Queue = {}
        self.left_often: Queue = {}
        self.border = 0.0

    def on_touch(self, block: Block) -> None:
        self.once.pop(block.node, None)
        self.often.pop(block.node, None)
        self.often[block.node] = block.size

    def on_miss(self, node: int) -> None:
        if node in self.left_once:
            step = max(1.0, sum_sizes(self.left_often) / sum_sizes(self.left_once))
            self.border = min(float(self.capacity), self.border + step)
        elif node in self.left_often:
            step = max(1.0, sum_sizes(self.left_once) / sum_sizes(self.left_often))
            self.border = max(0.0, self.border - step)

    def on_insert(self, block: Block) -> None:
        known = self.left_once.pop(block.node, None) or self.left_often.pop(block.node, None)
        (self.often if known else self.once)[block.node] = block.size
        while self.left_once and sum_sizes(self.once) + sum_sizes(self.left_once) > self.capacity:
            del self.left_once[find_oldest(self.left_once)]
        lists = (self.once, self.often, self.left_once, self.left_often)
        while self.left_often and sum(map(sum_sizes, lists)) > 2 * self.capacity:
            del self.left_often[find_oldest(self.left_often)]

    def choose_victim(self, cache: Cache, coming: Block | None) -> Block | None:
        once = sum_sizes(self.once)
        returning = coming is not None and coming.node in self.left_often
        first_once = once > self.border or (returning and once == self.border)
        for queue in (self.once, self.often) if first_once else (self.often, self.once):
            for node in queue:
                if cache.blocks[node].evictable:
                    return cache.blocks[node]
        return None

    def on_evict(self, block: Block) -> None:
        if self.once.pop(block.node, None) is not None:
            self.left_once[block.node] = block.size
        else:
            self.left_often[block.node] = self.often.pop(block.node)


class TinyLfu(PlainPolicy):
    """LRU with admission: a new block must have been asked for more often than the block it would replace.

    Every request for a block counts, cached or not. After ten times the capacity has been asked for, all counts are
    halved, so that old uses fade.
    """

    admits_by_rule = True

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.window = int(options["window"])
        self.sizes = forest.get_sizes(options["unit"])
        self.asks = 0
        self.counts: dict[int, int] = {}

    def count_ask(self, node: int) -> None:
        """Count one request for a node; halve all counts at the end of the window."""
        self.counts[node] = self.counts.get(node, 0) + 1
        self.asks += int(self.sizes[node])
        if self.asks >= self.window:
            self.asks = 0
            self.counts = {node: count // 2 for node, count in self.counts.items() if count > 1}

    def on_touch(self, block: Block) -> None:
        super().on_touch(block)
        self.count_ask(block.node)

    def on_miss(self, node: int) -> None:
        self.count_ask(node)

    def admit(self, block: Block, victim: Block) -> bool:
        return self.counts.get(block.node, 0) > self.counts.get(victim.node, 0)


class StaticSemantic(PlainPolicy):
    """Value = weight of the type x log of the uses x prefill time saved / square root of the tokens.

    New and cached blocks are valued in the same unit (milliseconds at 0.08 a token). A new block that is worth less
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

    def report_weights(self) -> dict[str, float]:
        return dict(self.type_weights)


class Belady(PlainPolicy):
    """Evicts the block whose next use is furthest away, never one of the current request."""

    def priority(self, block: Block) -> float:
        return -block.next_use


class BeladyBypass(Belady):
    """As `Belady`, but may also evict blocks of the current request."""

    bypass = True


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

    def on_request(self, r: int, nodes: list[int], first: int) -> None:
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


class AdaptiveSemantic(PlainPolicy):
    """Learns which blocks return and after how long; keeps those with the most returns for their space and time."""

    bypass = True

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        plan = build_plan(capacity, forest, options)
        types = len(forest.trace.type_names)
        self.online = Adaptive(capacity, types=types, chained=forest.mode == "prefix", plan=plan)
        self.sessions = number_sessions(forest).tolist()
        self.sizes = forest.get_sizes(options["unit"])
        self.epoch = self.scored = self.accesses = 0

    def on_request(self, r: int, nodes: list[int], first: int) -> None:
        sizes, types = self.sizes[nodes].tolist(), self.forest.types[nodes].tolist()
        self.online.use(nodes, session=self.sessions[r], sizes=sizes, types=types)
        self.accesses = first + len(nodes)

    def priority(self, block: Block) -> float:
        return self.online.price([block.node])[0]

    def on_request_end(self, cache: Cache) -> None:
        self.cache = cache
        leaves = list(cache.find_evictable())
        if self.epoch != self.online.epoch or self.accesses - self.scored >= len(leaves):
            for block in leaves:
                block.priority = self.priority(block)
            self.epoch, self.scored = self.online.epoch, self.accesses

    def on_evict(self, block: Block) -> None:
        parent = self.cache.blocks.get(block.parent)
        if parent is not None and parent.children == 0:
            parent.priority = self.priority(parent)

    def report_weights(self) -> dict[str, float]:
        found = zip(self.forest.trace.type_names, self.online.returns_by_type, strict=True)
        return {name: value for name, value in found if not np.isnan(value)}


_TWINS: dict[str, type[PlainPolicy]] = {
    "fifo": Fifo,
    "lru": Lru,
    "lfu": Lfu,
    "lfu_all": LfuAll,
    "lru2": Lru2,
    "slru": Slru,
    "tlru": Tlru,
    "lhd": Lhd,
    "workload_aware": WorkloadAware,
    "size_aware_lru": SizeAwareLru,
    "static_semantic": StaticSemantic,
    "adaptive_semantic": AdaptiveSemantic,
    "sieve": Sieve,
    "s3fifo": S3Fifo,
    "gdsf": Gdsf,
    "lfuda": Lfuda,
    "arc": Arc,
    "tinylfu": TinyLfu,
    "belady": Belady,
    "belady_bypass": BeladyBypass,
}
PLAIN: dict[str, Policy] = {name: replace(POLICIES[name], plain=twin) for name, twin in _TWINS.items()}
"""Every policy by its name, as `simulate` takes it to run in plain Python."""
