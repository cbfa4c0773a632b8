"""What stands in for the attention of every layer while a pass of ours runs through the stock model.

vLLM reaches a layer's attention through ``layer.impl``, in eager and in compiled models alike. For the time of a pass
that is one of these: it tells the observer what the layer is about to write and to look for, and it computes attention
by vLLM's own implementation or, for scattered rows, by our kernel. Layers may differ: one with a window begins each
row at its own first key, and a sink is mass that a row has before it sees any key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.integration.vllm.worker.latents import LatentStandIn
from semblend.integration.vllm.worker.quantised import QuantisedLayout, widen_queries
from semblend.materialize.contract import Layout, Observer, Rows
from semblend.materialize.kv.layout import KvLayout, LatentLayout, copy_to_device

# -- Many scattered rows: vLLM's FlashAttention for the keys that whole groups of rows see, our kernel for the others.
#
# Rows ascend, so every row of a group sees all keys up to the group's first row. That is attention without a mask,
# one pseudo request a group, and FlashAttention is nearly twice as fast at it as our kernel. Left for the kernel are
# the keys between a group's first row and each of its rows: with a tenth of a prompt chosen, a few percent of the
# work. Groups are made from the last row backwards, because FlashAttention takes them in order and the long ones
# should not come last.


log = logging.getLogger("vllm.semblend")
Attend = Callable[[int, Tensor], Tensor]
"""``(layer, queries [n, heads, d]) -> [n, heads, d]``."""
Layers = Sequence[Any]
"""vLLM's attention modules, bottom up."""

GROUP_ROWS = 128
MIN_ROWS = 512
"""With fewer, FlashAttention leaves much of a GPU idle: four groups and 28 heads keep 112 of 132 processors busy."""
_ROUNDING = 0.05


def can_group_rows(layer: Any, views: KvLayout) -> bool:
    """Whether the layers' attention is the FlashAttention that this was measured with, and gives what our kernel does.

    Tried once, when the engine starts, on keys and values drawn at random.
    """
    impl = layer.impl
    if getattr(impl, "vllm_flash_attn_version", None) != 3 or impl.sliding_window != (-1, -1) or not _sees_all(layer):
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

    def compare(attend: Callable[[Rows, KvLayout, Layers], Attend], at: Tensor) -> float:
        rows, q = Rows.of(at, at, context), draw(len(at), layer.num_heads, layer.head_size)
        ours = scattered_attention(q, rows.positions, rows.context, k, v, layer.impl.scale)
        return float((attend(rows, made, [layer])(0, q) - ours).abs().max())

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


def attend_in_groups(rows: Rows, views: KvLayout, layers: Layers) -> Attend:
    """Attention of these rows in a layer; as the kernel alone, but for rounding."""
    backwards = rows.host_positions.numpy()[::-1]
    cuts = np.append(np.arange(0, len(backwards), GROUP_ROWS), len(backwards))
    seen = backwards[cuts[1:] - 1] + 1  # by every row of a group: all up to the group's first
    cuts_there, seen_there, first = (
        copy_to_device(torch.from_numpy(values.astype(np.int32)), rows.context.device)
        for values in (cuts, seen, np.repeat(seen, np.diff(cuts))[::-1])
    )
    return _attend(rows, views, layers, _Groups(cuts_there, seen_there, int(seen[0]), first))


def attend_in_recorded_groups(rows: Rows, views: KvLayout, layers: Layers) -> Attend:
    """The same for a pass that is recorded: where rows stand is read on the device, when it runs.

    As many rows as whole groups have.
    """
    cuts = torch.arange(0, len(rows) + 1, GROUP_ROWS, dtype=torch.int32, device=rows.context.device)
    seen = (rows.positions.flip(0)[GROUP_ROWS - 1 :: GROUP_ROWS] + 1).to(torch.int32)
    first = seen.repeat_interleave(GROUP_ROWS).flip(0)
    return _attend(rows, views, layers, _Groups(cuts, seen, len(rows.context), first))


