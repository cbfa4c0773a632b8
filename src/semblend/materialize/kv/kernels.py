"""The Triton kernels that move KV: splice and its way back, in one pass over the bytes each.

Imported only where they run (a GPU, or Triton's interpreter in the tests), through ``splice`` and ``gather``, where the
plain twins are too.

A splice program takes a few tokens of one move in one layer, with all their heads. A move has one shift, so its cosines
and sines are one short row, computed on the host in double precision; the kernel reads each donor byte once, turns keys
in single precision and writes each pool byte once. Donors and layers lie anywhere in memory: the kernel gets their
distances from one anchor. Where a prompt's slots begin says nothing, so no variant is compiled for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from semblend.materialize.kv.host_memory import copy_to_device
from semblend.materialize.kv.layout import KvLayout
from semblend.materialize.kv.moves import Move
from semblend.materialize.kv.rope import RopeSpec

ROWS, WARPS = 32, 4  # token-heads of a splice program; the best of 16 to 128 rows and 1 to 8 warps on an H200
FIELDS = tl.constexpr(6)  # numbers that describe a move


@triton.jit(do_not_specialize_on_alignment=["slots", "cos", "sin"])
def _splice_kernel(  # type: ignore[no-untyped-def]
    source,
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
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
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
    layer = tl.program_id(1)
    move = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    about = moves + move * FIELDS
    k_start = tl.multiple_of(tl.load(about), STEP)
    v_start = tl.multiple_of(tl.load(about + 1), STEP)
    layer_stride = tl.multiple_of(tl.load(about + 2), STEP)
    slots_start = tl.load(about + 3)
    length = tl.load(about + 4)
    stays = tl.load(about + 5) == 0
    k_target = tl.multiple_of(tl.load(layer_starts + 2 * layer), STEP)
    v_target = tl.multiple_of(tl.load(layer_starts + 2 * layer + 1), STEP)

    row = tl.arange(0, TILE_ROWS)
    token = first + row // HEADS
    live = (row < TILE_TOKENS * HEADS) & (token < length)
    slot = tl.load(slots + slots_start + token, mask=live, other=0)
    reads = (layer * layer_stride + (first * HEADS + row) * HEAD_DIM)[:, None]
    block = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * token_stride
    writes = (block + (row % HEADS) * head_stride)[:, None]

    dim = tl.arange(0, DIMS)[None, :]
    whole = live[:, None] & (dim < HEAD_DIM)
    v = tl.load(source + v_start + reads + dim, mask=whole)

    pair = tl.arange(0, PAIRS)
    turned = live[:, None] & (pair < HALF)[None, :]
    one = (2 * pair if INTERLEAVED else pair)[None, :]
    two = (2 * pair + 1 if INTERLEAVED else pair + HALF)[None, :]
    k_one = tl.load(source + k_start + reads + one, mask=turned)
    k_two = tl.load(source + k_start + reads + two, mask=turned)
    c = tl.load(cos + move * HALF + pair, mask=pair < HALF, other=1.0)[None, :]
    s = tl.load(sin + move * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    wide_one = k_one.to(tl.float32)
    wide_two = k_two.to(tl.float32)
    moved_one = (wide_one * c - wide_two * s).to(k_one.dtype)
    moved_two = (wide_two * c + wide_one * s).to(k_two.dtype)
    tl.store(target + k_target + writes + one, tl.where(stays, k_one, moved_one), mask=turned)
    tl.store(target + k_target + writes + two, tl.where(stays, k_two, moved_two), mask=turned)
    if RESTS > 0:  # partial rotary: the dimensions after the rotated ones
        rest = 2 * HALF + tl.arange(0, RESTS)[None, :]
        kept = live[:, None] & (rest < HEAD_DIM)
        tl.store(target + k_target + writes + rest, tl.load(source + k_start + reads + rest, mask=kept), mask=kept)
    tl.store(target + v_target + writes + dim, v, mask=whole)


def splice_moves(moves: Sequence[Move], layout: KvLayout, rope: RopeSpec) -> None:
    """All moves of a request in one launch. ``splice.splice`` is the door: it has checked and staged them."""
    heads, device, half = layout.kv_heads, layout.device, rope.rotary_dim // 2
    tile_tokens = max(1, ROWS // heads)
    slots = [move.target_slots.to(device=device, dtype=torch.int64).contiguous() for move in moves]
    about, tiles = _tables(moves, slots, layout.dtype.itemsize, tile_tokens)
    turns = rope.relocation_table([move.shift for move in moves])
    at_moves, at_tiles, at_layers, at_turns, there = _copy_tables((about, tiles, layout.layer_starts, turns), device)
    cos, sin = there[at_turns:].view(torch.float32).view(2, len(moves), half)
    strides = layout.k[0].stride()[:3]
    numbers = (*about[:, :3].ravel().tolist(), *layout.layer_starts.ravel().tolist(), *strides, layout.head_dim)
    _splice_kernel[(len(tiles), layout.layers)](
        moves[0].donor.k,
        layout.k[0],
        there[at_moves:],
        there[at_tiles:],
        there[at_layers:],
        slots[0],
        cos,
        sin,
        *strides,
        HEADS=heads,
        HEAD_DIM=layout.head_dim,
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


def _tables(
    moves: Sequence[Move], slots: Sequence[Tensor], size: int, tile_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Per move where it starts, how far layers lie apart, its slots, length and shift; per tile its move and token.

    Starts count elements from the first move's donor (or its slots): pieces of memory that have nothing else in common.
    """
    anchor, first_slots = moves[0].donor.k.data_ptr(), slots[0].data_ptr()
    about = []
    for move, to in zip(moves, slots, strict=True):
        k, v = move.donor.k, move.donor.v
        layer_stride, token_stride, _, _ = k.stride()
        starts = ((tensor.data_ptr() - anchor) // size + move.donor_start * token_stride for tensor in (k, v))
        about.append((*starts, layer_stride, (to.data_ptr() - first_slots) // 8, move.length, move.shift))
    table = np.array(about, dtype=np.int64)
    tiles_of = -(-table[:, 4] // tile_tokens)
    owner = np.repeat(np.arange(len(moves)), tiles_of)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    return table, np.stack((owner, nth * tile_tokens), axis=1)


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


def gather_rows(layout: KvLayout, slots: Tensor, k_out: Tensor, v_out: Tensor) -> None:
    """As ``gather_plain``; outputs are contiguous ``[layers, n, kv_heads, head_dim]``, slots int64 on the device."""
    heads = layout.kv_heads
    tile_tokens = max(1, ROWS // heads)
    strides = layout.k[0].stride()[:3]
    starts = torch.from_numpy(layout.layer_starts)
    numbers = (*layout.layer_starts.ravel().tolist(), *strides, layout.head_dim)
    _gather_kernel[(triton.cdiv(len(slots), tile_tokens), layout.layers)](
        layout.k[0],
        k_out,
        v_out,
        copy_to_device(starts, layout.device),
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
