"""What stands in for the attention of every layer while a pass of ours runs through the stock model.

vLLM reaches a layer's attention through ``layer.impl``, in eager and in compiled models alike. For the time of a pass
that is one of these: it tells the observer what the layer is about to write and to look for, and it computes attention
by vLLM's own implementation or, for scattered rows, by our kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semblend.integration.adapter import EngineRows, PagedPool
from semblend.integration.vllm.worker.grouped_attention import LEAST_ROWS, far_and_near
from semblend.materialize.kv.layout import KvLayout

OURS = object()
"""Attention metadata of a pass whose attention is all ours: only there so that vLLM does not take it for a dry run."""

Attend = Callable[[int, Tensor], Tensor]
"""``(layer, queries [n, heads, d]) -> [n, heads, d]``."""

SHORT_RUN = 16
"""Rows in a run, on average, below which our kernel reads less of the context than a backend that goes run by run."""


def attends(pool: PagedPool, impl: Any) -> bool:
    """Whether our kernel runs here and computes what ``impl`` does."""
    on_gpu = pool.layout.device.type == "cuda" and type(pool.layout) is KvLayout
    return on_gpu and impl.alibi_slopes is None and not impl.logits_soft_cap and getattr(impl, "sinks", None) is None


def scattered(rows: EngineRows, pool: PagedPool, impl: Any, *, far: bool) -> Attend | None:
    """Our kernel for these rows; None where it cannot, or where the backend serves them better.

    ``far``: where there are many, the backend's FlashAttention does most of it.
    """
    if len(rows) >= SHORT_RUN * len(rows.runs) or not attends(pool, impl):
        return None
    if far and len(rows) >= LEAST_ROWS:
        return far_and_near(rows, pool, impl)
    return scattered_over(rows.positions, rows.context, pool, impl)


def scattered_over(positions: Tensor, context: Tensor, pool: PagedPool, impl: Any) -> Attend:
    """Our kernel for rows at these positions; it looks at them on the device, when it runs."""
    layout: Any = pool.layout
    attention = _kernel()
    return lambda layer, q: attention(q, positions, context, layout.k[layer], layout.v[layer], impl.scale)


def _kernel() -> Any:
    from semblend.materialize.kv.attention_kernels import scattered_attention

    return scattered_attention


def compile_attention(pool: PagedPool, layer: Any) -> None:
    """Runs our kernels in all variants: few rows and many, the context in one part and in several; and the mass."""
    from semblend.materialize.kv.mass_kernels import add_question_mass

    layout: Any = pool.layout
    nothing = torch.zeros(4096, dtype=torch.int64, device=layout.device)
    q = torch.zeros(len(nothing), layer.num_heads, layer.head_size, dtype=layout.dtype, device=layout.device)
    for count in (2, len(nothing)):
        for parts in (1, 2):
            _kernel()(q[:count], nothing[:count], nothing, layout.k[0], layout.v[0], layer.impl.scale, parts=parts)
    add_question_mass(torch.zeros(len(nothing), device=layout.device), q[:2], nothing, layout.k[0])


@dataclass(frozen=True, slots=True)
class PassAttention:
    """One pass: its rows, who looks on, and our kernel if it attends."""

    rows: EngineRows
    pool: PagedPool
    observer: Any = None
    attend: Attend | None = None

    @classmethod
    def of(cls, rows: EngineRows, pool: PagedPool, observer: Any, attend: Attend | None) -> PassAttention | None:
        """None where there is nothing to stand in for."""
        return cls(rows, pool, observer, attend) if observer is not None or attend is not None else None


class _StandIn:
    """For one layer in one pass; whatever else vLLM asks of the implementation, the implementation answers."""

    def __init__(self, number: int, impl: Any, one_pass: PassAttention) -> None:
        self._number, self._impl, self._pass = number, impl, one_pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl, name)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        look, shape = self._pass.observer, (-1, layer.num_kv_heads, layer.head_size)
        if look is not None:
            look.before_write(self._number, key.view(shape), value.view(shape), self._pass.rows, self._pass.pool)
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
            self._pass.observer.on_layer(self._number, asked, self._pass.rows, self._pass.pool)
        if self._pass.attend is None:
            found: Tensor = self._impl.forward(layer, query, key, value, cache, metadata, output, **more)
            return found
        return output.view(asked.shape).copy_(self._pass.attend(self._number, asked))


@contextmanager
def standing_in(layers: Sequence[torch.nn.Module], one_pass: PassAttention | None) -> Iterator[None]:
    """Every layer's ``impl`` is a stand-in until the pass is over, however it ends."""
    if one_pass is None:
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
