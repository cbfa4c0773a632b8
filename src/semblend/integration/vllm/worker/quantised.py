"""A cache of 8-bit floats (fp8): read in the model's own type, and rounded when it is written.

A layer has one scale for its keys and one for its values. Nobody else sees 8 bits: donors, files, rotation, gate and
checks have numbers of the model's type, which hold every 8-bit number times its scale, so that what is copied comes
back byte for byte. We write by ourselves, to the nearest number: vLLM's writer on CPUs cuts off what does not fit, and
a key that is moved would be a little smaller each time.
Nobody has run it on a GPU, so each engine checks its own attention when it starts (`check_quantised`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from semblend.errors import InputError, SemBlendError
from semblend.integration.vllm.worker.cache_layout import Digits, IndexedLayout, StridedLayout, probe_layout
from semblend.materialize.contract import Rows
from semblend.materialize.kv.layout import Layout

NARROW_TYPES = MappingProxyType({"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn})
"""What vLLM calls the types that are served."""
NARROW_LOSS = 2.0
"""So many times as far from cold is an answer over such a cache as over 16 bits (decisions/quality-gate.md)."""
Scales = Callable[[int], tuple[float, float]]
"""By layer: what its keys and its values were divided by before they were rounded to 8 bits."""
ROUNDING = 0.1
"""Largest error of attention, of its largest number, that still is rounding, of a backend that rounds queries and
weights to 8 bits too; a row more or less in the context of a row is off by 0.3 and more."""
_HINT = "this engine computes every request itself"


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedLayout:
    """Caches of 8-bit floats (``narrow``); ``codes`` is where their bytes lie, and ``dtype`` the type that they are
    read in."""

    codes: StridedLayout | IndexedLayout
    narrow: torch.dtype
    dtype: torch.dtype
    scales: Scales

    def __post_init__(self) -> None:
        every = torch.arange(256, dtype=torch.uint8, device=self.device)
        every = every[every.view(self.narrow).float().isfinite()]
        for scale in {scale for layer in range(self.layers) for scale in self.scales(layer)}:
            if not (scale > 0 and torch.equal(self._round(self._widen(every, scale), scale), every)):
                raise InputError(
                    f"a KV cache of {self.narrow} and scale {scale:g} is not held exactly by {self.dtype}",
                    hint="another --dtype or --kv-cache-dtype",
                )

    layers = property(attrgetter("codes.layers"))
    block_tokens = property(attrgetter("codes.block_tokens"))
    slots = property(attrgetter("codes.slots"))
    kv_heads = property(attrgetter("codes.kv_heads"))
    head_dim = property(attrgetter("codes.head_dim"))
    device = property(attrgetter("codes.device"))
    views: ClassVar[None] = None  # our kernels read numbers, and these are codes

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        return self._widen(self.codes.keys(layer, slots), self.scales(layer)[0])

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = map(self._widen, self.codes.gather(layer, slots), self.scales(layer))
        return k, v

    @torch.inference_mode()  # as vLLM writes its caches
    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.codes.scatter(layer, slots, *map(self._round, (k, v), self.scales(layer)))

    def _widen(self, codes: Tensor, scale: float) -> Tensor:
        return (codes.view(self.narrow).float() * scale).to(self.dtype)

    def _round(self, wide: Tensor, scale: float) -> Tensor:
        largest = torch.finfo(self.narrow).max
        return (wide.float() / scale).clamp(-largest, largest).to(self.narrow).view(torch.uint8)


def lay_out_quantised(
    caches: Sequence[Tensor],
    layers: Sequence[Any],
    shape: tuple[int, int, int],
    narrow: torch.dtype,
    dtype: torch.dtype,
) -> QuantisedLayout:
    """Caches of 8-bit floats, one of each of these layers; ``shape`` is that of a block (tokens, heads, dimensions)."""
    write = partial(layers[0].impl.do_kv_cache_update, layers[0])
    digits = Digits(dtype, narrow, read_scales(layers[0]))
    codes = probe_layout([cache.view(torch.uint8) for cache in caches], *shape, write, digits)
    assert isinstance(codes, StridedLayout | IndexedLayout)
    return QuantisedLayout(codes, narrow, dtype, lambda number: read_scales(layers[number]))


def read_scales(layer: Any) -> tuple[float, float]:
    """Of a layer's keys and values; asked for at each use, because vLLM sets them anew with new weights."""
    return float(layer._k_scale_float), float(layer._v_scale_float)


