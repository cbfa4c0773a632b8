"""What stands in for the attention of every layer while a pass of ours runs through the stock model.

vLLM reaches a layer's attention through ``layer.impl``, in eager and in compiled models alike. For the time of a pass
that is one of these: it tells the observer what the layer is about to write and to look for, and it computes attention
by vLLM's own implementation or, for scattered rows, by our kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semblend.integration.vllm.worker.grouped_attention import LEAST_ROWS, Attend, attend_in_groups
from semblend.materialize.contract import Layout, Observer, Rows
from semblend.materialize.kv.layout import KvLayout

OURS = object()
"""Attention metadata of a pass whose attention is all ours: only there so that vLLM does not take it for a dry run."""

SHORT_RUN = 16
"""Rows in a run, on average, below which our kernel reads less of the context than a backend that goes run by run."""


def can_attend(layout: Layout, impl: Any) -> KvLayout | None:
    """The views that our kernel reads, where it runs and computes what ``impl`` does; None elsewhere."""
    if layout.device.type != "cuda" or impl.alibi_slopes is not None or impl.logits_soft_cap:
        return None
    return layout.views if getattr(impl, "sinks", None) is None else None


def choose_attention(rows: Rows, layout: Layout, impl: Any, *, grouped: bool) -> Attend | None:
    """Our kernel for these rows; None where it cannot, or where the backend serves them better.

    ``grouped``: where there are many, the backend's FlashAttention does most of it.
    """
    if len(rows) >= SHORT_RUN * len(rows.runs) or (views := can_attend(layout, impl)) is None:
        return None
    if grouped and len(rows) >= LEAST_ROWS:
        return attend_in_groups(rows, views, impl)
    return attend_scattered(rows.positions, rows.context, views, impl)


def attend_scattered(
    positions: Tensor, context: Tensor, views: KvLayout, impl: Any, parts: int | None = None
) -> Attend:
    """Our kernel for rows at these positions; it looks at them on the device, when it runs.

    ``parts``: into so many the context is cut, for programs side by side; chosen from the shapes unless given.
    """
    attention = _kernel()
    return lambda layer, q: attention(q, positions, context, views.k[layer], views.v[layer], impl.scale, parts=parts)


def _kernel() -> Any:
    from semblend.materialize.kv.attention_kernels import scattered_attention

    return scattered_attention


def compile_attention(views: KvLayout, layer: Any) -> None:
    """Runs our kernels in all variants: few rows and many, the context in one part and in several; and the mass."""
    from semblend.materialize.kv.attention_kernels import add_question_mass

    nothing = torch.zeros(4096, dtype=torch.int64, device=views.device)
    q = torch.zeros(len(nothing), layer.num_heads, layer.head_size, dtype=views.dtype, device=views.device)
    for count in (2, len(nothing)):
        for parts in (1, 2):
            _kernel()(q[:count], nothing[:count], nothing, views.k[0], views.v[0], layer.impl.scale, parts=parts)
    add_question_mass(torch.zeros(len(nothing), device=views.device), q[:2], nothing, views.k[0])


@dataclass(frozen=True, slots=True)
class PassAttention:
    """One pass: its rows, who looks on, and our kernel if it attends."""

    rows: Rows
    layout: Layout
    observer: Observer | None = None
    attend: Attend | None = None

    @property
    def changes_nothing(self) -> bool:
        """Nobody looks on and vLLM's own attention runs: nothing has to stand in for it."""
        return self.observer is None and self.attend is None


class _StandIn:
    """For one layer in one pass; whatever else vLLM asks of the implementation, the implementation answers."""

    def __init__(self, number: int, impl: Any, one_pass: PassAttention) -> None:
        self._number, self._impl, self._pass = number, impl, one_pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl, name)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        look, shape = self._pass.observer, (-1, layer.num_kv_heads, layer.head_size)
        if look is not None:
            look.before_write(self._number, key.view(shape), value.view(shape), self._pass.rows, self._pass.layout)
        self._impl.do_kv_cache_update(layer, key, value, cache, slots)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        metadata: Any,
        output: Tensor,
        **more: Any,
    ) -> Tensor:
        asked = query.view(-1, layer.num_heads, layer.head_size)
        if self._pass.observer is not None:
            self._pass.observer.on_layer(self._number, asked, self._pass.rows, self._pass.layout)
        if self._pass.attend is None:
            found: Tensor = self._impl.forward(layer, query, key, value, cache, metadata, output, **more)
            return found
        return output.view(asked.shape).copy_(self._pass.attend(self._number, asked))


@contextmanager
def replace_attention(layers: Sequence[torch.nn.Module], one_pass: PassAttention) -> Iterator[None]:
    """Every layer's ``impl`` is a stand-in until the pass is over, however it ends."""
    if one_pass.changes_nothing:
        yield
        return
    kept: list[Any] = [layer.impl for layer in layers]
    try:
        for number, layer in enumerate(layers):
            layer.impl = _StandIn(number, kept[number], one_pass)  # type: ignore[assignment]
        yield
    finally:
        for layer, impl in zip(layers, kept, strict=True):
            layer.impl = impl
