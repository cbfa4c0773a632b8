"""Observers of a pass: what the question attends to, and how far donor KV is from what the model computes itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.materialize.contract import QUESTION_ROWS, Layout, Observer, Rows, StopPass
from semblend.materialize.kv.gather import copy_layers
from semblend.materialize.kv.triton_support import has_triton

LOOK_EVERY = 4
"""The deviation of repaired tokens is looked at in every fourth layer: all of them say the same at more cost."""
_LEAST = 1e-6
_SCORES_AT_ONCE = (1 << 26, 1 << 21)  # on a GPU, and on a CPU, where they should stay in the cache


class AttentionMass(Observer):
    """Sums over all layers the attention that the question pays to every position.

    The question is the last unbroken run of computed rows, at most ``most_rows`` of them: what the prompt ends with. It
    is scored after relocation, so positions are the final ones. Reads the last segment of the rows; one sequence only.
    """

    after_pass = True
    reads_weights = True

    def __init__(self, most_rows: int = QUESTION_ROWS) -> None:
        self.most_rows = most_rows
        self._mass: Tensor | None = None
        self._rows: Rows | None = None
        self._asking = 0

    @property
    def mass(self) -> Tensor | None:
        """One number a position; None before the first layer."""
        return self._mass

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Layout) -> None:
        mass = self._start_pass(rows, q.device)
        context = rows.context[: rows.reach]
        if q.device.type == "cuda" and has_triton() and (views := layout.views) is not None:
            from semblend.materialize.kv.mass_kernels import add_question_mass

            add_question_mass(mass, q[-self._asking :], context, views.k[layer])
        else:
            add_attention(mass, q[-self._asking :], layout.keys(layer, context))

    def on_weights(self, weights: Tensor, start: int, rows: Rows) -> None:
        """The same, where attention has computed the weights already: ``[heads, some rows from start on, keys]``."""
        mass = self._start_pass(rows, weights.device)
        heads, count, reach = weights.shape
        before = max(0, len(rows) - self._asking - start)  # rows of this part that do not belong to the question
        if before < count:
            mass[:reach].add_(weights[:, before:].sum((0, 1)), alpha=1 / (self._asking * heads))

    def _start_pass(self, rows: Rows, device: torch.device) -> Tensor:
        if rows is not self._rows or self._mass is None:  # a further part of a pass: the question is in the last
            # From the host's copy: asking a GPU for positions costs a wait.
            self._rows, self._asking = rows, count_question_rows(rows.host_positions, self.most_rows)
            self._mass = torch.zeros(len(rows.context), device=device)
        return self._mass


class LateAttentionMass(AttentionMass):
    """The same, worked out when it is asked for: of a pass only the question's queries are kept."""

    def __init__(self, most_rows: int = QUESTION_ROWS) -> None:
        super().__init__(most_rows)
        self._kept: dict[int, tuple[Tensor, Rows, Layout]] = {}

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Layout) -> None:
        self._kept[layer] = q[-self.most_rows :].clone(), rows, layout

    def on_weights(self, weights: Tensor, start: int, rows: Rows) -> None:
        self._kept = {}  # of an earlier part of the pass
        super().on_weights(weights, start, rows)

    @property
    def mass(self) -> Tensor | None:
        kept, self._kept = self._kept, {}
        for layer, (q, rows, layout) in kept.items():
            super().on_layer(layer, q, rows, layout)
        return super().mass


class KvDeviation(Observer):
    """How far the pool's KV of one layer is from what the model computes for the same rows, then `StopPass`.

    ``relative`` and ``squared`` have one number a row. At layer 1 this is the first layer where a donor's left context
    shows; its inputs are exact, because layer 0 is.
    """

    stops_early: ClassVar[bool] = True

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

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Rows, layout: Layout) -> None:
        if layer < self.layer:
            return
        relative = squared = torch.zeros(len(k), device=k.device)
        for computed, held in zip((k, v), layout.gather(layer, rows.slots), strict=True):
            was = held.float()
            distance = (computed.float() - was).square().sum((1, 2))
            squared = squared + distance
            relative = relative + distance / was.square().sum((1, 2)).clamp_min(1e-6)
        self._relative.append(relative.sqrt())
        self._squared.append(squared)
        raise StopPass


class RepairedDeviation(Observer):
    """How far rows' KV in the pool is from what a pass computes for them, mean of some layers.

    It looks at the pool before the pass and after it, so that a recorded pass serves it too; at all layers at once,
    because a look at each is a dozen launches of its own. Passes on to ``inner`` what that wants to see, so that one
    pass serves both.
    """

    def __init__(self, inner: Observer | None = None) -> None:
        self._inner = Observer() if inner is None else inner
        self._held: tuple[Tensor, Tensor] | None = None
        self._chunks: list[Tensor] = []
        self.reads_weights = self._inner.reads_weights
        self.after_pass = inner is None or inner.after_pass

    def on_begin(self, rows: Rows, layout: Layout) -> None:
        self._held = copy_layers(layout, _list_looked_at(layout), rows.slots)

    def on_end(self, rows: Rows, layout: Layout) -> None:
        held, self._held = self._held, None
        if held is not None and len(looked := _list_looked_at(layout)):
            self._chunks.append(compute_deviation(*copy_layers(layout, looked, rows.slots), held).mean(0))

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Rows, layout: Layout) -> None:
        self._inner.before_write(layer, k, v, rows, layout)

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Layout) -> None:
        self._inner.on_layer(layer, q, rows, layout)

    def on_weights(self, weights: Tensor, start: int, rows: Rows) -> None:
        self._inner.on_weights(weights, start, rows)

    def mean_over(self, at: npt.NDArray[np.bool_], weight: npt.NDArray[np.floating[Any]]) -> float:
        """Mean over the rows that ``at`` marks, by ``weight``."""
        if not self._chunks or not at.any() or not weight.sum() > 0:
            return 0.0
        found = torch.cat(self._chunks).cpu().numpy()[at]
        return float((found * weight).sum() / weight.sum())


def _list_looked_at(layout: Layout) -> range:
    """The layers that are looked at."""
    return range(LOOK_EVERY // 2, layout.layers, LOOK_EVERY)


def compute_deviation(k: Tensor, v: Tensor, held: tuple[Tensor, Tensor]) -> Tensor:
    """Of each row, K and V together: root of the sum of their relative squared distances from ``held``; at most 2.

    All are ``[..., kv_heads, head_dim]``.
    """
    total = torch.zeros(k.shape[:-2], device=k.device)
    for computed, before in zip((k, v), held, strict=True):
        was = before.float()
        total += (computed.float() - was).square().sum((-2, -1)) / was.square().sum((-2, -1)).clamp_min(_LEAST)
    return total.clamp_max(4.0).sqrt()


def count_question_rows(positions: Tensor, most: int = QUESTION_ROWS) -> int:
    """How many rows at the end form one unbroken run, at most ``most``.

    >>> count_question_rows(torch.tensor([0, 1, 5, 7, 8, 9]))
    3
    """
    tail = positions[-most - 1 :].cpu()
    breaks = (tail[1:] - tail[:-1] != 1).nonzero()
    return min(most, len(tail) - (int(breaks[-1]) + 1 if len(breaks) else 0))


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
