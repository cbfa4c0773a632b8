"""Splice: donor KV becomes KV of another prompt. Gather the donor's rows, turn the keys by the shift, scatter.

All moves of a request go in one call. On a GPU that is one kernel launch over layers x tokens x heads
(``kernels.splice_moves``), elsewhere ``splice_plain``, which is also the specification. ``splice`` is the only door:
it refuses what does not fit before a byte is written, so that a bad plan costs a prefill and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from semblend.errors import InputError
from semblend.materialize.kv.layout import Layout
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.rope import RopeSpec
from semblend.materialize.kv.triton_support import has_triton


def splice(moves: Sequence[Move], layout: Layout, rope: RopeSpec, *, check_slots: bool = True) -> int:
    """Carries out the moves in every layer and returns how many tokens were written.

    ``check_slots=False`` skips reading slot numbers back from a GPU (one wait); the caller then vouches for them.
    """
    check_moves(moves, layout, rope, check_slots=check_slots)
    moves = [_match_rotation(move, rope) for move in moves if move.length]
    if moves:
        if layout.device.type == "cuda" and has_triton() and (views := layout.views) is not None:
            from semblend.materialize.kv.kernels import splice_moves

            splice_moves([stage_on_device(move, layout.device) for move in moves], views, rope)
        else:
            splice_plain(moves, layout, rope)
    return sum(move.length for move in moves)


def splice_plain(moves: Sequence[Move], layout: Layout, rope: RopeSpec) -> None:
    """The plain twin: layer by layer, so that the keys in wide precision never exist all at once."""
    for move in moves:
        rows = slice(move.donor_start, move.donor_start + move.length)
        for layer in range(layout.layers):
            k = move.donor.k[layer, rows].to(layout.device)
            v = move.donor.v[layer, rows].to(layout.device)
            layout.scatter(layer, move.target_slots, rope.relocate(k, move.shift), v)


def _match_rotation(move: Move, rope: RopeSpec) -> Move:
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
    keys = torch.stack([difference.relocate(layer[rows], at) for layer in move.donor.k])
    return Move(DonorTensors(keys, move.donor.v[:, rows]), 0, move.length, move.target_slots, move.shift, rope)


def stage_on_device(move: Move, device: torch.device) -> Move:
    """The same move with the donor's rows on ``device``, token rows adjacent, keys and values alike in strides.

    A donor in host memory is copied layer by layer: each piece is contiguous there, so a pinned one goes by DMA.
    """
    k, v = move.donor.k, move.donor.v
    row = (k.shape[2] * k.shape[3], k.shape[3], 1)
    if k.device == device == v.device and k.stride()[1:] == row and k.stride() == v.stride():
        return move
    rows = slice(move.donor_start, move.donor_start + move.length)
    staged = [torch.empty((k.shape[0], move.length, *k.shape[2:]), dtype=k.dtype, device=device) for _ in range(2)]
    for target, source in zip(staged, (k, v), strict=True):
        for layer in range(k.shape[0]):
            target[layer].copy_(source[layer, rows], non_blocking=True)
    return Move(DonorTensors(staged[0], staged[1]), 0, move.length, move.target_slots, move.shift, move.rope)


def check_moves(moves: Sequence[Move], layout: Layout, rope: RopeSpec, *, check_slots: bool = True) -> None:
    """Refuses, before anything is written, moves that do not fit the layout, the donors or the rotation."""
    if rope.head_dim != layout.head_dim:
        raise InputError(
            f"the rotation is for heads of {rope.head_dim} dimensions, the pool has {layout.head_dim}",
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
    if not fits or k.dtype != layout.dtype or v.dtype != layout.dtype:
        raise InputError(
            f"donor KV {list(k.shape)} {k.dtype} does not fit {layout!r}", hint="is the donor of the same model?"
        )


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
