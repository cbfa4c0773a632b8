"""Upper bounds for capacity in tokens, where Belady's rule is no longer the best.

With blocks of different size the best possible replay is hard to find. Two relaxations that are easy can only be better
than it, so no policy beats them: blocks that may be cut into tokens (bounds token hits), and space that may be lent
between moments (bounds block hits). With blocks of one size the first one is `belady_bypass` itself.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest


@dataclass(frozen=True)
class Bound:
    """No policy has more hits than this."""

    token_hits: int
    block_hits: int
    token_accesses: int
    block_accesses: int

    @property
    def token_hit_rate(self) -> float:
        return self.token_hits / self.token_accesses if self.token_accesses else 0.0

    @property
    def block_hit_rate(self) -> float:
        return self.block_hits / self.block_accesses if self.block_accesses else 0.0


def upper_bound(forest: Forest, capacity: Capacity) -> Bound:
    """The bound for this capacity, in either unit."""
    trace = forest.trace
    return Bound(
        _hits_of_cut_blocks(forest, capacity) if capacity.unit == "tokens" else _all_returns(forest),
        _hits_of_lent_space(forest, capacity),
        int(trace.tokens.sum(dtype=np.int64)),
        trace.block_accesses,
    )


def _all_returns(forest: Forest) -> int:
    """Token hits of a cache without end."""
    seen = np.zeros(forest.nodes, bool)
    hits, starts = 0, forest.trace.starts
    for r in range(len(forest.trace)):
        part = slice(starts[r], starts[r + 1])
        hits += int(forest.trace.tokens[part][seen[forest.node[part]]].sum())
        seen[forest.node[part]] = True
    return hits


def _hits_of_cut_blocks(forest: Forest, capacity: Capacity) -> int:
    """Belady with bypass over single tokens: what is needed furthest away is cut first, as far as need be.

    Duplicates of a block inside one request all count.
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


def _hits_of_lent_space(forest: Forest, capacity: Capacity) -> int:
    """Returns cost their size times the requests they wait; take the cheapest until the space of all times is spent."""
    starts, never = forest.trace.starts, len(forest.trace)
    returns = forest.next_use < never
    request = np.repeat(np.arange(never), np.diff(starts))
    sizes = forest.sizes(capacity.unit).astype(np.int64)
    cost = np.sort(((forest.next_use - request) * sizes[forest.node])[returns])
    return int(np.searchsorted(np.cumsum(cost), capacity.size * max(0, never - 1), side="right"))
