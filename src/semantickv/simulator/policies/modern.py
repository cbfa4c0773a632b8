"""SIEVE, S3-FIFO, ARC and TinyLFU admission, in plain Python.

A queue is a dict: the oldest entry comes first. Where the published algorithm would evict a block that has cached
children or belongs to the current request, the queues skip it.
"""

from __future__ import annotations

from typing import Any

from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Block, Cache, PlainPolicy

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

    def choose_victim(self, cache: Cache, coming: Block | None) -> Block | None:  # noqa: ARG002
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

    def choose_victim(self, cache: Cache, coming: Block | None) -> Block | None:  # noqa: ARG002
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
