"""The order itself: the longest path that earlier prompts began with, then one earlier prompt's order, then the new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from semblend.arrange.keep import Room
from semblend.arrange.memory import Node, Sent, SequenceMemory

MOST_VISITS = 2_000
"""Nodes that the search for the longest path looks at; behind that the best so far is taken."""


def find_longest_path(root: Node | None, keys: Sequence[bytes], sizes: Sequence[int], room: Room) -> list[int]:
    """Indices of passages whose keys are a path from the root, of the largest size in sum; the first of equals.

    Passages that the caller keeps in front are part of the path, or end it.
    """
    best: list[int] = []
    most = visits = 0
    if root is None:
        return best
    stack: list[tuple[Node, list[int], int]] = [(root, [], 0)]
    while stack and visits < MOST_VISITS:
        node, path, size = stack.pop()
        visits += 1
        if size > most:
            best, most = path, size
        taken = set(path)
        left = [index for index in range(len(keys)) if index not in taken]
        further = [
            (child, [*path, index], size + sizes[index])
            for index in left
            if (child := node.children.get(keys[index])) is not None and room.may_take(index, len(path), left)
        ]
        # The most used child is looked at first: where the search is cut short, the beaten path was walked.
        stack.extend(sorted(further, key=lambda found: found[0].uses))
    return best


def order_rest(
    begun: list[int], keys: Sequence[bytes], sizes: Sequence[int], memory: SequenceMemory, scope: bytes, room: Room
) -> list[int]:
    """The passages behind a path: those that one earlier prompt holds, in its order, and so on; the unseen last."""
    order = list(begun)
    left = [index for index in range(len(keys)) if index not in set(order)]
    rank = rank_by_donors([keys[index] for index in left], [sizes[index] for index in left], memory, scope)
    wanted = sorted(left, key=lambda index: (rank.get(keys[index], len(keys)), index))
    while left:
        place = len(order)
        chosen = next((index for index in wanted if room.may_take(index, place, left)), left[0])
        order.append(chosen)
        left.remove(chosen)
        wanted.remove(chosen)
    return order


def rank_by_donors(
    keys: Sequence[bytes], sizes: Sequence[int], memory: SequenceMemory, scope: bytes
) -> Mapping[bytes, int]:
    """Passage to its place behind the path: by the prompt that holds most of them, then by the next one."""
    rank: dict[bytes, int] = {}
    size_of = dict(zip(keys, sizes, strict=True))
    holders = {key: memory.find_holders(scope, key) for key in size_of}
    while True:
        held: Counter[bytes] = Counter()
        known: dict[bytes, Sent] = {}
        for key, found in holders.items():
            if key in rank:
                continue
            for sent in found:
                held[sent.name] += size_of[key]
                known.setdefault(sent.name, sent)
        if not held:
            return rank
        # `max` takes the first of equals, and holders come with the latest first.
        donor = known[max(held, key=held.__getitem__)]
        for key in donor.keys:
            if key in size_of and key not in rank:
                rank[key] = len(rank)
