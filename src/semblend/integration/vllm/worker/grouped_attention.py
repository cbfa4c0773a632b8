"""Many scattered rows: vLLM's FlashAttention for the keys that whole groups of rows see, our kernel for the others.

Rows ascend, so every row of a group sees all keys up to the group's first row. That is attention without a mask, one
pseudo request a group, and FlashAttention is nearly twice as fast at it as our kernel. Left for the kernel are the keys
between a group's first row and each of its rows: with a tenth of a prompt chosen, a few percent of the work. Groups are
made from the last row backwards, because FlashAttention takes them in order and the long ones should not come last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.materialize.contract import KvLayout, Rows
from semblend.materialize.kv.layout import copy_to_device

log = logging.getLogger("vllm.semblend")
Attend = Callable[[int, Tensor], Tensor]
"""``(layer, queries [n, heads, d]) -> [n, heads, d]``."""

GROUP_ROWS = 128
LEAST_ROWS = 512
"""With fewer, FlashAttention leaves much of a GPU idle: four groups and 28 heads keep 112 of 132 processors busy."""
_ROUNDING = 0.05


def can_group_rows(layer: Any, views: KvLayout) -> bool:
    """Whether the layers' attention is the FlashAttention that this was measured with, and gives what our kernel does.

    Tried once, when the engine starts, on keys and values drawn at random.
    """
    impl = layer.impl
    if getattr(impl, "vllm_flash_attn_version", None) != 3 or impl.sliding_window != (-1, -1):
        return False
    try:
        off = _measure_error(layer, views)
        why = None if off < _ROUNDING else f"it is off by {off:.3g} from our kernel"
    except Exception as error:  # then our kernel does it all
        why = f"{type(error).__name__}: {error}"
    if why:
        log.warning("SemBlend does without vLLM's FlashAttention: %s", why)
    return why is None


def _measure_error(layer: Any, views: KvLayout) -> float:
    from semblend.materialize.kv.attention_kernels import scattered_attention

    size, blocks = views.block_tokens, 64
    generator = torch.Generator(device=views.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=views.device, dtype=views.dtype)

    k, v = (draw(blocks, size, layer.num_kv_heads, layer.head_size) for _ in range(2))
    made = KvLayout((k,), (v,))
    context = torch.arange(blocks * size, device=views.device).view(blocks, size).flip(0).flatten()
    every_third, two_groups = torch.arange(0, blocks * size, 3), torch.arange(2 * GROUP_ROWS)

    def compare(attend: Callable[[Rows, KvLayout, Any], Attend], at: Tensor) -> float:
        rows, q = Rows.of(at, at, context), draw(len(at), layer.num_heads, layer.head_size)
        ours = scattered_attention(q, rows.positions, rows.context, k, v, layer.impl.scale)
        return float((attend(rows, made, layer.impl)(0, q) - ours).abs().max())

    return max(
        compare(attend_in_groups, every_third),
        compare(attend_in_recorded_groups, two_groups * blocks * size // len(two_groups)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rows from the last backwards: where groups begin and end, how many keys each sees, at most, and each row's."""

    cuts: Tensor
    seen: Tensor
    most: int
    first: Tensor


def attend_in_groups(rows: Rows, views: KvLayout, impl: Any) -> Attend:
    """Attention of these rows in a layer; as the kernel alone, but for rounding."""
    backwards = rows.host_positions.numpy()[::-1]
    cuts = np.append(np.arange(0, len(backwards), GROUP_ROWS), len(backwards))
    seen = backwards[cuts[1:] - 1] + 1  # by every row of a group: all up to the group's first
    cuts_there, seen_there, first = (
        copy_to_device(torch.from_numpy(values.astype(np.int32)), rows.context.device)
        for values in (cuts, seen, np.repeat(seen, np.diff(cuts))[::-1])
    )
    return _attend(rows, views, impl, _Groups(cuts_there, seen_there, int(seen[0]), first))


def attend_in_recorded_groups(rows: Rows, views: KvLayout, impl: Any) -> Attend:
    """The same for a pass that is recorded: where rows stand is read on the device, when it runs.

    As many rows as whole groups have.
    """
    cuts = torch.arange(0, len(rows) + 1, GROUP_ROWS, dtype=torch.int32, device=rows.context.device)
    seen = (rows.positions.flip(0)[GROUP_ROWS - 1 :: GROUP_ROWS] + 1).to(torch.int32)
    first = seen.repeat_interleave(GROUP_ROWS).flip(0)
    return _attend(rows, views, impl, _Groups(cuts, seen, len(rows.context), first))


def _attend(rows: Rows, views: KvLayout, impl: Any, groups: _Groups) -> Attend:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    from semblend.materialize.kv.attention_kernels import Attended, scattered_attention

    size = views.block_tokens
    named = {
        "max_seqlen_q": GROUP_ROWS,
        "cu_seqlens_q": groups.cuts,
        "max_seqlen_k": groups.most,
        "seqused_k": groups.seen,
        "block_table": (rows.context[::size] // size).to(torch.int32).repeat(len(groups.seen), 1),
        "softmax_scale": impl.scale,
        "causal": False,
        "return_softmax_lse": True,
        "fa_version": impl.vllm_flash_attn_version,
    }

    def attend(layer: int, q: Tensor) -> Tensor:
        k, v = views.k[layer], views.v[layer]
        far = Attended(groups.first, *flash_attn_varlen_func(q=q.flip(0), k=k, v=v, **named))
        return scattered_attention(q, rows.positions, rows.context, k, v, impl.scale, after=far)

    return attend
