"""What can be seen of a request's quality while it is being prepared.

Observers look on while the model computes rows: how much the question attends to each position, how far donor KV is
from what the model computes itself. The canary recomputes layer-0 KV, which depends on token and position alone, and so
tells a wrong block or a wrong shift from a right one. `next_token_kl` compares two answers to "what comes next".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from semblend.materialize.kv.layout import KvLayout
from semblend.materialize.kv.splice import triton_is_here

QUESTION_ROWS = 64
UNBOUNDED_RISK = 1e6
"""Stands for a risk that is not a number: logits with NaN or infinities must never pass a gate."""

CANARY_TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.005}
)
"""Largest relative error of a layer-0 key or value that still is rounding; measured, see decision 0021."""

_CHECK_EVERY = 16
_SCORES_AT_ONCE = (1 << 26, 1 << 21)  # on a GPU, and on a CPU, where they should stay in the cache


class Observer(Protocol):
    """Called by the model for every layer of a pass; ``k``, ``v``, ``q`` are [rows, heads, head_dim], rotated.

    One that will raise `Enough` says so by an attribute ``ends_early``: an engine need not use a compiled model then.
    One to whom it is all the same whether a layer is shown in the pass or when it is over says ``looks_after``.
    """

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Any, pool: Any) -> None:
        """The rows' K and V are computed; the pool still holds what was there before."""

    def on_layer(self, layer: int, q: Tensor, rows: Any, pool: Any) -> None:
        """The rows' K and V are in the pool; attention comes next.

        An observer of attention weights may have a method ``on_weights`` too, see `AttentionMass`: it is called in
        place of this one, once or more a layer, where the weights of all rows are computed in any case.
        """


class Model(Protocol):
    """What we ask of a model: run rows through all layers into the pool, and turn hidden states into logits."""

    @property
    def spec(self) -> Any: ...

    def forward(self, rows: Any, pool: Any, observer: Any = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


RowsOf = Callable[[Tensor, Tensor, Tensor], Any]
"""``(tokens, positions, context) -> rows`` of one sequence whose position p lies in slot ``context[p]``."""


class Enough(Exception):  # noqa: N818  (it ends a pass early; nothing went wrong)
    """Raised by an observer that has seen what it came for: the layers above need not be computed."""


class AttentionMass:
    """Sums over all layers the attention that the question pays to every position.

    The question is the last unbroken run of computed rows, at most ``most_rows`` of them: what the prompt ends with. It
    is scored after relocation, so positions are the final ones. Reads the last segment of the rows; one sequence only.
    """

    looks_after = True

    def __init__(self, most_rows: int = QUESTION_ROWS) -> None:
        self.most_rows = most_rows
        self._mass: Tensor | None = None
        self._rows: Any = None
        self._asking = 0

    @property
    def mass(self) -> Tensor | None:
        """One number a position; None before the first layer."""
        return self._mass

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Any, pool: Any) -> None:
        """Nothing to see yet."""

    def on_layer(self, layer: int, q: Tensor, rows: Any, pool: Any) -> None:
        mass = self._begun(rows, q.device)
        extent = rows.extents[-1]
        context = rows.segments[-1].context[: extent.reach]
        if q.device.type == "cuda" and triton_is_here() and (pages := _pages(pool, layer)) is not None:
            from semblend.materialize.kv.mass_kernels import add_question_mass

            add_question_mass(mass, q[-self._asking :], context, pages)
        elif extent.slots_from is None:
            add_attention(mass, q[-self._asking :], pool.k[layer].index_select(0, context))
        else:
            keys = pool.k[layer, extent.slots_from : extent.slots_from + extent.reach]
            add_attention(mass, q[-self._asking :], keys)

    def on_weights(self, weights: Tensor, start: int, rows: Any) -> None:
        """The same, where attention has computed the weights already: ``[heads, some rows from start on, keys]``."""
        mass = self._begun(rows, weights.device)
        heads, count, reach = weights.shape
        before = max(0, len(rows) - self._asking - start)  # rows of this part that do not belong to the question
        if before < count:
            mass[:reach].add_(weights[:, before:].sum((0, 1)), alpha=1 / (self._asking * heads))

    def _begun(self, rows: Any, device: torch.device) -> Tensor:
        if rows is not self._rows or self._mass is None:  # a further part of a pass: the question is in the last
            # From the host's copy: asking a GPU for positions costs a wait.
            self._rows, self._asking = rows, question_rows(rows.host_positions, self.most_rows)
            self._mass = torch.zeros(len(rows.segments[-1].context), device=device)
        return self._mass


