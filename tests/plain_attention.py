"""Attention of scattered rows in plain torch: what our kernel and the embedded engine must compute."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_plain(
    q: Tensor,
    positions: Tensor,
    context: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Rows ``q[n, heads, d]`` at ``positions[n]`` attend over the pool rows ``context[T]``; gives ``[n, heads, d]``.

    ``k`` and ``v`` are one layer of a pool: ``[slots, kv_heads, d]``, or ``[blocks, block_tokens, kv_heads, d]`` as
    ``KvLayout`` has them. Position p lies in slot ``context[p]``. Scores and sums are in single precision. A row
    sees the last ``window`` keys up to its own; ``sinks[heads]`` are scores of a key without a value.
    """
    k, v = (pool.unsqueeze(1) if pool.dim() == 3 else pool for pool in (k, v))
    at = (context // k.shape[1], context % k.shape[1])
    keys, values = k[at].float(), v[at].float()  # [T, kv_heads, d]
    grouped = q.float().view(len(q), keys.shape[1], -1, q.shape[2])  # [n, kv_heads, group, d]
    scores = torch.einsum("nhgd,thd->nhgt", grouped, keys) * scale
    hidden = torch.arange(len(context), device=q.device)[None] > positions[:, None]
    if window is not None:
        hidden |= torch.arange(len(context), device=q.device)[None] <= positions[:, None] - window
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if sinks is not None:
        asides = sinks.float().view(1, keys.shape[1], -1, 1).expand(len(q), -1, -1, -1)
        scores = torch.cat((scores, asides), -1)
    weights = scores.softmax(-1)[..., : len(context)]
    return torch.einsum("nhgt,thd->nhgd", weights, values).flatten(1, 2).to(q.dtype)
