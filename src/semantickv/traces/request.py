"""One request of a trace: the ids, lengths and types of its blocks, and when it arrived. No text."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from semblend.errors import InputError


@dataclass(frozen=True)
class TraceRequest:
    """One request: its blocks from the first to the last, and what is known about it.

    >>> TraceRequest("r1", 0.5, (7, 8), (512, 100), ("system", "user")).tokens
    612
    """

    request_id: str
    arrival_s: float
    block_ids: tuple[int, ...]
    block_tokens: tuple[int, ...]
    block_types: tuple[str, ...]
    output_tokens: int = 0
    tenant: str = "default"
    session: str = ""
    ttft_ms: float | None = None

    def __post_init__(self) -> None:
        if not len(self.block_ids) == len(self.block_tokens) == len(self.block_types):
            raise InputError(f"request {self.request_id!r}: ids, tokens and types of its blocks differ in number")
        if not (self.arrival_s >= 0 and math.isfinite(self.arrival_s)):
            raise InputError(f"request {self.request_id!r}: arrival_s must be finite and not negative")
        if any(tokens <= 0 for tokens in self.block_tokens):
            raise InputError(f"request {self.request_id!r}: a block has no tokens", hint="leave empty blocks out")

    @property
    def tokens(self) -> int:
        return sum(self.block_tokens)


class BadFieldError(Exception):
    """A field of the current line of a trace file cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field, self.problem = field, problem


def cut_into_blocks(token_ids: Sequence[int], block_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut token ids into blocks; return the id of each block, a hash of its tokens, and its length.

    >>> ids, lengths = cut_into_blocks([1, 2, 3, 1, 2], 3)
    >>> len(set(ids)), lengths
    (2, (3, 2))
    """
    parts = [token_ids[at : at + block_tokens] for at in range(0, len(token_ids), block_tokens)]
    return tuple(map(hash_tokens, parts)), tuple(map(len, parts))


def hash_tokens(token_ids: Sequence[int]) -> int:
    """Hash the tokens of a block to a number of 64 bits that is the same in every run."""
    data = array("q", token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)