def _attend(rows: Rows, views: KvLayout, layers: Layers, groups: _Groups) -> Attend:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    from semblend.materialize.kv.attention_kernels import Attended, scattered_attention

    size, by_kernel = views.block_tokens, attend_scattered(rows.positions, rows.context, views, layers)
    named = {
        "max_seqlen_q": GROUP_ROWS,
        "cu_seqlens_q": groups.cuts,
        "max_seqlen_k": groups.most,
        "seqused_k": groups.seen,
        "block_table": (rows.context[::size] // size).to(torch.int32).repeat(len(groups.seen), 1),
        "causal": False,
        "return_softmax_lse": True,
    }

    def attend(layer: int, q: Tensor) -> Tensor:
        if not _sees_all(layers[layer]):
            return by_kernel(layer, q)
        k, v, impl = views.k[layer], views.v[layer], layers[layer].impl
        theirs = {"softmax_scale": impl.scale, "fa_version": impl.vllm_flash_attn_version}
        far = Attended(groups.first, *flash_attn_varlen_func(q=q.flip(0), k=k, v=v, **named, **theirs))
        return scattered_attention(q, rows.positions, rows.context, k, v, impl.scale, after=far)

    return attend


OURS = object()
"""Attention metadata of a pass whose attention is all ours: only there so that vLLM does not take it for a dry run."""

SHORT_RUN = 16
"""Rows in a run, on average, below which our kernel reads less of the context than a backend that goes run by run."""


def can_attend(layout: Layout, layers: Layers) -> KvLayout | None:
    """The views that our kernel reads, where it runs and computes what these layers do; None elsewhere."""
    return layout.views if runs_kernels(layout, layers) else None


def runs_kernels(layout: Layout, layers: Layers) -> bool:
    """Whether our kernel runs here and computes what these layers do."""
    if layout.device.type != "cuda" or isinstance(layout, LatentLayout):
        return False
    return not any(layer.impl.alibi_slopes is not None or layer.impl.logits_soft_cap for layer in layers)


def choose_attention(rows: Rows, layout: Layout, layers: Layers, *, grouped: bool) -> Attend | None:
    """Our kernel for these rows; None where it cannot, or where the backend serves them better.

    ``grouped``: where there are many, the backend's FlashAttention does most of it.
    """
    if len(rows) >= SHORT_RUN * len(rows.runs):
        return None
    if isinstance(layout, QuantisedLayout):
        return attend_widened(rows, layout, layers) if runs_kernels(layout, layers) else None
    if (views := can_attend(layout, layers)) is None:
        return None
    if grouped and len(rows) >= MIN_ROWS:
        return attend_in_groups(rows, views, layers)
    return attend_scattered(rows.positions, rows.context, views, layers)


def attend_widened(rows: Rows, layout: QuantisedLayout, layers: Layers) -> Attend:
    """The same over 8-bit KV: a layer's context is read wide, once, for a kernel that reads wide numbers only."""
    context = rows.context[: rows.reach]

    def attend(layer: int, q: Tensor) -> Tensor:
        k, v = layout.gather(layer, context)
        views = KvLayout.of_rows([k], [v])
        return attend_scattered(rows.positions, torch.arange(len(k), device=k.device), views, [layers[layer]])(0, q)

    return attend


def attend_scattered(
    positions: Tensor, context: Tensor, views: KvLayout, layers: Layers, parts: int | None = None
) -> Attend:
    """Our kernel for rows at these positions; it looks at them on the device, when it runs.

    ``parts``: into so many the context is cut, for programs side by side; chosen from the shapes unless given.
    """
    attention = _kernel()

    def attend(layer: int, q: Tensor) -> Tensor:
        k, v, scale = views.k[layer], views.v[layer], layers[layer].impl.scale
        after = None if _sees_all(layers[layer]) else begin_rows(layers[layer], positions, q)
        found: Tensor = attention(q, positions, context, k, v, scale, parts=parts, after=after)
        return found

    return attend


def _sees_all(layer: Any) -> bool:
    """Whether a row of this layer attends to every key up to its own, and to nothing else."""
    return layer.sliding_window is None and getattr(layer.impl, "sinks", None) is None


NOTHING = -1e30
"""The logarithm of no mass at all; a kernel that adds parts up needs a finite one."""


def begin_rows(layer: Any, positions: Tensor, q: Tensor) -> Any:
    """What rows start from in a layer with a window or sinks: their first keys, and the mass of a sink, which has no
    value (`attention_kernels.Attended`)."""
    from semblend.materialize.kv.attention_kernels import Attended

    first, sinks = torch.zeros_like(positions), getattr(layer.impl, "sinks", None)
    if layer.sliding_window is not None:
        first = (positions - layer.sliding_window + 1).clamp_min(0)
    mass = torch.full_like(q[:, :, 0].T, NOTHING, dtype=torch.float32)
    if sinks is not None:
        mass.copy_(sinks[:, None])
    return Attended(first.to(torch.int32), torch.zeros_like(q), mass)


def _kernel() -> Any:
    from semblend.materialize.kv.attention_kernels import scattered_attention

    return scattered_attention


def count_recorded_parts(rows: Rows, layer: Any) -> int:
    """Into how many parts the context of a recorded pass is cut."""
    from semblend.materialize.kv.attention_kernels import recorded_parts

    return recorded_parts(len(rows), layer.num_heads, layer.num_kv_heads, len(rows.context))


def compile_attention(views: KvLayout, layers: Layers) -> None:
    """Runs our kernels in all variants: few rows and many, the context in one part and in several; and the mass."""
    from semblend.materialize.kv.attention_kernels import measure_question_mass

    nothing = torch.zeros(4096, dtype=torch.int64, device=views.device)
    kinds = {(_sees_all(layer), layer.num_heads): number for number, layer in enumerate(layers)}
    for (sees_all, heads), number in kinds.items():
        q = torch.zeros((len(nothing), heads, layers[0].head_size), dtype=views.dtype, device=views.device)
        for count in (2, len(nothing)):
            for parts in (1, 2):
                attend_scattered(nothing[:count], nothing, views, layers, parts)(number, q[:count])
        if sees_all:
            measure_question_mass(q[:2].expand(views.layers, -1, -1, -1).contiguous(), nothing, views)


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
        asked = widen_queries(layer, query, self._pass.layout.dtype).view(-1, layer.num_heads, layer.head_size)
        if self._pass.observer is not None:
            shown = scale_queries(layer, asked)
            self._pass.observer.on_layer(self._number, shown, self._pass.rows, self._pass.layout)
        if self._pass.attend is None:
            found: Tensor = self._impl.forward(layer, query, key, value, cache, metadata, output, **more)
            return found
        return output.view(asked.shape).copy_(self._pass.attend(self._number, asked))


def scale_queries(layer: Any, asked: Tensor) -> Tensor:
    """Queries as observers take them: scores are divided by the root of a head's size, which not every model does."""
    times = float(layer.impl.scale) * math.sqrt(asked.shape[-1])
    return asked if abs(times - 1) < 1e-3 else asked * times


def _make_stand_in(number: int, layer: Any, one_pass: PassAttention) -> Any:
    if isinstance(one_pass.layout, LatentLayout):  # vLLM attends: somebody looks on, or nothing would be replaced
        assert one_pass.observer is not None
        return LatentStandIn(number, layer, one_pass.rows, one_pass.layout, one_pass.observer)
    return _StandIn(number, layer.impl, one_pass)


@contextmanager
def replace_attention(layers: Sequence[torch.nn.Module], one_pass: PassAttention) -> Iterator[None]:
    """Every layer's ``impl`` is a stand-in until the pass is over, however it ends."""
    if one_pass.changes_nothing:
        yield
        return
    kept: list[Any] = [layer.impl for layer in layers]
    try:
        for number, layer in enumerate(layers):
            layer.impl = _make_stand_in(number, layer, one_pass)
        yield
    finally:
        for layer, impl in zip(layers, kept, strict=True):
            layer.impl = impl
