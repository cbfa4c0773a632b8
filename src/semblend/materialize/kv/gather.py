"""The way back of splice: the KV of some slots, out of an engine's cache, into memory of our own.

Within a GPU it is one kernel launch over layers x tokens (``kernels.gather_rows``), elsewhere it goes layer by layer
(``gather_plain``, which is also the specification).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from semblend.materialize.kv.eight_bits import SCALES, pack
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


def copy_layers(layout: Layout, layers: Sequence[int], slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ``slots`` in some layers, each ``[layers, n, kv_heads, head_dim]``, as they are now."""
    shape = (len(layers), len(slots), layout.kv_heads, layout.head_dim)
    k_out, v_out = (torch.empty(shape, dtype=layout.dtype, device=layout.device) for _ in range(2))
    views = layout.views if layout.device.type == "cuda" and has_triton() and slots.numel() else None
    if views is not None:
        from semblend.materialize.kv.kernels import gather_rows

        gather_rows(views, slots, k_out, v_out, layers)
        return k_out, v_out
    for number, layer in enumerate(layers):
        k, v = layout.gather(layer, slots)
        k_out[number].copy_(k)
        v_out[number].copy_(v)
    return k_out, v_out


def gather_packed(layout: Layout, slots: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Copy keys and values of ``slots`` at 8 bits into the four tensors of a donor; queued, not waited for.

    They are packed where they lie, so half the bytes cross a bus; layer by layer, so that no wide copy exists.
    """
    for layer in range(layout.layers):
        pack_layer(parts, layer, *layout.gather(layer, slots))


def pack_layer(parts: Mapping[str, Tensor], layer: int, k: Tensor, v: Tensor) -> None:
    """Put one layer's keys and values, ``[n, kv_heads, head_dim]``, into the tensors of a donor at 8 bits."""
    for name, rows in (("k", k), ("v", v)):
        numbers, scale = pack(rows, SCALES[name])
        parts[name][layer].copy_(numbers, non_blocking=True)
        parts[f"{name}_scale"][layer].copy_(scale, non_blocking=True)


def pack_donor(wide: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    """Put a donor's keys and values into the tensors of one at 8 bits, layer by layer; queued, not waited for."""
    for layer in range(wide["k"].shape[0]):
        pack_layer(parts, layer, wide["k"][layer], wide["v"][layer])