class LaterMass(AttentionMass):
    """The same, worked out when it is asked for: of a pass only the question's queries are kept."""

    def __init__(self, most_rows: int = QUESTION_ROWS) -> None:
        super().__init__(most_rows)
        self._kept: dict[int, tuple[Tensor, Any, Any]] = {}

    def on_layer(self, layer: int, q: Tensor, rows: Any, pool: Any) -> None:
        self._kept[layer] = q[-self.most_rows :].clone(), rows, pool

    def on_weights(self, weights: Tensor, start: int, rows: Any) -> None:
        self._kept = {}  # of an earlier part of the pass
        super().on_weights(weights, start, rows)

    @property
    def mass(self) -> Tensor | None:
        kept, self._kept = self._kept, {}
        for layer, (q, rows, pool) in kept.items():
            super().on_layer(layer, q, rows, pool)
        return super().mass


class KvDeviation:
    """How far the pool's KV of one layer is from what the model computes for the same rows, then `Enough`.

    ``relative`` and ``squared`` have one number a row. At layer 1 this is the first layer where a donor's left context
    shows; its inputs are exact, because layer 0 is.
    """

    ends_early = True

    def __init__(self, layer: int = 1) -> None:
        self.layer = layer
        self._relative: list[Tensor] = []
        self._squared: list[Tensor] = []

    @property
    def relative(self) -> Tensor:
        """Square root of the sum of the relative squared errors of K and V."""
        return torch.cat(self._relative)

    @property
    def squared(self) -> Tensor:
        """Squared distance of K and V together, as CacheBlend ranks it."""
        return torch.cat(self._squared)

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Any, pool: Any) -> None:
        if layer < self.layer:
            return
        relative = squared = torch.zeros(len(k), device=k.device)
        for computed, held in ((k, pool.k[layer]), (v, pool.v[layer])):
            was = held.index_select(0, rows.slots).float()
            distance = (computed.float() - was).square().sum((1, 2))
            squared = squared + distance
            relative = relative + distance / was.square().sum((1, 2)).clamp_min(1e-6)
        self._relative.append(relative.sqrt())
        self._squared.append(squared)
        raise Enough

    def on_layer(self, layer: int, q: Tensor, rows: Any, pool: Any) -> None:
        """Nothing more to see."""


class _Canary:
    """Compares layer-0 KV with what is in the pool, writes nothing, and ends the pass."""

    ends_early = True

    def __init__(self, style: str, rotary_dim: int) -> None:
        self.style, self.rotary_dim = style, rotary_dim
        self.error = torch.empty(0)

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Any, pool: Any) -> None:
        held_k, held_v = (part[layer].index_select(0, rows.slots).float() for part in (pool.k, pool.v))
        pairs = (_pairs(part, self.style, self.rotary_dim) for part in (k.float(), held_k))
        self.error = torch.maximum(_pair_error(*pairs), _error(v.float(), held_v))
        raise Enough

    def on_layer(self, layer: int, q: Tensor, rows: Any, pool: Any) -> None:
        """Never reached."""


def canary(model: Model, pool: Any, rows: Any) -> Tensor:
    """Largest relative error of the layer-0 K and V that lie in the pool for these rows; a number that may be NaN.

    Keys are compared pair by pair, each pair weighing the same: models with a large key bias would otherwise drown a
    wrong token in what all tokens share. Values are compared as a whole. Nobody has waited for the device yet.
    """
    rope = model.spec.rope
    look = _Canary(rope.style, rope.rotary_dim)
    try:
        model.forward(rows, pool, look)
    except Enough:
        pass
    return look.error.max() if look.error.numel() else torch.zeros(())


def bounded(risk: float) -> float:
    """The same, or `UNBOUNDED_RISK` for what is not a number."""
    return risk if math.isfinite(risk) else UNBOUNDED_RISK


