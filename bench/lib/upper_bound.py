"""Upper bounds on the hits of any policy, for a capacity in tokens.

Belady's rule is best only for blocks of one size. For blocks of different sizes the best replay is hard to find, so two
easier problems give bounds: blocks that may be cut into single tokens (bounds token hits), and space that may be lent
from one moment to another (bounds block hits). With blocks of one size the first bound equals `belady_bypass`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest


@dataclass(frozen=True)
class Bound:
    """Hits that no policy can exceed on one trace and capacity."""

    token_hits: int
    block_hits: int
    token_accesses: int
    block_accesses: int

    @property
    def token_hit_rate(self) -> float:
        """Token hits as a share of all token accesses, 0 to 1."""
        return self.token_hits / self.token_accesses if self.token_accesses else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Block hits as a share of all block accesses, 0 to 1."""
        return self.block_hits / self.block_accesses if self.block_accesses else 0.0


def compute_upper_bound(forest: Forest, capacity: Capacity) -> Bound:
    """Compute the bound on token hits and block hits for this capacity, in either unit."""
    trace = forest.trace
    return Bound(
        _count_hits_with_cut_blocks(forest, capacity) if capacity.unit == "tokens" else _count_returns(forest),
        _count_hits_with_lent_space(forest, capacity),
        int(trace.tokens.sum(dtype=np.int64)),
        trace.block_accesses,
    )


def _count_returns(forest: Forest) -> int:
    """Count the token hits of a cache without limit."""
    seen = np.zeros(forest.nodes, bool)
    hits, starts = 0, forest.trace.starts
    for r in range(len(forest.trace)):
        part = slice(starts[r], starts[r + 1])
        hits += int(forest.trace.tokens[part][seen[forest.node[part]]].sum())
        seen[forest.node[part]] = True
    return hits


def _count_hits_with_cut_blocks(forest: Forest, capacity: Capacity) -> int:
    """Count the token hits of Belady with bypass over single tokens, where a block may be cut.

    Repeated blocks inside one request all count.
    """
    held = np.zeros(forest.nodes, np.int64).tolist()
    sizes = forest.tokens.tolist()
    due = [-1] * forest.nodes
    node, next_use = forest.node.tolist(), forest.next_use.tolist()
    tokens, starts = forest.trace.tokens.tolist(), forest.trace.starts.tolist()
    furthest: list[tuple[int, int]] = []
    used = hits = 0
    for r in range(len(forest.trace)):
        hits += sum(min(held[node[i]], tokens[i]) for i in range(starts[r], starts[r + 1]))
        for i in range(starts[r], starts[r + 1]):
            x = node[i]
            used += sizes[x] - held[x]
            held[x], due[x] = sizes[x], next_use[i]
            heapq.heappush(furthest, (-next_use[i], x))
        while used > capacity.size:
            when, x = furthest[0]
            if due[x] != -when or not held[x]:
                heapq.heappop(furthest)
                continue
            cut = min(held[x], used - capacity.size)
            held[x] -= cut
            used -= cut
            if not held[x]:
                heapq.heappop(furthest)
    return hits


def _count_hits_with_lent_space(forest: Forest, capacity: Capacity) -> int:
    """Count the block hits when free space at one moment may be used at another.

    A return costs its size times the requests it waits; the cheapest returns are taken until all space is spent.
    """
    starts, never = forest.trace.starts, len(forest.trace)
    returns = forest.next_use < never
    request = np.repeat(np.arange(never), np.diff(starts))
    sizes = forest.get_sizes(capacity.unit).astype(np.int64)
    cost = np.sort(((forest.next_use - request) * sizes[forest.node])[returns])
    return int(np.searchsorted(np.cumsum(cost), capacity.size * max(0, never - 1), side="right"))
