"""What was sent before: for each beginning a tree of passage sequences, and which prompts hold a passage.

A sequence is a path from a root, which stands for a namespace and the text before the passages. Bounded: the sequence
that was longest not sent again goes first, with the nodes that no other one uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

MOST_HOLDERS = 64
"""Of the prompts that hold a passage so many are looked at, the latest first."""


@dataclass(slots=True)
class Node:
    """One place in the tree; ``uses`` counts the remembered sequences that go through it."""

    children: dict[bytes, Node] = field(default_factory=dict)
    uses: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A sequence that was sent: its namespace, its root, its passages in order, their sizes."""

    scope: bytes
    root: bytes
    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]

    @property
    def name(self) -> bytes:
        return self.root + b"".join(self.keys)


class SequenceMemory:
    """Not safe for threads: the arranger holds a lock."""

    def __init__(self, most_passages: int) -> None:
        self._most = most_passages
        self._roots: dict[bytes, Node] = {}
        self._sent: OrderedDict[bytes, Sent] = OrderedDict()
        self._holders: dict[bytes, OrderedDict[bytes, None]] = {}
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

    def find_root(self, root: bytes) -> Node | None:
        return self._roots.get(root)

    def find_holders(self, scope: bytes, key: bytes) -> Iterable[Sent]:
        """Sequences of a namespace that hold a passage, the latest first."""
        latest = list(self._holders.get(scope + key, ()))[-MOST_HOLDERS:]
        return [self._sent[name] for name in reversed(latest)]

    def add(self, sent: Sent) -> None:
        """Remember a sequence, or that it was sent once more; forgets others where there is no room."""
        if not sent.keys or len(sent.keys) > self._most:
            return
        if sent.name in self._sent:
            self._sent.move_to_end(sent.name)
        else:
            self._insert(sent)
        for key in sent.keys:
            holders = self._holders.setdefault(sent.scope + key, OrderedDict())
            holders[sent.name] = None
            holders.move_to_end(sent.name)
        while self._held > self._most:
            self._remove(next(iter(self._sent.values())))

    def drop(self, sent: Sent) -> bool:
        """Forget a sequence; False where it is not known."""
        if sent.name not in self._sent:
            return False
        self._remove(sent)
        return True

    def _insert(self, sent: Sent) -> None:
        self._sent[sent.name] = sent
        self._held += len(sent.keys)
        node = self._roots.setdefault(sent.root, Node())
        node.uses += 1
        for key in sent.keys:
            node = node.children.setdefault(key, Node())
            node.uses += 1

    def _remove(self, sent: Sent) -> None:
        del self._sent[sent.name]
        self._held -= len(sent.keys)
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
        for key in set(sent.keys):
            holders = self._holders[sent.scope + key]
            holders.pop(sent.name, None)
            if not holders:
                del self._holders[sent.scope + key]
