"""Observers of a pass: what the question attends to, and how far donor KV is from what the model computes itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.materialize.contract import QUESTION_ROWS, Layout, Model, Observer, Rows, StopPass
from semblend.materialize.kv.layout import KvLayout, copy_to_device
from semblend.materialize.kv.rope import RopeSpec
from semblend.materialize.kv.splice import copy_layers, has_triton
from semblend.plan.selection import Positions

LOOK_EVERY = 4
"""The deviation of repaired tokens is looked at in every fourth layer: all of them say the same at more cost."""
_LEAST = 1e-6
_SCORES_AT_ONCE = (1 << 26, 1 << 21)  # on a GPU, and on a CPU, where they should stay in the cache


class AttentionMass(Observer):
    """The attention that the question pays to every position, summed over all layers but those ``beside``.

    Those have a sliding window: there the question attends to itself and to what stands right before it, which says
    nothing about the spans further ahead, and would drown what the full layers say of them. The question is the last
    unbroken run of computed rows, at most ``most_rows`` of them: what the prompt ends with. It is scored after
    relocation, so positions are the final ones. Of a pass its queries are kept; the rest is worked out when ``mass`` is
    asked for, of all layers at once, while their KV is still there. One sequence only.
    """

    after_pass = True
    reads_weights = True

    def __init__(self, most_rows: int = QUESTION_ROWS, beside: Collection[int] = ()) -> None:
        self.most_rows, self.beside = most_rows, beside
        self._mass: Tensor | None = None
        self._rows: Rows | None = None
        self._asking = 0
        self._queries: dict[int, Tensor] = {}
        self._layout: Layout | None = None

    @property
    def mass(self) -> Tensor | None:
        """One number a position; None before the first layer."""
        kept, self._queries = self._queries, {}
        if self._rows is not None and self._layout is not None:
            for shape in dict.fromkeys(q.shape for q in kept.values()):  # layers may have more heads than others
                alike = [layer for layer in sorted(kept) if kept[layer].shape == shape]
                self._add(torch.stack([kept[layer] for layer in alike]), alike, self._rows, self._layout)
        return self._mass

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Layout) -> None:
        self._start_pass(rows, q.device)
        self._layout = layout
        if layer not in self.beside:
            self._queries[layer] = q[-self._asking :].clone()

    def on_queries(self, q: Tensor, rows: Rows, layout: Layout) -> None:
        self._start_pass(rows, q.device)
        kept = [layer for layer in range(len(q)) if layer not in self.beside]
        self._queries, self._layout = dict(zip(kept, q[kept, -self._asking :].clone(), strict=True)), layout

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
            self._mass, self._queries = torch.zeros(len(rows.context), device=device), {}
        return self._mass

    @torch.inference_mode()
    def _add(self, q: Tensor, layers: Sequence[int], rows: Rows, layout: Layout) -> None:
        mass, context = self._start_pass(rows, q.device), rows.context[: rows.reach]
        views = layout.views if q.shape[-1] == layout.head_dim else None  # else the queries are of whole latents
        if q.device.type == "cuda" and has_triton() and views is not None:
            from semblend.materialize.kv.attention_kernels import measure_question_mass

            if len(layers) < layout.layers:
                views = KvLayout(*(tuple(pages[layer] for layer in layers) for pages in (views.k, views.v)))
            mass[: len(context)] += measure_question_mass(q, context, views)
            return
        for layer, queries in zip(layers, q, strict=True):
            add_attention(mass, queries, layout.keys(layer, context))


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

    def on_queries(self, q: Tensor, rows: Rows, layout: Layout) -> None:
        self._inner.on_queries(q, rows, layout)

    def on_weights(self, weights: Tensor, start: int, rows: Rows) -> None:
        self._inner.on_weights(weights, start, rows)

    def mean_over(self, at: npt.NDArray[np.bool_], weight: npt.NDArray[np.floating[Any]]) -> float:
        """Mean over the rows that ``at`` marks, by ``weight``; no number where all weigh nothing."""
        if not self._chunks or not at.any():
            return 0.0
        if not weight.sum() > 0:
            return math.nan
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


# -- The canary: on a sample of positions, is the KV in the cache what its tokens and positions ask for?
#
# layer 0       depends on token and position alone. Computing it again for a few rows tells a wrong block or a wrong
#               shift from a right one, for less than a thousandth of a prefill
# deep layers   depend on the text in front, which is another than the donor's, so they differ where nothing is wrong.
#               A few rows inside the spans are computed with the first pass and compared with what lay there
#               (`DeepLook`): donor KV of another text, of another layer, moved or empty is further off than that


CANARY_TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.005}
)
"""Largest relative error of a layer-0 key or value that still is rounding; measured, see decisions/quality-gate.md."""
LATENT_TIMES = 2.0
"""So many times that for latents. A compiled step rounds less often than our look does, which is much in tiny pairs,
and of a latent only 32 pairs rotate: on an H200 the worst of 160 rows was 0.0205 off, 0.0046 without compiling."""
EIGHT_BIT_TOLERANCE = 0.09
"""The same where donors are held at 8 bits; measured, see decisions/moving-kv.md."""
NARROW_TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType({torch.float8_e4m3fn: 0.12})
"""The same where the engine's cache holds 8-bit floats; measured, see decisions/quality-gate.md."""

