"""The way back of splice: the KV of some slots, out of an engine's cache, into memory of our own.

Within a GPU it is one kernel launch over layers x tokens (``kernels.gather_rows``), elsewhere it goes layer by layer
(``gather_plain``, which is also the specification).
"""

from __future__ import annotations

from torch import Tensor

from semblend.materialize.kv.layout import Layout
from semblend.materialize.kv.triton_support import has_triton


def gather(layout: Layout, slots: Tensor, k_out: Tensor, v_out: Tensor) -> None:
    """Copy keys and values of ``slots`` into two ``[layers, n, kv_heads, head_dim]``; queued, not waited for."""
    if k_out.device.type == layout.device.type == "cuda" and has_triton() and slots.numel():
        views = layout.views
        if views is not None:
            from semblend.materialize.kv.kernels import gather_rows

            return gather_rows(views, slots, k_out, v_out)
    return gather_plain(layout, slots, k_out, v_out)


def gather_plain(layout: Layout, slots: Tensor, k_out: Tensor, v_out: Tensor) -> None:
    """The plain twin; layer by layer, so that no second copy of the whole exists on a device."""
    for layer in range(layout.layers):
        k, v = layout.gather(layer, slots)
        k_out[layer].copy_(k, non_blocking=True)
        v_out[layer].copy_(v, non_blocking=True)