def check_scales(layer: Any) -> None:
    """Raise where a layer has not one scale for its keys and one for its values, the same for all kernels."""
    for scale, held in zip(read_scales(layer), (layer._k_scale, layer._v_scale), strict=True):
        if held.numel() != 1:
            raise SemBlendError("8-bit KV with a scale for each head is not read by our passes", hint=_HINT)
        if abs(float(held) - scale) > 1e-6 * abs(scale):
            raise SemBlendError(f"vLLM holds two scales of a layer's KV, {float(held):g} and {scale:g}", hint=_HINT)


def widen_queries(layer: Any, query: Tensor, dtype: torch.dtype) -> Tensor:
    """Queries as they were before a backend that attends in 8 bits had them rounded."""
    return query if query.dtype.itemsize > 1 else (query.float() * float(layer._q_scale_float)).to(dtype)


def check_quantised(
    layer: Any,
    like: Layout,
    cache: Tensor,
    describe: Callable[[Rows], Any],
    choose: Callable[[Rows, QuantisedLayout], Callable[[int, Tensor], Tensor] | None],
) -> None:
    """Raise where the backend reads other numbers than we do; ``describe`` makes its metadata, and ``choose`` says
    which attention of ours would take its place, if any. Nothing is kept.

    Rows of our choice attend to keys and values drawn at random, as runs and one by one, and so does a plain twin to
    what we read of them. ``cache`` is one of the engine's, and ``like`` the layout of all.
    """
    assert isinstance(like, QuantisedLayout)
    shape, blocks = (like.block_tokens, like.kv_heads, like.head_dim), -(-200 // like.block_tokens)
    scratch = torch.empty_strided((blocks, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    layout = lay_out_quantised([scratch], [layer], shape, like.narrow, like.dtype)
    places = torch.arange(blocks * shape[0], device=cache.device)
    context = places.view(blocks, -1).flip(0).flatten()
    generator = torch.Generator(device=cache.device).manual_seed(0)

    def draw(count: int, heads: int) -> Tensor:
        drawn = torch.randn(count, heads, layer.head_size, generator=generator, device=cache.device)
        return drawn.to(layout.dtype)

    k, v = (draw(len(context), layer.num_kv_heads) for _ in range(2))
    layer.impl.do_kv_cache_update(layer, k, v, scratch, context)
    kept = scratch.clone()
    keys, values = layout.gather(0, context)
    layout.scatter(0, context, keys, values)
    if not torch.equal(kept.view(torch.uint8), scratch.view(torch.uint8)):
        raise SemBlendError("8-bit KV that is copied does not come back as it was", hint=_HINT)
    for at in (places[5::3], places[70:], torch.cat((places[5:6], places[30:]))):
        rows, q = Rows.of(at, at.cpu(), context), draw(len(at), layer.num_heads)
        asked, found = q, torch.empty_like(q)
        if getattr(layer, "query_quant", None) is not None:
            asked = layer.query_quant(q.flatten(1), layer._q_scale)[0].view(q.shape)
        layer.impl.forward(layer, asked, k[at], v[at], scratch, describe(rows), output=found)
        wide = widen_queries(layer, asked, layout.dtype)
        wanted = attend_plain(layer, wide, at, keys, values)
        answers = {f"vLLM's {layer.attn_backend.get_name()}": found}
        if (ours := choose(rows, layout)) is not None:
            answers["our kernel"] = ours(0, wide)
        for name, answer in answers.items():
            off = float((answer.float() - wanted).abs().max() / wanted.abs().max())
            if not off < ROUNDING:
                raise SemBlendError(f"{name} is off by {off:.3g} from a plain twin over 8-bit KV", hint=_HINT)


def attend_plain(layer: Any, q: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The plain twin: ``q[n, heads, d]`` of rows at ``positions`` attend to all up to their own, in float32."""
    group = layer.num_heads // layer.num_kv_heads
    k, v = (part.float().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("nhd,thd->hnt", q.float(), k) * layer.impl.scale
    if cap := getattr(layer.impl, "logits_soft_cap", None):
        scores = torch.tanh(scores / cap) * cap
    ahead = torch.arange(len(k), device=q.device) > positions[:, None]
    scores = scores.masked_fill(ahead, -torch.inf)
    if (sinks := getattr(layer.impl, "sinks", None)) is not None:  # mass that a row has before it sees any key
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1)[..., : len(k)], v)
