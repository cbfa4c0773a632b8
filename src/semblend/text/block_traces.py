"""Traces without text: block ids become token ids that are equal where the ids are, and different elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from semblend.prompt import MAX_TOKEN_ID, TokenArray
from semblend.text.log_formats import UnusableLineError
from semblend.text.parts import Part

PASSAGE_TYPES: Final = ("retrieved_context", "legal_evidence")
MOST_TOKENS: Final = 4_000_000
_MOONCAKE_TOKENS, _BAILIAN_TOKENS = 512, 16


def list_block_parts(record: dict[str, Any]) -> list[Part] | None:
    """The blocks of a request as parts; None where the record is no request of a trace."""
    if isinstance(record.get("blocks"), list):
        return _check_size(list(_read_own(record["blocks"])))
    if isinstance(record.get("hash_ids"), list):
        return _check_size(list(_read_chained(record)))
    return None


def _check_size(parts: list[Part]) -> list[Part]:
    if not parts:
        raise UnusableLineError("the request has no blocks")
    return parts


def _read_own(blocks: list[Any]) -> Iterator[Part]:
    total = 0
    for number, block in enumerate(blocks):
        where = f"blocks[{number}]"
        if not isinstance(block, dict):
            raise UnusableLineError(f"{where} is not an object")
        name = block.get("content_hash", block.get("block_id"))
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise UnusableLineError(f"{where} has no content_hash")
        count = block.get("token_count")
        total = _add(total, count, where)
        kind = block.get("semantic_type")
        tokens = spell_block(str(name), int(count or 0))
        if kind in PASSAGE_TYPES:
            yield Part(f"#{name}", "passage", "retrieved", token_ids=tokens)
        else:
            yield Part(f"#{name}", "result" if kind == "tool_output" else "text", token_ids=tokens)


def _read_chained(record: dict[str, Any]) -> Iterator[Part]:
    """An id stands for a block and everything before it, so no block can move."""
    size = _BAILIAN_TOKENS if "chat_id" in record else _MOONCAKE_TOKENS
    left = record.get("input_length")
    _add(0, left, "input_length")
    for name in record["hash_ids"]:
        if not isinstance(name, int) or isinstance(name, bool):
            raise UnusableLineError(f"hash_ids holds {name!r}, not a whole number")
        count = min(size, int(left or 0))
        if count <= 0:
            raise UnusableLineError("hash_ids holds more blocks than input_length has room for")
        left = int(left or 0) - count
        yield Part(f"#{name}", token_ids=spell_block(str(name), count))


def _add(total: int, count: Any, where: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UnusableLineError(f"{where} has {count!r} tokens")
    if total + count > MOST_TOKENS:
        raise UnusableLineError(f"the request has more than {MOST_TOKENS:,} tokens")
    return total + count


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
