"""What must be equal for KV of one engine to be KV of another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from semblend.materialize.kv.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class KvSignature:
    """``weights`` is a digest of the loaded model: its name is not enough. ``kv_heads`` are those of one rank.

    Two folders with one name may hold other weights, and a folder may be written anew between two starts.
    """

    weights: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    bits: int
    rope: RopeSpec | None
    rank: int = 0
    ranks: int = 1

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]
