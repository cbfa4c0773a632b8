"""What must be equal for KV of one engine to be KV of another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from semblend.materialize.kv.rope import RopeSpec

SAMPLES = 64
"""Numbers of each weight that go into a digest."""


@dataclass(frozen=True, slots=True)
class KvSignature:
    """``weights`` stands for the loaded model (`digest_weights`); ``kv_heads`` are those of one rank."""

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


def digest_weights(named: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of weights by name: names, shapes, types, and a few numbers of each, spread over it.

    Two folders with one name may hold other weights, and a folder may be written anew between two starts: the name of a
    model is not enough. Weights that were trained further differ nearly everywhere, so a few numbers show it.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(named, key=lambda one: one[0]):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach().flatten()
        if flat.numel():
            at = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64).long()
            digest.update(flat[at.to(flat.device)].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
