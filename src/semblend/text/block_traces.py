"""Requests of traces, which name blocks instead of text: ours, Mooncake's and Bailian's, field by field.

Block ids become token ids that are equal where the ids are, and different elsewhere.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final, NamedTuple

import numpy as np

from semblend.prompt import MAX_TOKEN_ID, TokenArray
from semblend.text.log_formats import BadFieldError, UnusableLineError
from semblend.text.parts import Part

PASSAGE_TYPES: Final = ("retrieved_context", "legal_evidence")
MAX_TOKENS: Final = 4_000_000
MOONCAKE_BLOCK_TOKENS: Final = 512
BAILIAN_BLOCK_TOKENS: Final = 16
_INT64: Final = 2**63


class Blocks(NamedTuple):
    """The blocks of a request from the first to the last: what each holds, how long it is, what kind of text it is."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    types: tuple[str, ...]


def list_block_parts(record: dict[str, Any]) -> list[Part] | None:
    """The blocks of a request as parts; None where the record is no request of a trace."""
    if isinstance(record.get("blocks"), list):
        blocks = read_own_blocks(record)
    elif isinstance(record.get("hash_ids"), list):
        size = BAILIAN_BLOCK_TOKENS if "chat_id" in record else MOONCAKE_BLOCK_TOKENS
        blocks = read_chained_blocks(record, size)
    else:
        return None
    if not blocks.ids:
        raise UnusableLineError("the request has no blocks")
    if sum(blocks.tokens) > MAX_TOKENS:
        raise UnusableLineError(f"the request has more than {MAX_TOKENS:,} tokens")
    return [_build_part(*block) for block in zip(*blocks, strict=True)]


def _build_part(block_id: int, tokens: int, kind: str) -> Part:
    text, ids = f"#{block_id}", spell_block(str(block_id), tokens)
    if kind in PASSAGE_TYPES:
        return Part(text, "passage", "retrieved", token_ids=ids)
    return Part(text, "result" if kind == "tool_output" else "text", token_ids=ids)


def read_own_blocks(record: dict[str, Any]) -> Blocks:
    """Read ``blocks`` of `semantickv collect`: each is named by its content, wherever it stands."""
    blocks = record.get("blocks")
    if not isinstance(blocks, list):
        raise BadFieldError("blocks", "missing" if blocks is None else "not a list")
    ids, tokens, types = [], [], []
    for place, block in enumerate(blocks):
        where = f"blocks[{place}]"
        if not isinstance(block, dict):
            raise BadFieldError(where, "not an object")
        ids.append(_read_block_id(block, where))
        tokens.append(read_whole(block, "token_count", least=1, where=where))
        types.append(read_text(block, "semantic_type", "other", where=where))
    return Blocks(tuple(ids), tuple(tokens), tuple(types))


def read_chained_blocks(record: dict[str, Any], block_tokens: int) -> Blocks:
    """Read ``hash_ids`` of Mooncake or Bailian: an id stands for a block and everything before it.

    So no block can move. Bailian's type of the request becomes the type of its blocks.
    """
    hashes = record.get("hash_ids")
    if not isinstance(hashes, list):
        raise BadFieldError("hash_ids", "missing" if hashes is None else "not a list")
    for place, value in enumerate(hashes):
        if type(value) is not int or not -_INT64 <= value < _INT64:
            raise BadFieldError(f"hash_ids[{place}]", f"{value!r} is not an integer of 64 bits")
    length = read_whole(record, "input_length")
    if -(-length // block_tokens) != len(hashes):
        raise BadFieldError("hash_ids", f"{len(hashes)} blocks of {block_tokens} tokens can't hold {length} tokens")
    kind = read_text(record, "type", "other") if "chat_id" in record else "other"
    return Blocks(tuple(hashes), split_length(length, block_tokens), (kind,) * len(hashes))


def split_length(length: int, block_tokens: int) -> tuple[int, ...]:
    """Split a length into full blocks and a last one.

    >>> split_length(20, 16)
    (16, 4)
    """
    full, rest = divmod(length, block_tokens)
    return (block_tokens,) * full + ((rest,) if rest else ())


def _read_block_id(block: dict[str, Any], where: str) -> int:
    """Read the id of a block: a whole number as it is, a text as its hash."""
    for field in ("content_hash", "block_id"):
        value = block.get(field)
        if type(value) is int and -_INT64 <= value < _INT64:
            return value
        if isinstance(value, str) and value:
            digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            return int.from_bytes(digest, "big", signed=True)
        if value is not None:
            raise BadFieldError(f"{where}.{field}", f"{value!r} is neither text nor an integer of 64 bits")
    raise BadFieldError(f"{where}.content_hash", "missing")


def read_real(record: dict[str, Any], field: str) -> float:
    """Read a number that is not negative."""
    value = float(_read_number(record, field, None, ""))
    if value < 0:
        raise BadFieldError(field, f"{value:g} is negative")
    return value


def read_whole(
    record: dict[str, Any], field: str, *, default: int | None = None, least: int = 0, where: str = ""
) -> int:
    """Read a whole number from ``least`` on."""
    value = _read_number(record, field, default, where)
    name = f"{where}.{field}" if where else field
    if value != int(value) or value >= 2**31:
        raise BadFieldError(name, f"{value!r} is not a whole number below 2**31")
    if value < least:
        raise BadFieldError(name, f"{value} is less than {least}")
    return int(value)


def read_text(record: dict[str, Any], field: str, default: str, where: str = "") -> str:
    """Read a text, or the default if the field is missing."""
    value = record.get(field)
    if value is None:
        return default
    if not isinstance(value, str):
        raise BadFieldError(f"{where}.{field}" if where else field, f"{value!r} is not text")
    return value


def _read_number(record: dict[str, Any], field: str, default: float | None, where: str) -> Any:
    """Read a finite number."""
    value = record.get(field, default)
    name = f"{where}.{field}" if where else field
    if value is None:
        raise BadFieldError(name, "missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise BadFieldError(name, f"{value!r} is not a number")
    return value


def spell_block(name: str, count: int) -> TokenArray:
    """``count`` token ids that stand for a block of this name.

    >>> spell_block("a", 3).tolist() == spell_block("a", 5)[:3].tolist()
    True
    >>> set(spell_block("a", 500).tolist()) & set(spell_block("b", 500).tolist())
    set()
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    mixed = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    tokens = ((mixed >> np.uint64(33)) & np.uint64(MAX_TOKEN_ID)).astype(np.int32)
    tokens.setflags(write=False)
    return tokens