DEEP_TOLERANCE = 1.1
"""Largest deviation of deep layers that still is another text in front; measured, see docs/research/robustness.md."""
_CHECK_EVERY = 16
DEEP_ROWS = 32
"""So many rows of a prompt are computed to be compared, at most; eight of each donor where there are more than four."""
_WINDOW_ROWS = 8
"""So many rows, next to each other in the sample, are judged together: a single odd token does not decide."""


def find_tolerance(
    dtype: torch.dtype, donor_bits: int = 16, *, latents: bool = False, narrow: torch.dtype | None = None
) -> float:
    """The canary's tolerance for KV of a type from donors that are held at so many bits.

    ``narrow``: the type of 8 bits that it has in the engine's cache.

    >>> find_tolerance(torch.bfloat16), find_tolerance(torch.bfloat16, 8) == EIGHT_BIT_TOLERANCE
    (0.02, True)
    """
    rounding = CANARY_TOLERANCE[dtype] * (LATENT_TIMES if latents else 1.0)
    packed = EIGHT_BIT_TOLERANCE if donor_bits == 8 else 0.0
    return max(rounding, packed, NARROW_TOLERANCE[narrow] if narrow else 0.0)


class Canary(Observer):
    """Compares layer-0 KV with what is in the pool, writes nothing, and ends the pass; ``found``: an error a row."""

    stops_early: ClassVar[bool] = True
    records: ClassVar[bool] = True

    def __init__(self, rope: RopeSpec) -> None:
        self._rope = rope.of_layer(0)
        self.found = torch.empty(0)

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Rows, layout: Layout) -> None:
        held_k, held_v = (part.float() for part in layout.gather(layer, rows.slots))
        pairs = (_pairs(part, self._rope) for part in (k.float(), held_k))
        # Of latents, what lies in front of the rotated dimensions is compared as values are: among so many pairs that
        # do not rotate, a wrong shift would be half as large.
        flat = slice(self._rope.rotary_start)
        whole = (torch.cat((a[..., flat], b), -1) for a, b in ((k.float(), v.float()), (held_k, held_v)))
        self.found = torch.maximum(_pair_error(*pairs), _error(*whole))
        raise StopPass


