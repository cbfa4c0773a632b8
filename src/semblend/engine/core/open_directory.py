"""Opens the donor directory for a loaded model: whose KV may be read there, and what of ours may be written."""

from __future__ import annotations

import hashlib
from dataclasses import fields

import torch
from torch import Tensor

from semblend.engine.core.directory_donors import DirectoryDonors
from semblend.engine.core.engine import Engine
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.weights import Weights
from semblend.materialize.donors.directory import SharedDonors
from semblend.materialize.donors.directory_kv import DirectoryKv, KvSignature, Publisher
from semblend.materialize.donors.store import PrivateFolder
from semblend.materialize.donors.tiers import DonorKv
from semblend.prompt import Namespace

STRETCH, STRETCHES = 64, 8
"""Numbers in a row that are read of every weight, and how many such rows."""
LAYOUT = "semblend-1"
"""Names how this engine lays weights and KV out. Another engine's digest of the same model is another one."""


def open_directory(path: str, model: DecoderModel, *, bits: int = 16) -> DirectoryKv:
    """The KV files in ``path`` that this model can use; raises StoreError where the folder cannot be had."""
    spec = model.spec
    signature = KvSignature(
        weights=digest_weights(model.weights),
        dtype=str(model.dtype).removeprefix("torch."),
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        bits=bits,
        rope=spec.rope,
    )
    return DirectoryKv(PrivateFolder(path), signature)


def share_donors(
    engine: Engine, kv: DirectoryKv, path: str, budget_bytes: int, *, every_s: float = 1.0
) -> DirectoryDonors:
    """Let an engine that was assembled over ``kv`` publish at most ``budget_bytes`` in ``path``, and find others'."""
    reuse = engine.reuse
    assert reuse.semblend is not None, "donors are found by the library"
    assert isinstance(reuse.donor_kv, DonorKv), "and their KV is kept here"
    namespace = Namespace(model=engine.config.model_name, kv_dtype=str(engine.pool.dtype).removeprefix("torch."))
    token_bytes = count_token_bytes(reuse.donor_kv, engine)
    shared = SharedDonors(
        path, budget_bytes, namespace, token_bytes=token_bytes, ttl_s=reuse.semblend.config.donor_ttl_s, every_s=every_s
    )
    kv.verify_ahead()
    reuse.directory = DirectoryDonors(reuse.semblend, shared, kv, Publisher(reuse.donor_kv))
    reuse.directory.take_in_all()
    return reuse.directory


def count_token_bytes(donors: DonorKv, engine: Engine) -> float:
    """What the KV of one token takes in a file."""
    spec, tokens = engine.model.spec, 6400
    shape = (spec.layers, tokens, spec.kv_heads, spec.head_dim)
    return donors.memory.count_bytes("host", shape, engine.pool.dtype) / tokens


def digest_weights(weights: Weights) -> str:
    """16 hex digits of some numbers of every weight: two folders of one name may hold other weights.

    The same numbers in another type or layout have another digest, as they give other KV.
    """
    digest = hashlib.sha256(LAYOUT.encode())
    tensors: list[Tensor] = [weights.embedding, weights.norm, weights.head]
    for layer in weights.layers:
        tensors += [one for f in fields(layer) if (one := getattr(layer, f.name)) is not None]
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        size = min(STRETCH, flat.numel())
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        for part in range(1, STRETCHES + 1):
            start = (flat.numel() - size) * part // STRETCHES
            digest.update(flat[start : start + size].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
