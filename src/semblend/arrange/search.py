"""The order itself: the longest path that earlier prompts began with, then one earlier prompt's order, then the new."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Mapping, Sequence
from itertools import islice

from semblend.arrange.memory import Node, Sent, SequenceMemory
from semblend.arrange.order_limits import PlacementCheck

MAX_LOOKS = 1_500
"""Branches that the search for the longest path looks at; behind that the best so far is taken."""
MAX_HOLDERS = 16
"""Of the prompts that hold a passage so many are looked at, the latest first."""
MAX_SOUGHT = 8
"""So many passages are sought in a prompt one by one; for more of them the prompt is read through."""
MAX_PAIRS = 300
"""Passages times the prompts that are looked at for each: with very many passages, fewer prompts for each."""


class _Walk:
    """Which passages stand on the path so far, with a way back."""

    def __init__(self, keys: Sequence[bytes], sizes: Sequence[int], room: PlacementCheck) -> None:
        self._keys, self._sizes, self._room, self._is_bounded = keys, sizes, room, not room.is_free
        self.left: dict[bytes, list[int]] = {}  # by key; the first index is the last of the list
        for index in reversed(range(len(keys))):
            self.left.setdefault(keys[index], []).append(index)
        self.path: list[int] = []
        self.size = 0
        self._lowest = [room.first]
        self._taken = bytearray(len(keys) + 1)

    def may_take(self, index: int) -> bool:
        """Whether a passage may stand behind the path."""
        return self._room.may_take(index, len(self.path), self._lowest[-1])

    def step(self, key: bytes) -> None:
        index = self.left[key].pop()
        if self._is_bounded:
            self._taken[index] = 1
            lowest = self._lowest[-1]
            while self._taken[lowest]:
                lowest += 1
            self._lowest.append(lowest)
        self.path.append(index)
        self.size += self._sizes[index]

    def step_back(self, depth: int) -> None:
        """To a path of ``depth`` passages."""
        path, left, keys, sizes = self.path, self.left, self._keys, self._sizes
        while len(path) > depth:
            index = path.pop()
            left[keys[index]].append(index)
            self.size -= sizes[index]
            if self._is_bounded:
                self._taken[index] = 0
                self._lowest.pop()


def find_longest_path(
    root: Node | None, keys: Sequence[bytes], sizes: Sequence[int], room: PlacementCheck, oldest: int
) -> list[int]:
    """Indices of passages whose keys are a path from the root, of the largest size in sum; the first of equals.

    Nodes that were sent before ``oldest`` are not walked. Passages that the caller keeps in front are part of the path,
    or end it.
    """
    best: list[int] = []
    most = looks = 0
    if root is None:
        return best
    walk, count, is_free = _Walk(keys, sizes, room), len(keys), room.is_free
    stack: list[tuple[int, bytes, Node]] = [(0, b"", root)]  # depth, the step that leads there, the node
    while stack and looks < MAX_LOOKS:
        depth, key, node = stack.pop()
        if 0 < depth <= len(walk.path):
            walk.step_back(depth - 1)
        if depth:
            walk.step(key)
        if walk.size > most:
            best, most = walk.path.copy(), walk.size
        children = node.children
        looks += 1 + (len(children) if len(children) < count else count)
        if not children:
            continue
        steps = _find_steps(children, walk, is_free, oldest)
        if len(steps) > 1:
            # The most used child is looked at first: where the search is cut short, the beaten path was walked.
            steps.sort(key=_get_rank)
        depth += 1
        for one, child in steps:
            stack.append((depth, one, child))
    return best


def _find_steps(children: dict[bytes, Node], walk: _Walk, is_free: bool, oldest: int) -> list[tuple[bytes, Node]]:
    """The children that a passage may take now."""
    steps, left = [], walk.left
    if len(children) < len(left):
        for key, child in children.items():
            if (indices := left.get(key)) and child.sent_at >= oldest and (is_free or walk.may_take(indices[-1])):
                steps.append((key, child))
    else:
        for key, indices in left.items():
            found = children.get(key) if indices else None
            if found is not None and found.sent_at >= oldest and (is_free or walk.may_take(indices[-1])):
                steps.append((key, found))
    return steps


def _get_rank(step: tuple[bytes, Node]) -> tuple[int, bytes]:
    return step[1].uses, step[0]


def order_rest(
    begun: list[int],
    keys: Sequence[bytes],
    sizes: Sequence[int],
    memory: SequenceMemory,
    scope: bytes,
    room: PlacementCheck,
) -> list[int]:
    """The passages behind a path: those that one earlier prompt holds, in its order, and so on; the unseen last."""
    order = list(begun)
    taken = set(order)
    left = [index for index in range(len(keys)) if index not in taken]
    rank = rank_by_donors([keys[index] for index in left], [sizes[index] for index in left], memory, scope)
    if room.is_free:
        worst = len(keys)
        return order + sorted(left, key=lambda index: rank.get(keys[index], worst))
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
    most = max(1, min(MAX_HOLDERS, MAX_PAIRS // max(len(size_of), 1)))
    holders = memory.find_holders(scope)
    held: dict[Sent, list[bytes]] = {}  # what a prompt holds of the passages
    sums: dict[Sent, int] = {}
    known = 0
    for key, size in size_of.items():
        sequences = holders.get(key)
        if sequences is None:
            continue
        known += 1
        for sent in islice(reversed(sequences), most):
            if sent in held:
                held[sent].append(key)
                sums[sent] += size
            else:
                held[sent] = [key]
                sums[sent] = size
    return _rank_greedily(held, sums, size_of, known)


def _rank_greedily(
    held: Mapping[Sent, list[bytes]], sums: Mapping[Sent, int], size_of: Mapping[bytes, int], known: int
) -> Mapping[bytes, int]:
    """Passage to place: those of the prompt that holds most, in its order, then of that which holds most of the rest.

    Of equals the first. What a prompt holds of the rest only shrinks, so one whose size is still true when it comes up
    is the largest.
    """
    line: list[tuple[int, int, list[bytes], Sent]] = []  # the largest last; of equals the first last
    covered: set[bytes] = set()
    for number, (sent, mine) in enumerate(held.items()):
        if len(mine) > 1:
            covered.update(mine)
        elif mine[0] in covered:  # a prompt in front of this one holds it too, and comes up no later
            continue
        else:
            covered.add(mine[0])
        line.append((sums[sent], -number, mine, sent))
    line.sort()
    rank: dict[bytes, int] = {}
    while len(rank) < known:
        _, number, mine, sent = line.pop()
        new = [key for key in mine if key not in rank]
        if len(new) < len(mine):
            if new:
                insort(line, (sum(map(size_of.__getitem__, new)), number, new, sent))
        elif len(new) == 1:
            rank[new[0]] = len(rank)
        else:
            for key in _put_in_order(new, sent.keys):
                rank[key] = len(rank)
    return rank


def _put_in_order(few: list[bytes], keys: tuple[bytes, ...]) -> list[bytes]:
    """Keys in the order in which they first stand in a sequence that holds them all."""
    if len(few) <= MAX_SOUGHT:
        return sorted(few, key=keys.index)
    wanted = set(few)
    return [key for key in dict.fromkeys(keys) if key in wanted]
