"""Splice's way back: the KV of some slots, out of an engine's pages, into memory of our own.

Within a GPU it is one kernel launch over layers x tokens (``kernels.gather_rows``), elsewhere it goes layer by layer
(``gather_plain``, which is also the specification).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from semblend.materialize.kv.layout import KvLayout
from semblend.materialize.kv.splice import triton_is_here


def gather(pool: Any, slots: Tensor, k_out: Tensor, v_out: Tensor) -> None:
    """Keys and values of ``slots``, in order, into two of ``[layers, n, kv_heads, head_dim]``; queued, not waited for.

    ``pool`` has ``k`` and ``v``, ``[layers, slots, kv_heads, head_dim]`` each; a ``layout`` too if they only look so.
    """
    if k_out.device.type == pool.k.device.type == "cuda" and triton_is_here() and slots.numel():
        layout = pool.layout if hasattr(pool, "layout") else KvLayout.ours(pool.k, pool.v)
        if type(layout) is KvLayout:
            from semblend.materialize.kv.kernels import gather_rows

            return gather_rows(layout, slots, k_out, v_out)
    return gather_plain(pool, slots, k_out, v_out)


def gather_plain(pool: Any, slots: Tensor, k_out: Tensor, v_out: Tensor) -> None:
    """The plain twin; layer by layer, so that no second copy of the whole exists on a device."""
    for out, part in ((k_out, pool.k), (v_out, pool.v)):
        for layer in range(len(out)):
            out[layer].copy_(part[layer].index_select(0, slots), non_blocking=True)
