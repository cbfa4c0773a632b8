"""Attention of scattered rows in plain torch: what the Triton kernel must compute, and what runs without it.

Rows of one sequence are recomputed at chosen positions only, so a causal mask is not a triangle: each row sees the
keys at positions up to its own, wherever these lie in the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semblend.errors import InputError


def attend_plain(q: Tensor, positions: Tensor, context: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Rows ``q[n, heads, d]`` at ``positions[n]`` attend over the pool rows ``context[T]``; gives ``[n, heads, d]``.

    ``k`` and ``v`` are one layer of a pool: ``[slots, kv_heads, d]``, or ``[blocks, block_tokens, kv_heads, d]`` as
    ``KvLayout`` has them. Position p lies in slot ``context[p]``. Scores and sums are in single precision.
    """
    check_attention(q, positions, context, k, v)
    k, v = as_blocks(k), as_blocks(v)
    at = (context // k.shape[1], context % k.shape[1])
    keys, values = k[at].float(), v[at].float()  # [T, kv_heads, d]
    grouped = q.float().view(len(q), keys.shape[1], -1, q.shape[2])  # [n, kv_heads, group, d]
    scores = torch.einsum("nhgd,thd->nhgt", grouped, keys) * scale
    hidden = torch.arange(len(context), device=q.device)[None] > positions[:, None]
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("nhgt,thd->nhgd", weights, values).flatten(1, 2).to(q.dtype)


def as_blocks(pool: Tensor) -> Tensor:
    """A layer of a pool with its slots in blocks; rows without blocks become blocks of one."""
    return pool.unsqueeze(1) if pool.dim() == 3 else pool


def check_attention(q: Tensor, positions: Tensor, context: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes only: positions and slots stay on the device, and whoever made the rows vouches for them."""
    pool = as_blocks(k)
    if q.dim() != 3 or pool.dim() != 4 or k.shape != v.shape or k.stride() != v.stride():
        raise InputError(
            f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}",
            hint="expected [n, heads, d] and two alike of [slots, kv_heads, d]",
        )
    if q.shape[2] != pool.shape[3] or q.shape[1] % pool.shape[2] or q.dtype != k.dtype or v.dtype != k.dtype:
        raise InputError(
            f"queries {list(q.shape)} {q.dtype} over keys {list(k.shape)} {k.dtype}",
            hint="same head size and type; heads are a multiple of kv_heads",
        )
    if positions.shape != (q.shape[0],) or context.dim() != 1 or positions.is_floating_point():
        raise InputError(
            f"{q.shape[0]} rows, positions {list(positions.shape)}, context {list(context.shape)}",
            hint="one position for each row, and a flat list of slots",
        )
