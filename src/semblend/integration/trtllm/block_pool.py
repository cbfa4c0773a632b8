"""TensorRT-LLM's KV pool as a layout, and copies between it and slots of our own.

A connector gets one tensor, ``[blocks, layers, 2, numbers]``: keys, then values of each layer of a block. In which
order a block holds its tokens and heads depends on the attention backend, and nothing tells. So both orders are
candidates until a prompt that the engine has computed shows which one is right (`reuse_service`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semblend.errors import InputError, SemBlendError
from semblend.materialize.contract import KvLayout, Layout, slots_of_blocks

ORDERS = ("heads first", "tokens first")
"""``[heads, tokens, head_dim]`` and ``[tokens, heads, head_dim]`` within a block."""


def view_pool(pool: Tensor, order: str, *, kv_heads: int, head_dim: int) -> KvLayout:
    """The engine's pool as a layout; nothing is copied.

    >>> view_pool(torch.zeros(6, 2, 2, 96), "heads first", kv_heads=3, head_dim=8)
    KvLayout(layers=2, slots=24, kv_heads=3, head_dim=8, block_tokens=4, torch.float32 on cpu)
    """
    if pool.dim() != 4 or pool.shape[2] != 2 or pool.shape[3] % (kv_heads * head_dim):
        raise InputError(
            f"a KV pool of shape {list(pool.shape)} is not [blocks, layers, 2, tokens x {kv_heads} x {head_dim}]",
            hint="such an engine runs without reuse",
        )
    blocks = pool.shape[:3]
    if order == "heads first":
        parts = pool.view(*blocks, kv_heads, -1, head_dim).transpose(3, 4)
    else:
        parts = pool.view(*blocks, -1, kv_heads, head_dim)
    layers = range(pool.shape[1])
    return KvLayout(tuple(parts[:, n, 0] for n in layers), tuple(parts[:, n, 1] for n in layers))


def find_slots(block_ids: Sequence[int], layout: KvLayout, tokens: int) -> Tensor:
    """Slots of the first ``tokens`` of a prompt in these blocks; raises where a block is missing."""
    needed = list(block_ids[: -(-tokens // layout.block_tokens)])
    if len(needed) * layout.block_tokens < tokens or any(block < 0 for block in needed):
        raise SemBlendError(f"{tokens} tokens do not lie in {len(needed)} blocks", hint="report this: it is a bug")
    return slots_of_blocks(needed, layout.block_tokens, tokens, layout.device)


@torch.inference_mode()
def copy_kv(source: Layout, source_slots: Tensor, target: Layout, target_slots: Tensor) -> None:
    """Keys and values of some slots into others, layer by layer; queued on the current stream."""
    for layer in range(source.layers):
        target.scatter(layer, target_slots, *source.gather(layer, source_slots))
