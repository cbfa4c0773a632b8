"""The order itself: the longest path that earlier prompts began with, then one earlier prompt's order, then the new."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from semblend.arrange.keep import Room
from semblend.arrange.memory import Node, Sent, SequenceMemory

MOST_LOOKS = 1_500
"""Branches that the search for the longest path looks at; behind that the best so far is taken."""
MOST_HOLDERS = 16
"""Of the prompts that hold a passage so many are looked at, the latest first."""
MOST_PAIRS = 300
"""Passages times the prompts that are looked at for each: with very many passages, fewer prompts for each."""


class _Walk:
    """Which passages stand on the path so far, with a way back."""

    def __init__(self, keys: Sequence[bytes], sizes: Sequence[int], room: Room, oldest: int) -> None:
        self._keys, self._sizes, self._room, self._oldest = keys, sizes, room, oldest
        self._left: dict[bytes, list[int]] = defaultdict(list)  # by key; the first index is the last of the list
        for index in reversed(range(len(keys))):
            self._left[keys[index]].append(index)
        self.path: list[int] = []
        self.size = 0
        self._lowest = [room.first]
        self._taken = bytearray(len(keys) + 1)

    def find_steps(self, node: Node) -> Iterator[tuple[bytes, Node]]:
        """The node's children that a passage may take now."""
        few, many = (node.children, self._left) if len(node.children) < len(self._left) else (self._left, node.children)
        for key in few:
            left = self._left.get(key) if key in many else None
            if not left or not self._room.may_take(left[-1], len(self.path), self._lowest[-1]):
                continue
            child = node.children[key]
            if child.sent_at >= self._oldest:
                yield key, child

    def step(self, key: bytes) -> None:
        index = self._left[key].pop()
        self._taken[index] = 1
        lowest = self._lowest[-1]
        while self._taken[lowest]:
            lowest += 1
        self._lowest.append(lowest)
        self.path.append(index)
        self.size += self._sizes[index]

    def step_back(self, depth: int) -> None:
        """To a path of ``depth`` passages."""
        while len(self.path) > depth:
            index = self.path.pop()
            self._taken[index] = 0
            self._left[self._keys[index]].append(index)
            self._lowest.pop()
            self.size -= self._sizes[index]


def find_longest_path(
    root: Node | None, keys: Sequence[bytes], sizes: Sequence[int], room: Room, oldest: int
) -> list[int]:
    """Indices of passages whose keys are a path from the root, of the largest size in sum; the first of equals.

    Nodes that were sent before ``oldest`` are not walked. Passages that the caller keeps in front are part of the path,
    or end it.
    """
    best: list[int] = []
    most = looks = 0
    if root is None:
        return best
    walk = _Walk(keys, sizes, room, oldest)
    stack: list[tuple[int, bytes, Node]] = [(0, b"", root)]  # depth, the step that leads there, the node
    while stack and looks < MOST_LOOKS:
        depth, key, node = stack.pop()
        walk.step_back(max(depth - 1, 0))
        if depth:
            walk.step(key)
        if walk.size > most:
            best, most = list(walk.path), walk.size
        looks += 1 + min(len(node.children), len(keys))
        # The most used child is looked at first: where the search is cut short, the beaten path was walked.
        steps = sorted(walk.find_steps(node), key=lambda step: (step[1].uses, step[0]))
        stack.extend((depth + 1, one, child) for one, child in steps)
    return best


def order_rest(
    begun: list[int], keys: Sequence[bytes], sizes: Sequence[int], memory: SequenceMemory, scope: bytes, room: Room
) -> list[int]:
    """The passages behind a path: those that one earlier prompt holds, in its order, and so on; the unseen last."""
    order = list(begun)
    taken = set(order)
    left = [index for index in range(len(keys)) if index not in taken]
    rank = rank_by_donors([keys[index] for index in left], [sizes[index] for index in left], memory, scope)
    movable = [index for index in left if room.first <= index < room.count - room.last]
    wanted: list[tuple[int, int]] = []  # a heap of (rank, index), of the passages that reach the place already
    reached = lowest = 0
    while len(order) < room.count:
        place = len(order)
        if place < room.first or place >= room.count - room.last:
            order.append(place)
            continue
        while reached < len(movable) and room.may_move(movable[reached], place):
            index = movable[reached]
            heapq.heappush(wanted, (rank.get(keys[index], len(keys)), index))
            reached += 1
        while movable[lowest] in taken:
            lowest += 1
        chosen = movable[lowest]
        if not room.is_due(chosen, place):
            chosen = _pop_untaken(wanted, taken)
        taken.add(chosen)
        order.append(chosen)
    return order


def _pop_untaken(wanted: list[tuple[int, int]], taken: set[int]) -> int:
    while True:
        _, index = heapq.heappop(wanted)
        if index not in taken:
            return index


def rank_by_donors(
    keys: Sequence[bytes], sizes: Sequence[int], memory: SequenceMemory, scope: bytes
) -> Mapping[bytes, int]:
    """Passage to its place behind the path: by the prompt that holds most of them, then by the next one."""
    size_of = dict(zip(keys, sizes, strict=True))
    most = max(1, min(MOST_HOLDERS, MOST_PAIRS // max(len(size_of), 1)))
    held: dict[bytes, list[bytes]] = defaultdict(list)
    donors: dict[bytes, Sent] = {}
    known = 0
    for key in size_of:
        found = memory.find_holders(scope, key, most)
        known += bool(found)
        for sent in found:
            held[sent.name].append(key)
            donors[sent.name] = sent
    # Of equals the first: holders come with the latest first. What a prompt holds of the rest only shrinks, so one
    # whose size is still true when it comes up is the largest.
    heap = [(-sum(map(size_of.__getitem__, mine)), number, name) for number, (name, mine) in enumerate(held.items())]
    heapq.heapify(heap)
    rank: dict[bytes, int] = {}
    while len(rank) < known:
        size, number, name = heapq.heappop(heap)
        new = {key for key in held[name] if key not in rank}
        now = -sum(map(size_of.__getitem__, new))
        if now > size:
            if new:
                heapq.heappush(heap, (now, number, name))
            continue
        for key in donors[name].keys:
            if key in new and key not in rank:
                rank[key] = len(rank)
    return rank
