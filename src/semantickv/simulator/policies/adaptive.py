"""`adaptive_semantic` in the simulator: the policy of `semblend.eviction.adaptive`, told what the trace says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Block, Cache, PlainPolicy
from semblend.eviction.adaptive import Adaptive
from semblend.eviction.plan import AdaptivePlan, limit_history

FIRST_SESSION = 1 << 40  # numbers of sessions begin here, so that none is the number of a node


def build_plan(capacity: int, forest: Forest, options: dict[str, Any]) -> AdaptivePlan:
    """Build the plan of one run; a trace shorter than the history needs no more room than its accesses and sessions."""
    history = int(options.get("history", limit_history(capacity)))
    shortest = max(1024, len(forest.node) + len(forest.trace))
    return AdaptivePlan.build(capacity, share=float(options.get("share", 1.0)), history=min(history, shortest))


def number_sessions(forest: Forest) -> npt.NDArray[np.int64]:
    """Number the sessions of a trace, by request; 0 where a request has none."""
    names = forest.trace.sessions
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(name, FIRST_SESSION + len(numbers)) if name else 0 for name in names]
    return np.array(found or [0] * len(forest.trace), np.int64)


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
