"""KV events as vLLM and SGLang publish them, and the blocks that they say an engine holds.

An event is a tagged map in msgpack; a batch is ``[time, events, rank]``. An engine's block hashes are its own. Here a
block is a *mark*: a hash over the mark of the block before it and its tokens. Whoever knows the tokens of a prompt
computes the same marks and asks which of them the engine holds.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from semblend.errors import MissingDependencyError, SemBlendError

BlockHash = int | bytes | str
"""What an engine calls a block. It is compared, never computed."""
MOST_BYTES = 64 << 20
"""Of one batch; longer ones are refused."""


class BadEventsError(SemBlendError):
    """Bytes that are no batch of KV events."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """An engine holds new blocks: ``token_ids`` are theirs, in order, ``block_size`` for each.

    ``salt`` names what the hash of the first block depends on beside its tokens: the request's cache salt, an adapter.
    """

    block_hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """An engine no longer holds these blocks in this medium."""

    block_hashes: tuple[BlockHash, ...]
    medium: str = ""


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """An engine's cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def read_batch(data: bytes) -> list[KvEvent]:
    """Read a batch; events of kinds that are not known are left out. `BadEventsError` if it is none.

    >>> from msgspec.msgpack import encode
    >>> read_batch(encode([1.0, [{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}], 0]))
    [BlockRemoved(block_hashes=(7,), medium='GPU')]
    """
    return read_timed_batch(data)[1]


def read_timed_batch(data: bytes) -> tuple[float, list[KvEvent]]:
    """Read a batch as `read_batch` does, with the engine's time of it in seconds; 0 where it gives none."""
    msgspec = _import_msgspec()
    if len(data) > MOST_BYTES:
        raise BadEventsError(f"a batch of {len(data)} bytes", hint=f"at most {MOST_BYTES}")
    try:
        batch = msgspec.msgpack.decode(data)
        events = batch[1]
        if not isinstance(batch, list) or not isinstance(events, list):
            raise BadEventsError("not a batch of KV events", hint="an array of time, events and rank")
        when = batch[0] if isinstance(batch[0], (int, float)) and math.isfinite(batch[0]) else 0.0
        return float(when), [event for one in events if (event := _read_event(one)) is not None]
    except BadEventsError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise BadEventsError(
            f"not a batch of KV events: {type(error).__name__}", hint="vLLM and SGLang send msgpack"
        ) from None


def encode_batch(batch: Any) -> bytes:
    """A batch of plain values (as JSON has them) as the bytes that an engine sends."""
    encoded: bytes = _import_msgspec().msgpack.encode(batch)
    return encoded


def _read_event(value: Any) -> KvEvent | None:
    if not isinstance(value, Mapping):
        raise BadEventsError("an event is not a map", hint="vLLM 0.26 and SGLang 0.5 or newer")
    kind = value.get("type")
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if value.get("group_idx"):  # a hybrid model: the first group speaks for all of them
        return None
    if kind == "BlockRemoved":
        return BlockRemoved(_read_hashes(value["block_hashes"]), _read_medium(value))
    if kind != "BlockStored":
        return None
    size, tokens = value["block_size"], value["token_ids"]
    hashes = _read_hashes(value["block_hashes"])
    if type(size) is not int or size < 1 or len(tokens) != size * len(hashes) or not _are_ints(tokens):
        raise BadEventsError(
            f"{len(tokens)} tokens in {len(hashes)} blocks of {size}", hint="the engine's event is broken"
        )
    parent = value.get("parent_block_hash")
    parents = () if parent is None else _read_hashes([parent])
    return BlockStored(
        hashes, parents[0] if parents else None, tuple(tokens), size, _read_medium(value), _read_salt(value)
    )


def _read_hashes(values: Sequence[Any]) -> tuple[BlockHash, ...]:
    hashes = tuple(values)
    if not set(map(type, hashes)) <= {int, bytes, str}:
        raise BadEventsError("a block hash is neither a number nor bytes", hint="the engine's event is broken")
    return hashes


def _read_medium(value: Mapping[str, Any]) -> str:
    return str(value.get("medium") or "")


def _are_ints(values: Sequence[Any]) -> bool:
    return set(map(type, values)) <= {int}  # as fast as a loop can be: 8k of them come at once


def _read_salt(value: Mapping[str, Any]) -> str:
    """The salt of a chain of blocks: SGLang names it, vLLM lists it among the extra keys of the first block."""
    keys = [value.get("cache_salt"), value.get("lora_name")]
    extra = value.get("extra_keys")
    if isinstance(extra, list) and extra and isinstance(extra[0], list):
        keys += extra[0]
    return "\n".join(dict.fromkeys(str(key) for key in keys if key))


def _import_msgspec() -> Any:
    try:
        import msgspec.msgpack
    except ImportError:
        raise MissingDependencyError("KV events need msgspec", hint="pip install 'semblend-suite[edge]'") from None
    return msgspec


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