def canary_positions(starts: Tensor, ends: Tensor, *, seed: int = 0) -> Tensor:
    """One position in every 16-token block of each span, and both ends of each span; ascending.

    Layer-0 KV of so many rows costs less than a thousandth of a prefill, and no whole block escapes it.

    >>> {int(p) // 16 for p in canary_positions(torch.tensor([10]), torch.tensor([60]))} == {0, 1, 2, 3}
    True
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = [starts, ends - 1]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        blocks = torch.arange(start // _CHECK_EVERY, -(-end // _CHECK_EVERY)) * _CHECK_EVERY
        drawn = blocks + torch.randint(0, _CHECK_EVERY, blocks.shape, generator=generator)
        chosen.append(drawn.clamp(start, end - 1))
    return torch.from_numpy(np.unique(torch.cat(chosen).numpy()))


def question_rows(positions: Tensor, most: int = QUESTION_ROWS) -> int:
    """How many rows at the end form one unbroken run, at most ``most``.

    >>> question_rows(torch.tensor([0, 1, 5, 7, 8, 9]))
    3
    """
    tail = positions[-most - 1 :].cpu()
    breaks = (tail[1:] - tail[:-1] != 1).nonzero()
    return min(most, len(tail) - (int(breaks[-1]) + 1 if len(breaks) else 0))


def next_token_kl(now: Tensor, before: Tensor) -> float:
    """KL divergence in nats of the next-token distribution ``now`` from ``before``, both logits of one row.

    >>> next_token_kl(torch.tensor([1., 2.]), torch.tensor([2., 3.]))
    0.0
    >>> next_token_kl(torch.tensor([1., float("nan")]), torch.tensor([2., 3.])) == UNBOUNDED_RISK
    True
    """
    p, q = (logits.reshape(-1).double().log_softmax(-1) for logits in (now, before))
    risk = float(torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum())
    return max(0.0, bounded(risk))


def _pages(pool: Any, layer: int) -> Tensor | None:
    """A layer's keys as kernels read them; None where only their owner can."""
    layout = getattr(pool, "layout", None)
    if layout is None:
        found: Tensor = pool.k[layer]
        return found
    return layout.k[layer] if type(layout) is KvLayout else None


def add_attention(total: Tensor, q: Tensor, k: Tensor) -> None:
    """Adds to ``total`` the mean over rows and heads of the attention that ``q`` pays to every key; it sums to 1.

    ``q[n, heads, d]`` are the last n positions of ``k[t, kv_heads, d]``: all rows see all keys before them, and only
    the square of the rows themselves needs a mask. Weights are float32 whatever the dtype.
    """
    rows, heads, head_dim = q.shape
    kv_heads, scale = k.shape[1], head_dim**-0.5
    exact = q.dtype == torch.float32  # in half precision a scaled query would be rounded once more
    asked = (q * scale if exact else q).view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    keys = k.permute(1, 2, 0)
    step = max(1, _SCORES_AT_ONCE[q.device.type == "cpu"] // (heads * len(k)))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        reach = len(k) - rows + start + count
        part = asked[:, :, start : start + count].reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(part, keys[..., :reach])
        if not exact:
            scores = scores.float().mul_(scale)
        square = scores.view(heads, count, reach)[..., -count:]
        square += _ahead(count, q.device)
        total[:reach].add_(scores.softmax(-1).sum((0, 1)), alpha=1 / (rows * heads))


@lru_cache(maxsize=16)
def _ahead(count: int, device: torch.device) -> Tensor:
    """Minus infinity where a row would look ahead of itself, ``[count, count]``; the same in every layer."""
    return torch.full((count, count), -torch.inf, device=device).triu_(1)


def _pairs(x: Tensor, style: str, rotary_dim: int) -> Tensor:
    """``[n, heads, head_dim] -> [n, heads, pairs, 2]``: the dimensions that rotate together."""
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    lead = x.shape[:-1]
    paired = turned.reshape(*lead, 2, -1).transpose(-1, -2) if style == "half" else turned.reshape(*lead, -1, 2)
    return torch.cat((paired, rest.reshape(*lead, -1, 2)), dim=-2)


def _pair_error(computed: Tensor, held: Tensor) -> Tensor:
    """Root mean square over all pairs of a row of their relative errors; tiny pairs count relative to their head."""
    size = computed.square().sum(-1).sqrt()
    floor = 0.05 * size.square().mean(-1, keepdim=True).sqrt()
    relative = (computed - held).square().sum(-1).sqrt() / torch.maximum(size, floor).clamp_min(1e-30)
    return relative.square().mean((1, 2)).sqrt()


def _error(computed: Tensor, held: Tensor) -> Tensor:
    size = computed.square().sum((1, 2)).sqrt().clamp_min(1e-30)
    return (computed - held).square().sum((1, 2)).sqrt() / size
