"""Belady: evict what is needed furthest in the future. No policy that must guess can do better.

For blocks of one size this is the best possible number of block hits: `Belady` among policies that must cache what a
request brings (fifo, lru, ...), `BeladyBypass` among all, because it may refuse blocks. Both hold in prefix mode too: a
parent is needed no later than its children, so "furthest first" never wants to evict a parent before its child. For
capacity in tokens see `semantickv.analysis.bounds`.
"""

from __future__ import annotations

from semantickv.simulator.plain import Block, PlainPolicy


class Belady(PlainPolicy):
    """Evicts the block whose next use is furthest away, never one of the current request."""

    def priority(self, block: Block) -> float:
        return -block.next_use


class BeladyBypass(Belady):
    """As `Belady`, but may also evict blocks of the current request."""

    bypass = True
