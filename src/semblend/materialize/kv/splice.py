"""Splice: donor KV becomes KV of another prompt. Gather the donor's rows, turn the keys by the shift, scatter.

All moves of a request go in one call. On a GPU that is one kernel launch over layers x tokens x heads
(``kernels.splice_moves``), elsewhere ``splice_plain``, which is also the specification. ``splice`` is the only door:
it refuses what does not fit before a byte is written, so that a bad plan costs a prefill and nothing else. ``gather``
is the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.kv.layout import Layout, UnlikeLayout, fold, unfold
from semblend.materialize.kv.moves import SCALES, DonorTensors, Move, pack, packed_shapes
from semblend.materialize.kv.rope import RopeSpec


@cache
def has_triton() -> bool:
    """Whether triton is installed; without it the plain twins run."""
    return find_spec("triton") is not None


GROUP_TOKENS = max(scales.group_tokens for scales in SCALES.values())
"""Rows of a donor at 8 bits are staged from a multiple of this on, so that groups of tokens stay whole."""


def splice(moves: Sequence[Move], layout: Layout, rope: RopeSpec, *, check_slots: bool = True) -> int:
    """Carries out the moves in every layer and returns how many tokens were written.

    ``check_slots=False`` skips reading slot numbers back from a GPU (one wait); the caller then vouches for them.
    """
    check_moves(moves, layout, rope, check_slots=check_slots)
    moves = [_match_rotation(move, rope, layout.dtype) for move in moves if move.length]
    if moves:
        if layout.device.type == "cuda" and has_triton() and (views := layout.views) is not None:
            from semblend.materialize.kv.kernels import splice_moves

            staged = [stage_on_device(move, layout.device) for move in moves]
            for packed in (False, True):  # one launch for each kind of donor that there is
                if alike := [move for move in staged if move.donor.packed == packed]:
                    splice_moves(alike, views, rope)
        else:
            splice_plain(moves, layout, rope)
    return sum(move.length for move in moves)


def splice_plain(moves: Sequence[Move], layout: Layout, rope: RopeSpec) -> None:
    """The plain twin: layer by layer, so that the keys in wide precision never exist all at once."""
    for move in moves:
        rows = slice(move.donor_start, move.donor_start + move.length)
        for layer in range(layout.layers):
            held = (move.donor.read_rows(name, layer, rows).to(layout.device) for name in ("k", "v"))
            k, v = (unfold(layout, layer, part) for part in held)
            moved = rope.of_layer(layer).relocate(k, move.shift)
            layout.scatter(layer, move.target_slots, moved.to(layout.dtype), v.to(layout.dtype))


def _match_rotation(move: Move, rope: RopeSpec, dtype: torch.dtype) -> Move:
    """The same move with keys in the target's rotation, where the donor's frequencies are others.

    Dynamic scaling slows all frequencies once a prompt is longer than the model was trained for, so two long prompts
    rotate differently. Row i of a donor stands at position i and has turned by ``i * theirs``; turning it further by
    ``i * (ours - theirs)`` gives the key that our frequencies have there. Costs a copy of the rows that move.
    """
    theirs = move.rope
    if theirs is None or theirs.inv_freq == rope.inv_freq:
        return move
    rows = slice(move.donor_start, move.donor_start + move.length)
    difference = replace(
        rope, inv_freq=tuple(ours - other for ours, other in zip(rope.inv_freq, theirs.inv_freq, strict=True))
    )
    at = torch.arange(rows.start, rows.stop, device=move.donor.k.device)[:, None]
    layers = range(move.donor.k.shape[0])
    keys = torch.stack([difference.relocate(move.donor.read_rows("k", n, rows), at).to(dtype) for n in layers])
    values = torch.stack([move.donor.read_rows("v", n, rows).to(dtype) for n in layers])
    return Move(DonorTensors(keys, values), 0, move.length, move.target_slots, move.shift, rope)


def stage_on_device(move: Move, device: torch.device) -> Move:
    """The same move with the donor's rows on ``device``, token rows adjacent, keys and values alike in strides.

    A donor in host memory is copied layer by layer: each piece is contiguous there, so a pinned one goes by DMA. One at
    8 bits travels so, from the beginning of a group of tokens that share scales.
    """
    k, v = move.donor.k, move.donor.v
    row = (k.shape[2] * k.shape[3], k.shape[3], 1)
    scales = [part for name, part in move.donor.parts.items() if name.endswith("_scale")]
    there = all(part.device == device for part in (k, v, *scales)) and all(part.is_contiguous() for part in scales)
    if there and k.stride()[1:] == row and k.stride() == v.stride():
        return move
    first = move.donor_start - move.donor_start % GROUP_TOKENS if move.donor.packed else move.donor_start
    end = move.donor_start + move.length
    staged = {}
    for name, source in move.donor.parts.items():
        group = SCALES[name[0]].group_tokens if name.endswith("_scale") else 1
        rows = slice(first // group, -(-end // group))
        staged[name] = torch.empty(
            (source.shape[0], rows.stop - rows.start, *source.shape[2:]), dtype=source.dtype, device=device
        )
        for layer in range(source.shape[0]):
            staged[name][layer].copy_(source[layer, rows], non_blocking=True)
    donor = DonorTensors.of_parts(staged)
    return Move(donor, move.donor_start - first, move.length, move.target_slots, move.shift, move.rope)


def check_moves(moves: Sequence[Move], layout: Layout, rope: RopeSpec, *, check_slots: bool = True) -> None:
    """Refuses, before anything is written, moves that do not fit the layout, the donors or the rotation."""
    parts = layout.parts if isinstance(layout, UnlikeLayout) else ((layout, 0),)
    sizes = tuple(part.head_dim for part, _ in parts)
    if sizes != (rope.sizes or (rope.head_dim,) * len(sizes)):
        raise InputError(
            f"the rotation is for heads of {rope.sizes or rope.head_dim} dimensions, the pool has {sizes}",
            hint="take both from one model",
        )
    if rope.layer_kinds and len(rope.layer_kinds) != layout.layers:
        raise InputError(
            f"the rotation is for {len(rope.layer_kinds)} layers, the pool has {layout.layers}",
            hint="take both from one model",
        )
    for donor in {id(move.donor): move.donor for move in moves}.values():
        _check_donor(donor, layout)
    for move in moves:
        _check_move(move)
        if reason := _cannot_follow(rope, move.rope):
            raise InputError(f"the donor cannot be moved: {reason}", hint="prefill these tokens instead")
    if check_slots and moves:
        slots = torch.cat([move.target_slots.to(layout.device) for move in moves])
        if slots.numel():
            low, high = torch.stack(slots.aminmax()).tolist()
            if low < 0 or high >= layout.slots:
                raise InputError(f"target slots {low}..{high} of {layout.slots}", hint="slots are rows of the pool")


def _cannot_follow(rope: RopeSpec, donor: RopeSpec | None) -> str | None:
    """Two dynamic rotations of one model may differ in their frequencies, and in nothing else."""
    if donor is not None and rope.dynamic and donor.dynamic and len(donor.inv_freq) == len(rope.inv_freq):
        donor = replace(donor, inv_freq=rope.inv_freq)
    return rope.cannot_follow(donor)


def _check_donor(donor: DonorTensors, layout: Layout) -> None:
    k, v = donor.k, donor.v
    if k.dim() != 4 or k.shape != v.shape:
        raise InputError(
            f"donor keys {list(k.shape)} and values {list(v.shape)}",
            hint="both are [layers, n, kv_heads, head_dim]",
        )
    fits = (k.shape[0], *k.shape[2:]) == (layout.layers, layout.kv_heads, layout.head_dim)
    if not fits or not _has_types(donor, layout):
        raise InputError(
            f"donor KV {list(k.shape)} {k.dtype} does not fit {layout!r}", hint="is the donor of the same model?"
        )


def _has_types(donor: DonorTensors, layout: Layout) -> bool:
    if donor.k_scale is None and donor.v_scale is None:
        return donor.k.dtype == donor.v.dtype == layout.dtype
    wanted = packed_shapes(*donor.k.shape)
    return {name: (tuple(part.shape), part.dtype) for name, part in donor.parts.items()} == wanted


def _check_move(move: Move) -> None:
    held, slots = move.donor.k.shape[1], move.target_slots
    if move.donor_start < 0 or move.length < 0 or move.donor_start + move.length > held:
        raise InputError(
            f"donor tokens {move.donor_start}..{move.donor_start + move.length} of {held}",
            hint="the donor holds fewer tokens than the plan says",
        )
    if slots.dim() != 1 or slots.dtype not in (torch.int64, torch.int32) or slots.numel() != move.length:
        raise InputError(
            f"{move.length} tokens go to slots of shape {list(slots.shape)} and type {slots.dtype}",
            hint="give one integer slot for each token",
        )
    if isinstance(move.shift, bool) or not isinstance(move.shift, int):
        raise InputError(f"a shift of {move.shift!r}", hint="one whole number for the move")


# -- The way back of splice: the KV of some slots, out of an engine's cache, into memory of our own.
#
# Within a GPU it is one kernel launch over layers x tokens (``kernels.gather_rows``), from there to the host the same
# in pieces (``gather_staged``), elsewhere it goes layer by layer (``gather_plain``, which is also the specification).

STAGED_BYTES = 64 << 20
"""So much is gathered on a GPU before it is copied to the host: a few launches for each, where layer by layer takes
eight a layer. A donor of 235 MB in 28 layers takes 16 launches in place of 224."""


def gather(layout: Layout, slots: Tensor, k_out: Tensor, v_out: Tensor, layers: Sequence[int] | None = None) -> None:
    """Copy keys and values of ``slots`` into two ``[layers, n, kv_heads, head_dim]``; queued, not waited for.

    ``layers``: only of these, one after another; None for all.
    """
    if layout.device.type == "cuda" and has_triton() and slots.numel() and (views := layout.views) is not None:
        if k_out.device.type == "cuda":
            from semblend.materialize.kv.kernels import gather_rows

            return gather_rows(views, slots, k_out, v_out, layers)
        try:
            return gather_staged(layout, slots, k_out, v_out, layers)
        except torch.OutOfMemoryError:  # what was written is written again
            pass
    return gather_plain(layout, slots, k_out, v_out, layers)


def gather_staged(
    layout: Layout, slots: Tensor, k_out: Tensor, v_out: Tensor, layers: Sequence[int] | None = None
) -> None:
    """As ``gather_plain``, a few layers at a time: gathered in the cache's own memory, then copied in one piece each.

    The memory of a piece is given to the next one in the order of the stream that this runs on.
    """
    chosen = range(layout.layers) if layers is None else layers
    layer_bytes = 2 * slots.numel() * layout.kv_heads * layout.head_dim * layout.dtype.itemsize
    step = max(1, STAGED_BYTES // max(1, layer_bytes))
    for first in range(0, len(chosen), step):
        some = slice(first, first + step)
        for out, staged in zip((k_out, v_out), copy_layers(layout, chosen[some], slots), strict=True):
            out[some].copy_(staged, non_blocking=True)


def gather_plain(
    layout: Layout, slots: Tensor, k_out: Tensor, v_out: Tensor, layers: Sequence[int] | None = None
) -> None:
    """The plain twin; layer by layer, so that no second copy of the whole exists on a device."""
    for number, layer in enumerate(range(layout.layers) if layers is None else layers):
        for out, rows in zip((k_out, v_out), layout.gather(layer, slots), strict=True):
            out[number].copy_(fold(layout, rows), non_blocking=True)


def copy_layers(layout: Layout, layers: Sequence[int], slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ``slots`` in some layers, each ``[layers, n, kv_heads, head_dim]``, as they are now."""
    shape = (len(layers), len(slots), layout.kv_heads, layout.head_dim)
    k_out, v_out = (torch.empty(shape, dtype=layout.dtype, device=layout.device) for _ in range(2))
    gather(layout, slots, k_out, v_out, layers)
    return k_out, v_out


def gather_packed(layout: Layout, slots: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Copy keys and values of ``slots`` at 8 bits into the four tensors of a donor; queued, not waited for.

    They are packed where they lie, so half the bytes cross a bus; layer by layer, so that no wide copy exists.
    """
    for layer in range(layout.layers):
        pack_layer(parts, layer, *(fold(layout, rows) for rows in layout.gather(layer, slots)))


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
