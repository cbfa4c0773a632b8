"""Many scattered rows: vLLM's FlashAttention for the keys that whole groups of rows see, our kernel for the others.

Rows ascend, so every row of a group sees all keys up to the group's first row. That is attention without a mask, one
pseudo request a group, and FlashAttention is nearly twice as fast at it as our kernel. Left for the kernel are the keys
between a group's first row and each of its rows: with a tenth of a prompt chosen, a few percent of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from semblend.integration.adapter import EngineRows, PagedPool
from semblend.materialize.host_memory import sent

GROUP_ROWS = 128
LEAST_ROWS = 1024
"""With fewer, FlashAttention leaves most of a GPU idle."""


def reads_far(impl: Any) -> bool:
    """Whether the layers' attention is the FlashAttention that this was measured with."""
    return getattr(impl, "vllm_flash_attn_version", None) == 3 and impl.sliding_window == (-1, -1)


def far_and_near(rows: EngineRows, pool: PagedPool, impl: Any) -> Callable[[int, Tensor], Tensor]:
    """Attention of these rows in a layer; as the kernel alone, but for rounding."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    from semblend.materialize.attention_kernels import Attended, scattered_attention

    layout: Any = pool.layout
    at = rows.host_positions
    groups = at[::GROUP_ROWS] + 1  # every row of a group sees the group's first
    size = layout.block_tokens
    device = rows.context.device
    starts = torch.arange(len(groups) + 1, dtype=torch.int32).mul_(GROUP_ROWS).clamp_(max=len(at))
    named = {
        "max_seqlen_q": GROUP_ROWS,
        "cu_seqlens_q": sent(starts, device),
        "max_seqlen_k": int(groups[-1]),
        "seqused_k": sent(groups.to(torch.int32), device),
        "block_table": (rows.context[::size] // size).to(torch.int32).repeat(len(groups), 1),
        "softmax_scale": impl.scale,
        "causal": False,
        "return_softmax_lse": True,
        "fa_version": impl.vllm_flash_attn_version,
    }
    first = sent(groups.repeat_interleave(GROUP_ROWS)[: len(at)].to(torch.int32), device)

    def attend(layer: int, q: Tensor) -> Tensor:
        k, v = layout.k[layer], layout.v[layer]
        far = Attended(first, *flash_attn_varlen_func(q=q, k=k, v=v, **named))
        return scattered_attention(q, rows.positions, rows.context, k, v, impl.scale, after=far)

    return attend
