"""What was sent before: for each beginning a tree of passage sequences, and which prompts hold a passage.

A sequence is a path from a root, which stands for a namespace and the text before the passages. Bounded: when there is
no room, the owner (a tenant) that holds most gives up the sequence that it sent longest ago, so nobody can push out
what others sent.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_NEVER = -(1 << 62)
_NOBODY: Mapping[bytes, dict[Sent, None]] = {}


@dataclass(slots=True)
class Node:
    """One place in the tree.

    ``uses`` counts the remembered sequences that go through it, ``ends`` names the one that ends there. ``sent_at`` is
    how much had been sent when it was sent last, less all that stands in front of it and itself: an engine evicts the
    ends of prompts first.
    """

    children: dict[bytes, Node] = field(default_factory=dict)
    uses: int = 0
    ends: bytes | None = None
    sent_at: int = _NEVER


@dataclass(frozen=True, eq=False, slots=True)
class Sent:
    """A sequence that was sent: its owner, namespace, root, passages in order, and their sizes. Equal by identity.

    ``name`` is sixteen bytes that stand for root and passages.
    """

    owner: bytes
    scope: bytes
    root: bytes
    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]
    name: bytes = field(init=False)

    def __post_init__(self) -> None:
        name = hashlib.blake2b(self.root + b"".join(self.keys), digest_size=16).digest()
        object.__setattr__(self, "name", name)


class SequenceMemory:
    """Not safe for threads: the arranger holds a lock."""

    def __init__(self, most_passages: int, exact_size: int | None = None) -> None:
        self._most = most_passages
        self._exact_size = exact_size
        self._sent_size = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._roots: dict[bytes, Node] = {}
        self._sent: OrderedDict[bytes, Sent] = OrderedDict()
        self._holders: dict[bytes, dict[bytes, dict[Sent, None]]] = {}  # by namespace and passage; the latest last
        self._owners: dict[bytes, OrderedDict[bytes, None]] = {}
        self._held_by: dict[bytes, int] = {}
        self._largest: list[tuple[int, bytes]] = []  # a heap; entries that are no longer true are skipped
        self._held = 0

    def __len__(self) -> int:
        """Sequences."""
        return len(self._sent)

    @property
    def passages(self) -> int:
        """Passages of all sequences together, which memory goes by."""
        return self._held

    def __iter__(self) -> Iterator[Sent]:
        """The longest unused first."""
        return iter(self._sent.values())

    @property
    def oldest(self) -> int:
        """Nodes that were sent before this are no longer expected in the engine's exact prefix cache."""
        return _NEVER + 1 if self._exact_size is None else self._sent_size - self._exact_size

    def find_root(self, root: bytes) -> Node | None:
        return self._roots.get(root)

    def find_holders(self, scope: bytes) -> Mapping[bytes, dict[Sent, None]]:
        """For each passage of a namespace the sequences that hold it, the latest last."""
        return self._holders.get(scope, _NOBODY)

    def add(self, sent: Sent) -> None:
        """Remember a sequence, or that it was sent once more; forgets others where there is no room."""
        if not sent.keys or len(sent.keys) > self._most:
            return
        name = sent.name
        if name in self._sent:
            self._sent.move_to_end(name)
            sent = self._sent[name]
            self._owners[sent.owner].move_to_end(name)
        else:
            self._insert(sent)
        self._touch(sent)
        by_key = self._holders.setdefault(sent.scope, {})
        for key in sent.keys:
            holders = by_key.setdefault(key, {})
            holders.pop(sent, None)
            holders[sent] = None
        while self._held > self._most:
            self._remove(self._sent[next(iter(self._owners[self._find_largest()]))])

    def drop(self, root: bytes, keys: tuple[bytes, ...], kept: int) -> tuple[list[Sent], Sent | None]:
        """Forget sequences that begin with these passages, beyond the first ``kept``: those cut, and what is left."""
        node = self._roots.get(root) if keys else None
        for key in keys:
            node = node.children.get(key) if node is not None else None
        if node is None:
            return [], None
        cut = [self._sent[name] for name in _find_ends(node)]
        for sent in cut:
            self._remove(sent)
        if not kept:
            return cut, None
        first = cut[0]
        left = Sent(first.owner, first.scope, root, first.keys[:kept], first.sizes[:kept])
        self.add(left)
        return cut, left

    def find_roots(self, scope: bytes, keys: tuple[bytes, ...]) -> set[bytes]:
        """Roots of a namespace under which a sequence begins with these passages."""
        holders = self.find_holders(scope).get(keys[0], {}) if keys else {}
        return {sent.root for sent in holders if sent.keys[: len(keys)] == keys}

    def _find_largest(self) -> bytes:
        while True:
            held, owner = self._largest[0]
            if self._held_by.get(owner) == -held:
                return owner
            heapq.heappop(self._largest)

    def _change_held(self, owner: bytes, by: int) -> None:
        self._held += by
        self._held_by[owner] = now = self._held_by.get(owner, 0) + by
        if now:
            heapq.heappush(self._largest, (-now, owner))
        else:
            del self._held_by[owner], self._owners[owner]
        if len(self._largest) > 4 * len(self._held_by) + 64:
            self._largest = [(-held, one) for one, held in self._held_by.items()]
            heapq.heapify(self._largest)

    def _insert(self, sent: Sent) -> None:
        self._sent[sent.name] = sent
        self._owners.setdefault(sent.owner, OrderedDict())[sent.name] = None
        self._change_held(sent.owner, len(sent.keys))
        node = self._roots.setdefault(sent.root, Node())
        node.uses += 1
        for key in sent.keys:
            node = node.children.setdefault(key, Node())
            node.uses += 1
        node.ends = sent.name

    def _touch(self, sent: Sent) -> None:
        """The nodes were sent now; what the exact cache did not hold has pushed out as much."""
        node, oldest = self._roots[sent.root], self.oldest
        path = [node := node.children[key] for key in sent.keys]
        self._sent_size += sum(size for one, size in zip(path, sent.sizes, strict=True) if one.sent_at < oldest)
        left = self._sent_size
        for one, size in zip(path, sent.sizes, strict=True):
            left -= size
            one.sent_at = left

    def _remove(self, sent: Sent) -> None:
        del self._sent[sent.name]
        del self._owners[sent.owner][sent.name]
        self._change_held(sent.owner, -len(sent.keys))
        node = self._roots[sent.root]
        node.uses -= 1
        if not node.uses:
            del self._roots[sent.root]
        for key in sent.keys:
            child = node.children[key]
            child.uses -= 1
            if not child.uses:
                del node.children[key]
            node = child
        node.ends = None
        by_key = self._holders[sent.scope]
        for key in set(sent.keys):
            holders = by_key[key]
            holders.pop(sent, None)
            if not holders:
                del by_key[key]
        if not by_key:
            del self._holders[sent.scope]


def _find_ends(node: Node) -> list[bytes]:
    found, stack = [], [node]
    while stack:
        one = stack.pop()
        if one.ends is not None:
            found.append(one.ends)
        stack.extend(one.children.values())
    return found
