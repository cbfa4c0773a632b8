"""The classic policies: first in first out, least recently used, least often used, and variants by size."""

from __future__ import annotations

from typing import Any

from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Block, PlainPolicy


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
