"""The simulator in plain Python, for policies of your own: slow and short, and what the compiled one is tested against.

One request goes through four steps, for every policy:

1. *look up*: in prefix mode the blocks up to the first one that is not cached are hits, in block mode each cached one;
2. *touch*: the cached blocks of the request are marked as used and are safe until the request is done;
3. *make room and insert*: the other blocks come in, as many as fit beside the safe ones, the last ones left out first;
4. *release*: nothing is safe any more. A policy that may refuse blocks (``bypass``) evicts only now, from all blocks.

Only a block without cached children can be evicted, so a parent stays longer than its children. Blocks of a request are
touched and inserted from the last to the first: among equals the end of a prompt is evicted before its beginning.
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
    """Evicts the block with the smallest `priority`; among equals the one unused for the longest time.

    A new policy overrides `priority` (called once at every use of a block) and, if it wants, `admit`. Policies that
    keep queues override `on_touch`, `on_insert`, `choose_victim` and `on_evict`.
    """

    bypass = False
    admits_by_rule = False  # blocks are then offered from the first to the last, and `admit` is asked

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        """Begin a run over ``forest`` with a cache of ``capacity``."""
        self.capacity, self.forest, self.options = capacity, forest, options

    def priority(self, block: Block) -> Any:
        """Return the value of a cached block; the smallest is evicted first."""
        return block.used

    def admit(self, block: Block, victim: Block) -> bool:  # noqa: ARG002
        """Whether a new block may replace this victim."""
        return True

    def on_touch(self, block: Block) -> None:
        """Called when a cached block is used again."""
        block.priority = self.priority(block)

    def on_insert(self, block: Block) -> None:
        """Called when a block has been inserted."""
        block.priority = self.priority(block)

    def choose_victim(self, cache: Cache, coming: Block | None) -> Block | None:  # noqa: ARG002
        """Choose the block to evict, for the block ``coming`` if there is one; None if none may be evicted."""
        return min(cache.find_evictable(), key=lambda block: (block.priority, block.used), default=None)

    def on_evict(self, block: Block) -> None:
        """Called when a block has been evicted."""

    def on_request(self, r: int, nodes: list[int], first: int) -> None:
        """Called when the blocks of request ``r`` have been looked up; ``first`` is its first access."""

    def on_request_end(self, cache: Cache) -> None:
        """Called when the request is done and no block is safe any more."""

    def on_miss(self, node: int) -> None:
        """Called for a block that is not cached, before it is inserted."""

    def report_weights(self) -> dict[str, float]:
        """Return what the policy has learned about each block type; empty for most."""
        return {}


@dataclass(eq=False)
class Cache:
    """The cached blocks and the space they use."""

    capacity: int
    blocks: dict[int, Block] = field(default_factory=dict)
    used: int = 0

    def find_evictable(self) -> Iterator[Block]:
        """Yield the blocks that may be evicted."""
        return (block for block in self.blocks.values() if block.evictable)

    def add(self, block: Block) -> None:
        """Insert a block and count it as a child of its parent."""
        self.blocks[block.node] = block
        self.used += block.size
        if block.parent in self.blocks:
            self.blocks[block.parent].children += 1
        block.children = sum(other.parent == block.node for other in self.blocks.values())

    def remove(self, block: Block) -> None:
        """Remove a block."""
        del self.blocks[block.node]
        self.used -= block.size
        if block.parent in self.blocks:
            self.blocks[block.parent].children -= 1


@dataclass
class Counts:
    """What a run counts, for each request where that matters."""

    hit_blocks: npt.NDArray[np.int32]
    hit_tokens: npt.NDArray[np.int32]
    used_share: npt.NDArray[np.float64]
    regret: npt.NDArray[np.int32]
    evicted: npt.NDArray[np.int64]  # per type
    refused: int = 0  # blocks that the policy did not keep to the end of the request that brought them
    weights: dict[str, float] = field(default_factory=dict)
    cached: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))  # per node, at the end

    @staticmethod
    def create(requests: int, types: int) -> Counts:
        """Return counts of zero."""
        return Counts(
            np.zeros(requests, np.int32),
            np.zeros(requests, np.int32),
            np.zeros(requests, np.float64),
            np.zeros(requests, np.int32),
            np.zeros(types, np.int64),
        )


class PlainRun:
    """One run of one policy over a forest."""

    def __init__(self, forest: Forest, policy: PlainPolicy, capacity: Capacity, options: dict[str, Any]) -> None:
        self.forest, self.policy = forest, policy
        self.sizes = forest.get_sizes(capacity.unit)
        self.cache = Cache(capacity.size)
        self.clock = 0
        self.known_evicted: set[int] = set()
        self.filled: dict[int, int] = {}  # node -> tokens computed in its block
        self.came_with: dict[int, int] = {}  # node -> the request that brought it
        trace = forest.trace
        self.counts = Counts.create(len(trace), len(trace.type_names))
        policy.begin(capacity.size, forest, options)

    def run(self) -> Counts:
        """Run all requests and return the counts."""
        starts = self.forest.trace.starts
        for r in range(len(self.forest.trace)):
            self._run_request(r, int(starts[r]), int(starts[r + 1]))
        self.counts.weights = self.policy.report_weights()
        self.counts.cached = np.isin(np.arange(self.forest.nodes), list(self.cache.blocks))
        return self.counts

    def _run_request(self, r: int, first: int, last: int) -> None:
        """Run one request through the four steps."""
        cache, policy, counts = self.cache, self.policy, self.counts
        nodes = self.forest.node[first:last].tolist()
        self._look_up(r, nodes, first)
        policy.on_request(r, nodes, first)
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
            policy.on_touch(block)
        for node in sorted(new, key=new.__getitem__):
            policy.on_miss(node)
        safe += self._insert(r, first, len(nodes), new)
        for block in safe:
            block.safe = False
        policy.on_request_end(cache)
        if policy.bypass:
            while cache.used > cache.capacity:
                victim = policy.choose_victim(cache, None)
                assert victim is not None
                self._evict(victim, r)
        counts.used_share[r] = cache.used / cache.capacity if cache.capacity else 0.0
        self.clock += len(nodes)

    def _look_up(self, r: int, nodes: list[int], first: int) -> None:
        """Count the hits of a request, and its misses of evicted blocks.

        A block that grows (the end of a prompt that goes on) gives only the tokens that were computed in it.
        """
        asked = self.forest.trace.tokens[first : first + len(nodes)].tolist()
        cached = {node for node in nodes if node in self.cache.blocks}
        for node, tokens in zip(nodes, asked, strict=True):
            if node not in cached:
                self.filled[node] = tokens
        for place, node in enumerate(nodes):
            if node in self.cache.blocks:
                self.counts.hit_blocks[r] += 1
                self.counts.hit_tokens[r] += min(self.filled[node], asked[place])
                self.filled[node] = max(self.filled[node], asked[place])
            else:
                self.counts.regret[r] += node in self.known_evicted
                if self.forest.mode == "prefix":
                    self.counts.regret[r] += sum(later in self.known_evicted for later in nodes[place + 1 :])
                    break

    def _use(self, block: Block, r: int, first: int, place: int, length: int) -> None:
        """Record a use of a block."""
        block.used = self.clock + length - place
        block.uses += 1
        block.arrival_s = float(self.forest.trace.arrival_s[r])
        block.next_use = int(self.forest.next_use[first + place])

    def _insert(self, r: int, first: int, length: int, new: dict[int, int]) -> list[Block]:
        """Insert the new blocks of a request and return them; they stay safe until the request is done."""
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
            block = self._make_block(r, first, place, length)
            if not policy.bypass and not self._make_room(block, r):
                prefix = self.forest.mode == "prefix"
                self.counts.refused += len(fits) - len(inserted) if prefix else 1
                if prefix:
                    break
                continue
            cache.add(block)
            self.came_with[block.node] = r
            block.safe = True
            inserted.append(block)
            policy.on_insert(block)
        return inserted

    def _make_room(self, coming: Block, r: int) -> bool:
        """Evict until ``coming`` fits; False if the policy refuses it or nothing may be evicted."""
        while self.cache.used + coming.size > self.cache.capacity:
            victim = self.policy.choose_victim(self.cache, coming)
            if victim is None or not self.policy.admit(coming, victim):
                return False
            self._evict(victim, r)
        return True

    def _make_block(self, r: int, first: int, place: int, length: int) -> Block:
        """Make the block of one access."""
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
        """Evict a block, tell the policy and count it."""
        self.cache.remove(block)
        self.policy.on_evict(block)
        self.known_evicted.add(block.node)
        if self.came_with[block.node] == r:
            self.counts.refused += 1
        else:
            self.counts.evicted[self.forest.types[block.node]] += 1
