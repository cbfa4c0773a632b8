"""KV events as vLLM and SGLang publish them: msgpack, a batch is ``[time, events, rank]``, an event is a tagged map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
