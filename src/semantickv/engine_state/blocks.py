"""The blocks that one engine holds, each known by the tokens from the prompt's beginning up to its end.

An engine's block hashes are its own. Here a block is a *mark*: a hash over the mark of the block before it and its
tokens. Whoever knows the tokens of a prompt computes the same marks and asks which of them the engine holds.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from semantickv.engine_state.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent

MOST_BLOCKS = 4_000_000
"""An engine bounds its blocks itself; this is for one that lies. 4 million are 64 million tokens at 16 a block."""
_SEED = secrets.randbits(60)
"""Marks are never stored or sent. A client that could compute them could make two prompts look alike here."""


def start_chain(salt: str) -> int:
    """The mark in front of the first block."""
    return hash((_SEED, salt))


def list_marks(tokens: Sequence[int], block_size: int, chain: int) -> Iterator[int]:
    """Give the mark of every full block of these tokens, behind ``chain``.

    >>> first, second = list_marks([1, 2, 3, 4, 5], 2, start_chain(""))
    >>> list(list_marks([3, 4], 2, first)) == [second]
    True
    """
    for at in range(0, len(tokens) - block_size + 1, block_size):
        chain = hash((chain, *tokens[at : at + block_size]))
        yield chain


@dataclass(frozen=True, slots=True)
class BlockChange:
    """What an event changed: marks that are held now and were not, and the reverse. ``is_cleared``: nothing is held."""

    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_cleared: bool = False


@dataclass(slots=True)
class EngineBlocks:
    """Applies events in order. A block in two media (GPU and host) is held until both have let go of it."""

    block_size: int = 0
    orphans: int = 0
    """Blocks that cannot be placed, because the event of the block before them was missed."""
    most_blocks: int = MOST_BLOCKS
    _blocks: dict[BlockHash, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """The mark of every block, and the media that hold it; oldest first."""
    _held: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, mark: int) -> bool:
        """Whether the engine holds a block."""
        return mark in self._held

    def apply(self, event: KvEvent) -> BlockChange:
        """Take one event and return what it changed."""
        if isinstance(event, BlockStored):
            return self._store(event)
        if isinstance(event, BlockRemoved):
            gone = [mark for one in event.block_hashes if (mark := self._remove(one, event.medium)) is not None]
            return BlockChange(removed=tuple(gone))
        assert isinstance(event, AllBlocksCleared)
        self.clear()
        return BlockChange(is_cleared=True)

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
        self._held.clear()

    def _store(self, event: BlockStored) -> BlockChange:
        if event.block_size != self.block_size:
            self.clear()  # another engine stands there now
            self.block_size = event.block_size
        if event.parent is None:
            chain = start_chain(event.salt)
        elif (parent := self._blocks.get(event.parent)) is not None:
            chain = parent[0]
        else:
            self.orphans += len(event.block_hashes)
            return BlockChange()
        new, dropped = [], []
        medium, held, blocks = frozenset((event.medium,)), self._held, self._blocks
        marks = list_marks(event.token_ids, event.block_size, chain)
        for block_hash, mark in zip(event.block_hashes, marks, strict=True):
            known = blocks.get(block_hash)
            if known is not None:
                blocks[block_hash] = (known[0], known[1] | medium)
                continue
            blocks[block_hash] = (mark, medium)
            if mark in held:
                held[mark] += 1
            else:
                held[mark] = 1
                new.append(mark)
        while len(blocks) > self.most_blocks:
            dropped += self._release(blocks.pop(next(iter(blocks)))[0])
        return BlockChange(tuple(new), tuple(dropped))

    def _remove(self, block_hash: BlockHash, medium: str) -> int | None:
        block = self._blocks.get(block_hash)
        if block is None:
            return None
        mark, media = block
        left = media - {medium}
        if left:
            self._blocks[block_hash] = (mark, left)
            return None
        del self._blocks[block_hash]
        return next(iter(self._release(mark)), None)

    def _release(self, mark: int) -> list[int]:
        """Take one holder off a mark; return the mark if it was the last one."""
        self._held[mark] -= 1
        if self._held[mark]:
            return []
        del self._held[mark]
        return [mark]


def split_event(event: KvEvent, most: int) -> Iterator[KvEvent]:
    """Give an event in parts of at most ``most`` blocks, which mean the same one after the other.

    >>> [part.parent for part in split_event(BlockStored((1, 2, 3), None, (0,) * 6, 2), 2)]
    [None, 2]
    """
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= most:
        yield event
        return
    hashes = event.block_hashes
    for at in range(0, len(hashes), most):
        part = hashes[at : at + most]
        if isinstance(event, BlockRemoved):
            yield replace(event, block_hashes=part)
        else:
            tokens = event.token_ids[at * event.block_size : (at + most) * event.block_size]
            yield replace(event, block_hashes=part, parent=hashes[at - 1] if at else event.parent, token_ids=tokens)