class DeepLook(Observer):
    """How far donor KV is, in all layers, from what a pass computes for the same rows.

    ``at``: the rows that are judged. ``heads``: more rows of the pass, by which is seen how much rows of a layer differ
    from each other; what they have in common, such as a large key bias, says nothing. It looks before the pass and
    after it, once for all layers, and waits for nothing.
    """

    def __init__(self, at: Positions, heads: Positions) -> None:
        self.at = at
        self._shown = np.union1d(at, heads[:: max(1, len(heads) // DEEP_ROWS)])
        self._slots: Tensor | None = None
        self._before: list[tuple[Tensor, Tensor]] = []
        self._after: list[tuple[Tensor, Tensor]] = []

    def on_begin(self, rows: Rows, layout: Layout) -> None:
        positions = rows.host_positions.numpy()
        first, end = np.searchsorted(self._shown, (positions[0], positions[-1] + 1))
        chosen = np.searchsorted(positions, self._shown[first:end])  # each is one of the rows
        self._slots = rows.slots[copy_to_device(torch.from_numpy(chosen), rows.slots.device)] if len(chosen) else None
        if self._slots is not None:
            self._before.append(copy_layers(layout, range(layout.layers), self._slots))

    def on_end(self, rows: Rows, layout: Layout) -> None:  # noqa: ARG002  (those of `on_begin`)
        if self._slots is not None:
            self._after.append(copy_layers(layout, range(layout.layers), self._slots))

    def compare(self) -> Tensor:
        """The deviation of the rows ``at`` in every layer, ``[2, layers, rows]``: of keys, and of values."""
        judged = torch.from_numpy(np.flatnonzero(np.isin(self._shown, self.at)))
        found = []
        for before, after in zip(zip(*self._before, strict=True), zip(*self._after, strict=True), strict=True):
            held, computed = torch.cat(before, 1).float(), torch.cat(after, 1).float()
            spread = (computed - computed.mean(1, keepdim=True)).square().sum((2, 3)).mean(1, keepdim=True)
            off = (computed - held).square().sum((2, 3)) / spread.clamp_min(1e-30)
            found.append(off.sqrt()[:, copy_to_device(judged, off.device)])
        return torch.stack(found)


def find_deep_deviation(off: Tensor, windows: Sequence[Positions]) -> Tensor:
    """The largest over keys, values, layers and windows of the median of a window's rows; not a number counts as most.

    >>> off = torch.zeros(2, 3, 16)
    >>> off[1, 2, 3] = 9.0  # one odd token
    >>> float(find_deep_deviation(off, cut_windows([np.arange(16)])))
    0.0
    >>> off[1, 2, 8:] = 1.0  # the second half of one layer's values
    >>> float(find_deep_deviation(off, cut_windows([np.arange(16)])))
    1.0
    """
    off = off.nan_to_num(nan=torch.inf)
    rows = [copy_to_device(torch.from_numpy(window), off.device) for window in windows]
    return torch.stack([off[..., window].median(-1).values.max() for window in rows]).max()


def cut_windows(groups: Sequence[Positions]) -> list[Positions]:
    """Rows of the sample, those of one donor a group, in windows of about eight; groups of fewer rows are joined."""
    few = [group for group in groups if len(group) < _WINDOW_ROWS]
    many = [group for group in groups if len(group) >= _WINDOW_ROWS]
    joined = [np.sort(np.concatenate(few))] if few and sum(map(len, few)) else []
    return [
        window for group in (*many, *joined) for window in np.array_split(group, max(1, len(group) // _WINDOW_ROWS))
    ]


def choose_deep_rows(reused: Positions, *, most: int = DEEP_ROWS, seed: int = 0) -> Positions:
    """Of positions that would keep a donor's KV, those that are computed to be compared, spread over all of them.

    One in 16, at most ``most``; of a few hundred tokens eight, so that a median means something. None of fewer than 16.

    >>> [len(choose_deep_rows(np.arange(count))) for count in (5000, 100, 9)]
    [32, 8, 0]
    """
    if len(reused) < _CHECK_EVERY:
        return reused[:0]
    count = min(max(most, _WINDOW_ROWS), max(len(reused) // _CHECK_EVERY, min(_WINDOW_ROWS, len(reused) // 4)))
    parts = np.array_split(reused, count)  # other tokens with every request
    draw = np.random.default_rng(seed).random(count)
    return np.array([part[int(share * len(part))] for part, share in zip(parts, draw, strict=True)], dtype=np.int64)


def measure_rows(model: Model, rows: Rows) -> Tensor:
    """Relative error of the layer-0 K and V that lie in the pool, for each of these rows; may be NaN.

    Keys are compared pair by pair, each pair weighing the same: models with a large key bias would otherwise drown a
    wrong token in what all tokens share. Values are compared as a whole. Nobody has waited for the device yet.
    """
    look = Canary(model.rope)
    try:
        model.forward(rows, look)
    except StopPass:
        pass
    return look.found


def measure_canary(model: Model, rows: Rows) -> Tensor:
    """The largest of `measure_rows`; 0 for no rows."""
    return find_largest(measure_rows(model, rows))


def find_largest(errors: Tensor) -> Tensor:
    """The largest error, on the device; 0 for none."""
    return errors.max() if errors.numel() else torch.zeros(())


def canary_positions(starts: Tensor, ends: Tensor, *, seed: int = 0) -> Tensor:
    """One position in every 16-token block of each span, and both ends of each span; ascending.

    Layer-0 KV of so many rows costs less than a thousandth of a prefill, and no whole block escapes it.

    >>> {int(p) // 16 for p in canary_positions(torch.tensor([10]), torch.tensor([60]))} == {0, 1, 2, 3}
    True
    """
    generator, chosen = np.random.default_rng(seed), [starts.numpy(), ends.numpy() - 1]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        blocks = np.arange(start // _CHECK_EVERY, -(-end // _CHECK_EVERY)) * _CHECK_EVERY
        chosen.append(np.clip(blocks + generator.integers(0, _CHECK_EVERY, len(blocks)), start, end - 1))
    return torch.from_numpy(np.unique(np.concatenate(chosen)))


def _pairs(x: Tensor, rope: RopeSpec) -> Tensor:
    """``[n, heads, head_dim] -> [n, heads, pairs, 2]``: the dimensions that rotate together."""
    turned, rest, lead = x[..., rope.rotated], x[..., rope.rotated.stop :], x.shape[:-1]
    paired = turned.reshape(*lead, 2, -1).transpose(-1, -2) if rope.style == "half" else turned.reshape(*lead, -1, 2)
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
