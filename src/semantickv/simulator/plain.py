"""The simulator in plain Python: slow, short, and the twin that the compiled one is tested against.

One request goes through four steps, for every policy:

1. *look up*: in prefix mode the blocks up to the first one that is not cached are hits, in block mode each cached one;
2. *touch*: what is cached of the request is marked as used and is safe until the request is done;
3. *make room and insert*: the other blocks come in, as many as fit beside what is safe, the last ones left out first;
4. *let go*: nothing is safe any more. A policy that may refuse blocks (``bypass``) evicts only now, from all.

Only a block without cached children can be evicted, so a parent outlives its children. Blocks of a request are
touched and inserted from the last to the first, so that among equals the end of a prompt goes before its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest


@dataclass(slots=True, eq=False)
class Block:
    """A cached block as a policy sees it; times are counted in block accesses."""

    node: int
    size: int
    tokens: int
    type: str
    depth: int
    parent: int
    inserted: int = 0
    used: int = 0
    uses: int = 0
    arrival_s: float = 0.0
    next_use: int = 0
    children: int = 0
    safe: bool = False
    priority: Any = 0.0

    @property
    def evictable(self) -> bool:
        return not self.safe and self.children == 0


class PlainPolicy:
    """Evicts the block with the smallest `priority`, the longest unused one among equals.

    A new policy overrides `priority` (asked once at every use of a block) and, if it wants, `admit`. Policies that
    keep queues override `touched`, `inserted`, `victim` and `evicted`.
    """

    bypass = False
    admits_by_rule = False  # blocks are then offered from the first to the last, and `admit` is asked

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        """A run begins."""
        self.capacity, self.forest, self.options = capacity, forest, options

    def priority(self, block: Block) -> Any:
        return block.used

    def admit(self, block: Block, victim: Block) -> bool:  # noqa: ARG002
        """Whether a new block may push this victim out."""
        return True

    def touched(self, block: Block) -> None:
        block.priority = self.priority(block)

    def inserted(self, block: Block) -> None:
        block.priority = self.priority(block)

    def victim(self, cache: Cache, coming: Block | None) -> Block | None:  # noqa: ARG002
        return min(cache.evictable(), key=lambda block: (block.priority, block.used), default=None)

    def evicted(self, block: Block) -> None:
        """The block has left."""

    def asked(self, r: int, nodes: list[int], first: int) -> None:
        """A request came in; its blocks have been looked up."""

    def settled(self, cache: Cache) -> None:
        """The request is done and nothing is safe any more."""

    def missed(self, node: int) -> None:
        """A block that was asked for is not cached; called before it is inserted."""

    def weights(self) -> dict[str, float]:
        return {}


@dataclass(eq=False)
class Cache:
    """What is cached now."""

    capacity: int
    blocks: dict[int, Block] = field(default_factory=dict)
    used: int = 0

    def evictable(self) -> Iterator[Block]:
        return (block for block in self.blocks.values() if block.evictable)

    def add(self, block: Block) -> None:
        self.blocks[block.node] = block
        self.used += block.size
        if block.parent in self.blocks:
            self.blocks[block.parent].children += 1
        block.children = sum(other.parent == block.node for other in self.blocks.values())

    def remove(self, block: Block) -> None:
        del self.blocks[block.node]
        self.used -= block.size
        if block.parent in self.blocks:
            self.blocks[block.parent].children -= 1


@dataclass
class Counts:
    """What a run counts, per request where it matters."""

    hit_blocks: npt.NDArray[np.int32]
    hit_tokens: npt.NDArray[np.int32]
    used_share: npt.NDArray[np.float64]
    regret: npt.NDArray[np.int32]
    evicted: npt.NDArray[np.int64]  # per type, after the warm-up
    weights: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def zeros(requests: int, types: int) -> Counts:
        return Counts(
            np.zeros(requests, np.int32),
            np.zeros(requests, np.int32),
            np.zeros(requests, np.float64),
            np.zeros(requests, np.int32),
            np.zeros(types, np.int64),
        )


class PlainRun:
    """One run of one policy over a forest."""

    def __init__(
        self, forest: Forest, policy: PlainPolicy, capacity: Capacity, warm_up: int, options: dict[str, Any]
    ) -> None:
        self.warm_up = warm_up
        self.forest, self.policy = forest, policy
        self.sizes = forest.sizes(capacity.unit)
        self.cache = Cache(capacity.size)
        self.clock = 0
        self.known_evicted: set[int] = set()
        trace = forest.trace
        self.counts = Counts.zeros(len(trace), len(trace.type_names))
        policy.begin(capacity.size, forest, options)

    def run(self) -> Counts:
        starts = self.forest.trace.starts
        for r in range(len(self.forest.trace)):
            self._request(r, int(starts[r]), int(starts[r + 1]))
        self.counts.weights = self.policy.weights()
        return self.counts

    def _request(self, r: int, first: int, last: int) -> None:
        cache, policy, counts = self.cache, self.policy, self.counts
        nodes = self.forest.node[first:last].tolist()
        self._look_up(r, nodes, first)
        policy.asked(r, nodes, first)
        new: dict[int, int] = {}  # node -> its place, the first one if it stands twice
        safe: list[Block] = []
        for place in range(len(nodes) - 1, -1, -1):
            block = cache.blocks.get(nodes[place])
            if block is None:
                new[nodes[place]] = place
                continue
            self._use(block, r, first, place, len(nodes))
            block.safe = True
            safe.append(block)
            policy.touched(block)
        for node in sorted(new, key=new.__getitem__):
            policy.missed(node)
        safe += self._insert(r, first, len(nodes), new)
        for block in safe:
            block.safe = False
        policy.settled(cache)
        if policy.bypass:
            while cache.used > cache.capacity:
                victim = policy.victim(cache, None)
                assert victim is not None
                self._evict(victim, r)
        counts.used_share[r] = cache.used / cache.capacity if cache.capacity else 0.0
        self.clock += len(nodes)

    def _look_up(self, r: int, nodes: list[int], first: int) -> None:
        for place, node in enumerate(nodes):
            if node in self.cache.blocks:
                self.counts.hit_blocks[r] += 1
                self.counts.hit_tokens[r] += self.forest.trace.tokens[first + place]
            else:
                self.counts.regret[r] += node in self.known_evicted
                if self.forest.mode == "prefix":
                    self.counts.regret[r] += sum(later in self.known_evicted for later in nodes[place + 1 :])
                    break

    def _use(self, block: Block, r: int, first: int, place: int, length: int) -> None:
        block.used = self.clock + length - place
        block.uses += 1
        block.arrival_s = float(self.forest.trace.arrival_s[r])
        block.next_use = int(self.forest.next_use[first + place])

    def _insert(self, r: int, first: int, length: int, new: dict[int, int]) -> list[Block]:
        """Bring the new blocks in; what was inserted stays safe until the request is done."""
        cache, policy = self.cache, self.policy
        places = sorted(new.values())
        fits: list[int] = []
        room = cache.capacity - sum(block.size for block in cache.blocks.values() if block.safe)
        for place in places:
            room -= int(self.sizes[self.forest.node[first + place]])
            if room < 0 and not policy.bypass:
                break
            fits.append(place)
        inserted: list[Block] = []
        for place in fits if policy.admits_by_rule else reversed(fits):
            block = self._block(r, first, place, length)
            if not policy.bypass and not self._make_room(block, r):
                if self.forest.mode == "prefix":
                    break
                continue
            cache.add(block)
            block.safe = True
            inserted.append(block)
            policy.inserted(block)
        return inserted

    def _make_room(self, coming: Block, r: int) -> bool:
        while self.cache.used + coming.size > self.cache.capacity:
            victim = self.policy.victim(self.cache, coming)
            if victim is None or not self.policy.admit(coming, victim):
                return False
            self._evict(victim, r)
        return True

    def _block(self, r: int, first: int, place: int, length: int) -> Block:
        forest = self.forest
        node = int(forest.node[first + place])
        block = Block(
            node,
            int(self.sizes[node]),
            int(forest.tokens[node]),
            forest.trace.type_names[forest.types[node]],
            int(forest.depth[node]),
            int(forest.parent[node]),
        )
        self._use(block, r, first, place, length)
        block.inserted = block.used
        return block

    def _evict(self, block: Block, r: int) -> None:
        self.cache.remove(block)
        self.policy.evicted(block)
        self.known_evicted.add(block.node)
        self.counts.evicted[self.forest.types[block.node]] += r >= self.warm_up
