"""The Triton kernels that move KV: splice and its way back, in one pass over the bytes each.

Imported only where they run (a GPU, or Triton's interpreter in the tests), through ``splice`` and ``gather``, where the
plain twins are too.

A splice program takes a few tokens of one move in one layer, with all their heads. A move has one shift, so its cosines
and sines are one short row, computed on the host in double precision; the kernel reads each donor byte once, turns keys
in single precision and writes each pool byte once. Donors and layers lie anywhere in memory: the kernel gets their
distances from one anchor. Where a prompt's slots begin says nothing, so no variant is compiled for it. Donors at 8 bits
have a variant of their own: whole numbers become the engine's type as they are read, with the scales beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from semblend.materialize.kv.layout import KvLayout, copy_to_device
from semblend.materialize.kv.moves import SCALES, DonorTensors, Move
from semblend.materialize.kv.rope import RopeSpec

ROWS, WARPS = 32, 4  # token-heads of a splice program; the best of 16 to 128 rows and 1 to 8 warps on an H200
FIELDS = tl.constexpr(11)  # numbers that describe a move


@triton.jit
def _read(source, at, mask, scales, scale_at, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Numbers of a donor; from 8 bits in single precision, rounded when they are written, as the twin does."""
    value = tl.load(source + at, mask=mask)
    if PACKED:
        scale = tl.load(scales + scale_at, mask=mask)
        value = value.to(tl.float32) * scale.to(tl.float32)
    return value


@triton.jit(do_not_specialize_on_alignment=["slots", "cos", "sin"])
def _splice_kernel(  # type: ignore[no-untyped-def]
    source,
    k_scales,
    v_scales,
    target,
    moves,
    tiles,
    layer_starts,
    slots,
    cos,
    sin,
    block_stride,
    token_stride,
    head_stride,
    PACKED: tl.constexpr,  # noqa: N803
    K_GROUP: tl.constexpr,  # noqa: N803
    K_BY_DIM: tl.constexpr,  # noqa: N803
    V_GROUP: tl.constexpr,  # noqa: N803
    V_BY_DIM: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    START: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    TILE_TOKENS: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    RESTS: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
):
    tile = tl.program_id(0)
    about_layer = layer_starts + 4 * tl.program_id(1)
    layer = tl.load(about_layer + 3)  # its number in donors
    move = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    about = moves + move * FIELDS
    k_start = tl.multiple_of(tl.load(about), STEP)
    v_start = tl.multiple_of(tl.load(about + 1), STEP)
    layer_stride = tl.multiple_of(tl.load(about + 2), STEP)
    slots_start = tl.load(about + 3)
    length = tl.load(about + 4)
    stays = tl.load(about + 5) == 0
    k_target = tl.multiple_of(tl.load(about_layer), STEP)
    v_target = tl.multiple_of(tl.load(about_layer + 1), STEP)
    turn = (tl.load(about_layer + 2) + move) * HALF  # of this move by this layer's frequencies

    row = tl.arange(0, TILE_ROWS)
    token = first + row // HEADS
    live = (row < TILE_TOKENS * HEADS) & (token < length)
    slot = tl.load(slots + slots_start + token, mask=live, other=0)
    reads = (layer * layer_stride + (first * HEADS + row) * HEAD_DIM)[:, None]
    block = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * token_stride
    writes = (block + (row % HEADS) * head_stride)[:, None]

    k_at = reads * 0  # where the scales of a row begin; read only where there are any
    v_at = reads * 0
    if PACKED:
        held = tl.load(about + 10) + token
        k_group = held // K_GROUP * HEADS + row % HEADS
        v_group = held // V_GROUP * HEADS + row % HEADS
        k_at = (tl.load(about + 6) + layer * tl.load(about + 8) + k_group * (HEAD_DIM if K_BY_DIM else 1))[:, None]
        v_at = (tl.load(about + 7) + layer * tl.load(about + 9) + v_group * (HEAD_DIM if V_BY_DIM else 1))[:, None]

    dim = tl.arange(0, DIMS)[None, :]
    whole = live[:, None] & (dim < HEAD_DIM)
    v = _read(source, v_start + reads + dim, whole, v_scales, v_at + dim * V_BY_DIM, PACKED)

    pair = tl.arange(0, PAIRS)
    turned = live[:, None] & (pair < HALF)[None, :]
    one = START + (2 * pair if INTERLEAVED else pair)[None, :]
    two = START + (2 * pair + 1 if INTERLEAVED else pair + HALF)[None, :]
    k_one = _read(source, k_start + reads + one, turned, k_scales, k_at + one * K_BY_DIM, PACKED)
    k_two = _read(source, k_start + reads + two, turned, k_scales, k_at + two * K_BY_DIM, PACKED)
    c = tl.load(cos + turn + pair, mask=pair < HALF, other=1.0)[None, :]
    s = tl.load(sin + turn + pair, mask=pair < HALF, other=0.0)[None, :]
    wide_one = k_one.to(tl.float32)
    wide_two = k_two.to(tl.float32)
    moved_one = (wide_one * c - wide_two * s).to(k_one.dtype)
    moved_two = (wide_two * c + wide_one * s).to(k_two.dtype)
    new_one = tl.where(stays, k_one, moved_one).to(target.dtype.element_ty)
    new_two = tl.where(stays, k_two, moved_two).to(target.dtype.element_ty)
    tl.store(target + k_target + writes + one, new_one, mask=turned)
    tl.store(target + k_target + writes + two, new_two, mask=turned)
    if RESTS > 0:  # partial rotary: the dimensions before and after the rotated ones
        rest = tl.arange(0, RESTS)[None, :]
        rest = tl.where(rest < START, rest, rest + 2 * HALF)
        kept = live[:, None] & (rest < HEAD_DIM)
        k_rest = _read(source, k_start + reads + rest, kept, k_scales, k_at + rest * K_BY_DIM, PACKED)
        tl.store(target + k_target + writes + rest, k_rest.to(target.dtype.element_ty), mask=kept)
    tl.store(target + v_target + writes + dim, v.to(target.dtype.element_ty), mask=whole)


