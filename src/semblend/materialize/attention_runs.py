"""Attention of chosen rows of one prompt by torch's own kernels: stretch by stretch, or in tiles where rows lie apart.

For engines whose backend cannot be handed rows of our choice, and where no Triton kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from semblend.materialize.contract import Layout, Observer, Rows

SHORT_RUN = 16
"""Rows in a stretch, on average, below which all rows over one mask are cheaper than one call for each stretch."""

TILE_ROWS = 256
"""Rows over one mask at a time: a mask of 256 rows over 32k keys is 8 MB."""


def attend_runs(q: Tensor, rows: Rows, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Rows ``q[n, heads, d]`` attend to every position up to their own; gives ``[n, heads, d]``.

    ``k`` and ``v`` are keys and values of positions 0 … ``rows.reach`` in order, ``[reach, kv_heads, d]``.
    """
    keys, values = (part.movedim(0, 1)[None].to(q.dtype) for part in (k, v))
    queries = q.movedim(0, 1)[None]
    found = torch.empty_like(queries)
    start = 0
    for end in _cut(rows):
        reach = int(rows.host_positions[end - 1]) + 1
        mask = torch.arange(reach, device=q.device)[None] <= rows.positions[start:end, None]
        found[:, :, start:end] = scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, :reach],
            values[:, :, :reach],
            attn_mask=mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        start = end
    return found[0].movedim(1, 0)


def _cut(rows: Rows) -> list[int]:
    """Where each call ends, in rows: at the end of a stretch where stretches are long, and of a tile in any case."""
    if len(rows) < SHORT_RUN * len(rows.runs):
        return [*range(TILE_ROWS, len(rows), TILE_ROWS), len(rows)]
    ends: list[int] = []
    at = 0
    for start, end in rows.runs:
        ends += [*range(at + TILE_ROWS, at + end - start, TILE_ROWS), at + end - start]
        at += end - start
    return ends


class PassAttention:
    """Attention of one pass, layer by layer: shows it to an observer, writes the rows' KV and attends to it."""

    def __init__(self, rows: Rows, layout: Layout, observer: Observer | None) -> None:
        self._rows, self._layout = rows, layout
        self._observer = Observer() if observer is None else observer
        self._context = rows.context[: rows.reach]
        self.layers_seen = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """One layer: ``q``, ``k``, ``v`` of the rows are ``[rows, heads, head_dim]``, and so is the answer."""
        rows, layout = self._rows, self._layout
        self._observer.before_write(layer, k, v, rows, layout)
        layout.scatter(layer, rows.slots, k, v)
        self._observer.on_layer(layer, q, rows, layout)
        keys, values = layout.gather(layer, self._context)
        self.layers_seen += 1
        return attend_runs(q, rows, keys, values, scale)
