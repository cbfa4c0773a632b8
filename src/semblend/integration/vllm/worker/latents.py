"""Latent attention (MLA) in a pass of ours: a token's one vector as two halves, and which rows attend how.

vLLM attends to latents in two ways. In a prefill it multiplies all latents of the context out into keys and values; in
a decode it multiplies the query instead, and reads the latents as they are. Its builder of metadata chooses by how many
rows a request has. We describe our rows as requests, so all that is ours is how they are cut (`choose_latent_runs`),
and that an observer is shown the query that meets the latents.

Few of vLLM's backends could be tried, so each engine checks its own when it starts (`check_latents`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from semblend.errors import SemBlendError
from semblend.materialize.contract import QUESTION_ROWS, Layout, Observer, Rows
from semblend.materialize.kv.layout import LatentLayout

Runs = Sequence[tuple[int, int]]
SHORT_RUN = 16
"""Rows in a run, on average, below which each row is a request of its own: a run of several has its whole context
multiplied out for it, where a backend takes it for a prefill."""

ROUNDING = 0.05
"""Largest error of attention, of its largest number, that still is rounding; a row more or less in the context of a
row is off by 0.3 and more."""


def keeps_latents(spec: Any) -> bool:
    """Whether a layer's cache holds latents as the model computes them, not a packed form of them."""
    return type(spec).__name__ == "MLAAttentionSpec" and getattr(spec, "state_content_bytes", None) is None


def choose_latent_runs(rows: Rows) -> Runs:
    """The rows as requests: run by run, or row by row where runs are short.

    >>> choose_latent_runs(Rows.of([7, 7, 7], [2, 3, 9], torch.arange(16)))
    ((2, 3), (3, 4), (9, 10))
    """
    if len(rows) >= SHORT_RUN * len(rows.runs):
        return rows.runs
    return tuple((at, at + 1) for at in rows.host_positions.tolist())


def write_halves(layer: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write the halves of vectors, ``[n, 1, head_dim]``, by the backend's own writer."""
    latents, rotated = torch.cat((v, k), dim=-1).tensor_split([layer.kv_lora_rank], dim=-1)
    layer.impl.do_kv_cache_update(
        latents[:, 0].contiguous(), rotated.contiguous(), cache, slots, layer.kv_cache_dtype, layer._k_scale
    )


class LatentStandIn:
    """For one layer in one pass; whatever else vLLM asks of the implementation, the implementation answers."""

    def __init__(self, number: int, layer: Any, rows: Rows, layout: Layout, observer: Observer) -> None:
        self._number, self._layer, self._impl = number, layer, layer.impl
        self._rows, self._layout, self._observer = rows, layout, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl, name)

    def do_kv_cache_update(self, latents: Tensor, rotated: Tensor, *more: Any) -> None:
        v, k = torch.cat((latents[:, None], rotated.view(len(latents), 1, -1)), dim=-1).chunk(2, dim=-1)
        self._observer.before_write(self._number, k, v, self._rows, self._layout)
        self._impl.do_kv_cache_update(latents, rotated, *more)

    def forward_mha(self, q: Tensor, *more: Any, **named: Any) -> Any:
        """The last rows are here, unless all are decoded."""
        mine, turned = q[-QUESTION_ROWS:].tensor_split([self._layer.qk_nope_head_dim], dim=-1)
        self._show((torch.einsum("nhp,hpl->nhl", mine, self._layer.W_UK_T), turned))
        return self._impl.forward_mha(q, *more, **named)

    def forward_mqa(self, q: Tensor | tuple[Tensor, Tensor], cache: Tensor, metadata: Any, layer: Any) -> Any:
        if not metadata.num_prefills:
            self._show(q)
        return self._impl.forward_mqa(q, cache, metadata, layer)

    def _show(self, q: Tensor | tuple[Tensor, ...]) -> None:
        """Queries that meet latents, for an observer that divides their products by the root of their width."""
        parts = q if isinstance(q, tuple) else (q,)
        whole = torch.cat([part[-QUESTION_ROWS:] for part in parts], dim=-1)
        scaled = whole * (self._impl.scale * whole.shape[-1] ** 0.5)
        self._observer.on_layer(self._number, scaled, self._rows, self._layout)


def without_graphs(vllm_config: Any) -> Any:
    """The same settings for a builder whose batches no graph replays: with one they may not be larger than vLLM's."""
    from vllm.config import CUDAGraphMode

    config = copy(vllm_config)
    config.compilation_config = copy(vllm_config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return config


def check_latents(layer: Any, layout: LatentLayout, cache: Tensor, describe: Callable[[Rows], Any]) -> None:
    """Raise where the backend does not attend as we ask it to; ``describe`` makes its metadata. Nothing is kept.

    Rows of our choice attend to vectors drawn at random, as runs and one by one, and so does a plain twin.
    """
    hint = "this engine computes every request itself"
    if getattr(layer, "W_UK_T", None) is None:
        raise SemBlendError("this backend packs the weights of latent attention", hint=hint)
    blocks = -(-200 // layout.block_tokens)
    scratch = torch.empty_strided((blocks, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    places = torch.arange(blocks * layout.block_tokens, device=cache.device)
    context = places.view(blocks, -1).flip(0).flatten()
    generator = torch.Generator(device=cache.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=cache.device).to(cache.dtype)

    vectors = draw(len(context), 1, layer.head_size)
    v, k = vectors.chunk(2, dim=-1)
    write_halves(layer, k, v, scratch, context)
    new, rotated = vectors.tensor_split([layer.kv_lora_rank], dim=-1)
    for at in (places[5::3], places[70:], torch.cat((places[5:6], places[30:]))):
        rows, q = Rows.of(at, at.cpu(), context), draw(len(at), layer.num_heads, layer.qk_head_dim)
        found = q.new_empty(len(at), layer.num_heads * layer.v_head_dim)
        layer.forward_impl(q, new[at, 0], rotated[at], scratch, describe(rows), output=found)
        wanted = attend_plain(layer, q, at, new[:, 0], rotated[:, 0])
        off = float((found.float() - wanted).abs().max() / wanted.abs().max())
        if not off < ROUNDING:
            name = layer.attn_backend.get_name()
            raise SemBlendError(
                f"vLLM's {name} is off by {off:.3g} from a plain twin, for rows of our choice", hint=hint
            )


def attend_plain(layer: Any, q: Tensor, positions: Tensor, latents: Tensor, rotated: Tensor) -> Tensor:
    """The plain twin: ``q[n, heads, d]`` of rows at ``positions`` attend to all up to their own, in float32."""
    both = layer.kv_b_proj(latents.contiguous())[0].view(len(latents), layer.num_heads, -1).float()
    k, v = both.tensor_split([layer.qk_nope_head_dim], dim=-1)
    keys = torch.cat((k, rotated.float()[:, None].expand(-1, layer.num_heads, -1)), dim=-1)
    scores = torch.einsum("nhd,thd->hnt", q.float(), keys) * layer.impl.scale
    ahead = torch.arange(len(latents), device=q.device) > positions[:, None]
    return torch.einsum("hnt,thv->nhv", scores.masked_fill(ahead, -torch.inf).softmax(-1), v).flatten(1)