def splice_moves(moves: Sequence[Move], layout: KvLayout, rope: RopeSpec) -> None:
    """All moves of a request, of donors that are all at 8 bits or all in the pool's type: in one launch, or in one for
    each number of dimensions that layers rotate.

    ``splice.splice`` is the door: it has checked and staged them.
    """
    for layers, alike in rope.split(layout.layers):
        _splice_layers(moves, layout, alike, layers)


def _splice_layers(moves: Sequence[Move], layout: KvLayout, rope: RopeSpec, members: Sequence[int]) -> None:
    heads, device, half = layout.kv_heads, layout.device, rope.rotary_dim // 2
    tile_tokens = max(1, ROWS // heads)
    slots = [move.target_slots.to(device=device, dtype=torch.int64).contiguous() for move in moves]
    donor = moves[0].donor
    about, tiles = _tables(moves, slots, tile_tokens)
    turns = rope.relocation_table([move.shift for move in moves])
    kinds = np.array(rope.layer_kinds or [0] * len(members), dtype=np.int64)
    layers = np.column_stack((layout.layer_starts[members], kinds * len(moves), members))
    at_moves, at_tiles, at_layers, at_turns, there = _copy_tables((about, tiles, layers, turns), device)
    cos, sin = there[at_turns:].view(torch.float32).view(2, len(rope.kinds) * len(moves), half)
    strides = layout.k[0].stride()[:3]
    numbers = (*about[:, :3].ravel().tolist(), *layout.layer_starts.ravel().tolist(), *strides, layout.head_dim)
    _splice_kernel[(len(tiles), len(members))](
        donor.k,
        donor.k if donor.k_scale is None else donor.k_scale,
        donor.k if donor.v_scale is None else donor.v_scale,
        layout.k[0],
        there[at_moves:],
        there[at_tiles:],
        there[at_layers:],
        slots[0],
        cos,
        sin,
        *strides,
        PACKED=donor.packed,
        K_GROUP=SCALES["k"].group_tokens,
        K_BY_DIM=int(SCALES["k"].by_dimension),
        V_GROUP=SCALES["v"].group_tokens,
        V_BY_DIM=int(SCALES["v"].by_dimension),
        HEADS=heads,
        HEAD_DIM=layout.head_dim,
        START=rope.rotary_start,
        HALF=half,
        INTERLEAVED=rope.style == "interleaved",
        BLOCK_TOKENS=layout.block_tokens,
        TILE_TOKENS=tile_tokens,
        TILE_ROWS=triton.next_power_of_2(tile_tokens * heads),
        PAIRS=triton.next_power_of_2(half),
        DIMS=triton.next_power_of_2(layout.head_dim),
        RESTS=triton.next_power_of_2(layout.head_dim - rope.rotary_dim) if layout.head_dim > rope.rotary_dim else 0,
        # Wide loads need aligned rows; views may start anywhere, so the promise is made only where it holds.
        STEP=8 if all(number % 8 == 0 for number in numbers) else 1,
        num_warps=WARPS,
    )


def _copy_tables(tables: Sequence[np.ndarray], device: torch.device) -> tuple[int, int, int, int, Tensor]:
    """The tables in one tensor on the device, and where each begins: one small copy, from pinned memory, no wait."""
    words = [np.ascontiguousarray(table).ravel().view(np.int64) for table in tables]
    packed = torch.from_numpy(np.concatenate(words))
    one, two, three, four, _ = accumulate((0, *(len(word) for word in words)))
    return one, two, three, four, copy_to_device(packed, device)


def _tables(moves: Sequence[Move], slots: Sequence[Tensor], tile_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Per move where it starts, how far layers lie apart, its slots, length and shift; per tile its move and token.

    Starts count elements from the first move's donor (or its slots): pieces of memory that have nothing else in common.
    At 8 bits there follow where the scales start, how far their layers lie apart, and the first token.
    """
    first = moves[0].donor
    about = []
    for move, to in zip(moves, slots, strict=True):
        k, v = move.donor.k, move.donor.v
        layer_stride, token_stride, _, _ = k.stride()
        starts = (_distance(tensor, first.k) + move.donor_start * token_stride for tensor in (k, v))
        place = (*starts, layer_stride, _distance(to, slots[0]), move.length, move.shift)
        about.append((*place, *_scale_places(move.donor, first), move.donor_start))
    table = np.array(about, dtype=np.int64)
    tiles_of = -(-table[:, 4] // tile_tokens)
    owner = np.repeat(np.arange(len(moves)), tiles_of)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    return table, np.stack((owner, nth * tile_tokens), axis=1)


def _scale_places(donor: DonorTensors, first: DonorTensors) -> tuple[int, int, int, int]:
    if donor.k_scale is None or donor.v_scale is None or first.k_scale is None or first.v_scale is None:
        return 0, 0, 0, 0
    starts = _distance(donor.k_scale, first.k_scale), _distance(donor.v_scale, first.v_scale)
    return *starts, donor.k_scale.stride(0), donor.v_scale.stride(0)


def _distance(tensor: Tensor, anchor: Tensor) -> int:
    """How many elements behind the anchor's first one a tensor of the same type begins."""
    return (tensor.data_ptr() - anchor.data_ptr()) // anchor.element_size()


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    source,
    k_out,
    v_out,
    layer_starts,
    slots,
    count,
    block_stride,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    TILE_TOKENS: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
):
    first = tl.program_id(0) * TILE_TOKENS
    layer = tl.program_id(1)
    k_start = tl.multiple_of(tl.load(layer_starts + 2 * layer), STEP)
    v_start = tl.multiple_of(tl.load(layer_starts + 2 * layer + 1), STEP)
    row = tl.arange(0, TILE_ROWS)
    token = first + row // HEADS
    live = (row < TILE_TOKENS * HEADS) & (token < count)
    slot = tl.load(slots + token, mask=live, other=0)
    place = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * token_stride + (row % HEADS) * head_stride
    target = (layer.to(tl.int64) * count + first) * HEADS + row
    dim = tl.arange(0, DIMS)[None, :]
    whole = live[:, None] & (dim < HEAD_DIM)
    writes = target[:, None] * HEAD_DIM + dim
    tl.store(k_out + writes, tl.load(source + k_start + place[:, None] + dim, mask=whole), mask=whole)
    tl.store(v_out + writes, tl.load(source + v_start + place[:, None] + dim, mask=whole), mask=whole)


def gather_rows(
    layout: KvLayout, slots: Tensor, k_out: Tensor, v_out: Tensor, layers: Sequence[int] | None = None
) -> None:
    """As ``gather_plain``; outputs are contiguous ``[layers, n, kv_heads, head_dim]``, slots int64 on the device.

    ``layers``: only these.
    """
    heads = layout.kv_heads
    tile_tokens = max(1, ROWS // heads)
    strides = layout.k[0].stride()[:3]
    starts = layout.layer_starts if layers is None else layout.layer_starts[list(layers)]
    numbers = (*starts.ravel().tolist(), *strides, layout.head_dim)
    _gather_kernel[(triton.cdiv(len(slots), tile_tokens), len(starts))](
        layout.k[0],
        k_out,
        v_out,
        copy_to_device(torch.from_numpy(starts), layout.device),
        slots,
        len(slots),
        *strides,
        HEADS=heads,
        HEAD_DIM=layout.head_dim,
        BLOCK_TOKENS=layout.block_tokens,
        TILE_TOKENS=tile_tokens,
        TILE_ROWS=triton.next_power_of_2(tile_tokens * heads),
        DIMS=triton.next_power_of_2(layout.head_dim),
        STEP=8 if all(number % 8 == 0 for number in numbers) else 1,
        num_warps=WARPS,
    )
