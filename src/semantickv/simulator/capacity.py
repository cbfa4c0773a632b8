"""The size of a cache: blocks, tokens, or bytes of a named model's KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from semblend.errors import InputError
from semblend.kv_shapes import DTYPE_BYTES, KV_SHAPES, count_kv_bytes_per_token

__all__ = ["DTYPE_BYTES", "KV_SHAPES", "Capacity", "Unit", "count_kv_bytes_per_token"]

Unit = Literal["blocks", "tokens"]


@dataclass(frozen=True)
class Capacity:
    """A size in blocks (every block weighs one) or in tokens (a block weighs its tokens).

    >>> Capacity.bytes(2**30, model="qwen2.5-7b").size
    18724
    """

    unit: Unit
    size: int
    label: str = ""

    def __post_init__(self) -> None:
        if self.unit not in ("blocks", "tokens"):
            raise InputError(f"unknown unit {self.unit!r}", hint="blocks or tokens")
        if self.size < 0:
            raise InputError(f"a capacity of {self.size} {self.unit} is negative")

    @staticmethod
    def blocks(n: int) -> Capacity:
        """Return a capacity of ``n`` blocks."""
        return Capacity("blocks", int(n))

    @staticmethod
    def tokens(n: int) -> Capacity:
        """Return a capacity of ``n`` tokens."""
        return Capacity("tokens", int(n))

    @staticmethod
    def bytes(n: int, model: str = "qwen2.5-7b", dtype: str = "bf16") -> Capacity:
        """Return the tokens whose KV fits in ``n`` bytes for this model and dtype."""
        return Capacity("tokens", int(n) // count_kv_bytes_per_token(model, dtype), f"{n} bytes of {model} {dtype} KV")

    def __str__(self) -> str:
        return f"{self.size} {self.unit}" + (f" ({self.label})" if self.label else "")
