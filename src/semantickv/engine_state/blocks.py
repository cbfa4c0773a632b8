"""The blocks that one engine holds, each known by the tokens from the prompt's beginning up to its end.

An engine's block hashes are its own. Here a block is a *mark*: a hash over the mark of the block before it and its
tokens. Whoever knows the tokens of a prompt computes the same marks and asks which of them the engine holds.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
class _Block:
    mark: int
    media: set[str]


@dataclass(slots=True)
class EngineBlocks:
    """Applies events in order. A block in two media (GPU and host) is held until both have let go of it."""

    block_size: int = 0
    orphans: int = 0
    """Blocks that cannot be placed, because the event of the block before them was missed."""
    most_blocks: int = MOST_BLOCKS
    _blocks: OrderedDict[BlockHash, _Block] = field(default_factory=OrderedDict)
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
            chain = parent.mark
        else:
            self.orphans += len(event.block_hashes)
            return BlockChange()
        new, dropped = [], []
        marks = list_marks(event.token_ids, event.block_size, chain)
        for block_hash, mark in zip(event.block_hashes, marks, strict=True):
            known = self._blocks.get(block_hash)
            if known is not None:
                known.media.add(event.medium)
                continue
            self._blocks[block_hash] = _Block(mark, {event.medium})
            self._held[mark] = self._held.get(mark, 0) + 1
            if self._held[mark] == 1:
                new.append(mark)
        while len(self._blocks) > self.most_blocks:
            _, block = self._blocks.popitem(last=False)
            dropped += self._release(block)
        return BlockChange(tuple(new), tuple(dropped))

    def _remove(self, block_hash: BlockHash, medium: str) -> int | None:
        block = self._blocks.get(block_hash)
        if block is None:
            return None
        block.media.discard(medium)
        if block.media:
            return None
        del self._blocks[block_hash]
        return next(iter(self._release(block)), None)

    def _release(self, block: _Block) -> list[int]:
        """Take one holder off a mark; return the mark if it was the last one."""
        self._held[block.mark] -= 1
        if self._held[block.mark]:
            return []
        del self._held[block.mark]
        return [block.mark]
