"""The classic policies: first in first out, least recently used, least often used, and variants by size."""

from __future__ import annotations

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
