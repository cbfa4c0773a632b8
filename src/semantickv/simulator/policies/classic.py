"""The classics: first in first out, least recently used, least often used, and their relatives by size."""

from __future__ import annotations

from semantickv.simulator.plain import Block, PlainPolicy


class Lru(PlainPolicy):
    """The longest unused goes first."""


class Fifo(PlainPolicy):
    """The longest cached goes first."""

    def priority(self, block: Block) -> float:
        return block.inserted


class Lfu(PlainPolicy):
    """The least often used since it came in goes first."""

    def priority(self, block: Block) -> float:
        return block.uses


class SizeAwareLru(PlainPolicy):
    """Last use divided by tokens: of two that are equally old, the larger goes first."""

    def priority(self, block: Block) -> float:
        return block.used / block.tokens


class Lfuda(PlainPolicy):
    """Least often used with dynamic ageing: every eviction raises the floor that newcomers start from."""

    floor = 0.0

    def priority(self, block: Block) -> float:
        return self.floor + block.uses

    def evicted(self, block: Block) -> None:
        self.floor = block.priority


class Gdsf(Lfuda):
    """Greedy dual size frequency: as LFUDA, with uses counted per unit of space."""

    def priority(self, block: Block) -> float:
        return self.floor + block.uses / block.size
