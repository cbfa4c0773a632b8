"""Many scattered rows: vLLM's FlashAttention for the keys that whole groups of rows see, our kernel for the others.

Rows ascend, so every row of a group sees all keys up to the group's first row. That is attention without a mask, one
pseudo request a group, and FlashAttention is nearly twice as fast at it as our kernel. Left for the kernel are the keys
between a group's first row and each of its rows: with a tenth of a prompt chosen, a few percent of the work. Groups are
made from the last row backwards, because FlashAttention takes them in order and the long ones should not come last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.integration.adapter import EngineRows, PagedPool
from semblend.materialize.kv.host_memory import sent

log = logging.getLogger("vllm.semblend")
GROUP_ROWS = 128
LEAST_ROWS = 1024
"""With fewer, FlashAttention leaves most of a GPU idle."""
_ROUNDING = 0.05


def reads_far(layer: Any, layout: Any) -> bool:
    """Whether the layers' attention is the FlashAttention that this was measured with, and gives what our kernel does.

    Tried once, when the engine starts, on keys and values drawn at random.
    """
    impl = layer.impl
    if getattr(impl, "vllm_flash_attn_version", None) != 3 or impl.sliding_window != (-1, -1):
        return False
    try:
        off = _error_on_random(layer, layout)
        why = None if off < _ROUNDING else f"it is off by {off:.3g} from our kernel"
    except Exception as error:  # then our kernel does it all
        why = f"{type(error).__name__}: {error}"
    if why:
        log.warning("SemBlend does without vLLM's FlashAttention: %s", why)
    return why is None


def _error_on_random(layer: Any, layout: Any) -> float:
    from semblend.materialize.kv.attention_kernels import scattered_attention

    size, blocks = layout.block_tokens, 64
    made = torch.Generator(device=layout.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, device=layout.device, dtype=layout.dtype)

    k, v = (drawn(blocks, size, layer.num_kv_heads, layer.head_size) for _ in range(2))
    pool: Any = SimpleNamespace(layout=SimpleNamespace(block_tokens=size, k=[k], v=[v]))
    at = torch.arange(0, blocks * size, 3)
    rows = EngineRows.of(at, at, torch.arange(blocks * size, device=layout.device).view(blocks, size).flip(0).flatten())
    q = drawn(len(at), layer.num_heads, layer.head_size)
    ours = scattered_attention(q, rows.positions, rows.context, k, v, layer.impl.scale)
    return float((far_and_near(rows, pool, layer.impl)(0, q) - ours).abs().max())


def far_and_near(rows: EngineRows, pool: PagedPool, impl: Any) -> Callable[[int, Tensor], Tensor]:
    """Attention of these rows in a layer; as the kernel alone, but for rounding."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    from semblend.materialize.kv.attention_kernels import Attended, scattered_attention

    layout: Any = pool.layout
    backwards = rows.host_positions.numpy()[::-1]
    cuts = np.append(np.arange(0, len(backwards), GROUP_ROWS), len(backwards))
    seen = backwards[cuts[1:] - 1] + 1  # by every row of a group: all up to the group's first
    size, device = layout.block_tokens, rows.context.device
    named = {
        "max_seqlen_q": GROUP_ROWS,
        "cu_seqlens_q": _sent(cuts, device),
        "max_seqlen_k": int(seen[0]),
        "seqused_k": _sent(seen, device),
        "block_table": (rows.context[::size] // size).to(torch.int32).repeat(len(seen), 1),
        "softmax_scale": impl.scale,
        "causal": False,
        "return_softmax_lse": True,
        "fa_version": impl.vllm_flash_attn_version,
    }
    first = _sent(np.repeat(seen, np.diff(cuts))[::-1], device)

    def attend(layer: int, q: Tensor) -> Tensor:
        k, v = layout.k[layer], layout.v[layer]
        far = Attended(first, *flash_attn_varlen_func(q=q.flip(0), k=k, v=v, **named))
        return scattered_attention(q, rows.positions, rows.context, k, v, impl.scale, after=far)

    return attend


def _sent(values: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return sent(torch.from_numpy(values.astype(np.int32)), device)
