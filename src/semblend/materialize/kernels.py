"""The Triton kernels: splice and its way back in one pass over the bytes each, and attention of scattered rows.

Imported only where they run (a GPU, or Triton's interpreter in the tests), through ``splice``, ``gather`` and the
engine's attention. The plain twins: ``splice.splice_plain``, ``gather.gather_plain``, ``attention_plain.attend_plain``.

Splice. A program takes a few tokens of one move in one layer, with all their heads. A move has one shift, so its
cosines and sines are one short row, computed on the host in double precision; the kernel reads each donor byte once,
turns keys in single precision and writes each pool byte once. Donors and layers lie anywhere in memory: the kernel gets
their distances from one anchor.

Attention. Queries of one KV head are packed, row by row, into tiles; rows ascend by position, so a tile's rows need
about the same keys, and it walks the context once, up to the furthest of them, with every row's own limit. Few rows
over a long context would leave most of a GPU idle: then the context is cut into parts, whose sums are joined after.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from semblend.materialize.attention_plain import as_blocks, check_attention
from semblend.materialize.host_memory import sent
from semblend.materialize.layout import KvLayout
from semblend.materialize.rope import RopeSpec
from semblend.materialize.splice import Move

ROWS, WARPS = 32, 4  # token-heads of a splice program; the best of 16 to 128 rows and 1 to 8 warps on an H200
LOG2_E = tl.constexpr(1.4426950408889634)
FIELDS = tl.constexpr(6)  # numbers that describe a move


@triton.jit
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
    at_moves, at_tiles, at_layers, at_turns, there = _sent((about, tiles, layout.layer_starts, turns), device)
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


def _sent(tables: Sequence[np.ndarray], device: torch.device) -> tuple[int, int, int, int, Tensor]:
    """The tables in one tensor on the device, and where each begins: one small copy, from pinned memory, no wait."""
    words = [np.ascontiguousarray(table).ravel().view(np.int64) for table in tables]
    packed = torch.from_numpy(np.concatenate(words))
    one, two, three, four, _ = accumulate((0, *(len(word) for word in words)))
    return one, two, three, four, sent(packed, device)


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


@triton.jit(do_not_specialize=["count"])
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
        sent(starts, layout.device),
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


@triton.jit
def _rows_of(pool, place, dim, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Heads of one pool, one a place; padded with zeros where the head is no power of two."""
    if HEAD_DIM == DIMS:
        found = tl.load(pool + place[:, None] + dim[None, :])
    else:
        found = tl.load(pool + place[:, None] + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
    return found.to(tl.float32) if WIDEN else found


@triton.jit(do_not_specialize=["rows", "total"])
def _attention_kernel(  # type: ignore[no-untyped-def]
    q,
    positions,
    context,
    k,
    v,
    out,
    sums,
    rows,
    total,
    part_tokens,
    scale,
    q_row,
    q_head,
    kv_block,
    kv_token,
    kv_head,
    GROUP: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the furthest rows have most to do: they start first
    kv = tl.program_id(1)
    part = tl.program_id(2)
    packed = tile * TILE + tl.arange(0, TILE)
    live = packed < rows * GROUP
    row = packed // GROUP
    head = kv * GROUP + packed % GROUP
    limit = tl.minimum(tl.load(positions + row, mask=live, other=-1), total - 1).to(tl.int32)
    dim = tl.arange(0, DIMS)
    in_head = dim < HEAD_DIM
    asked = tl.load(
        q + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + dim[None, :],
        mask=live[:, None] & in_head[None, :],
        other=0.0,
    )
    asked = asked.to(tl.float32) if WIDEN else asked
    peak = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DIMS], tl.float32)
    begin = part * part_tokens
    end = tl.minimum(tl.max(limit, 0) + 1, begin + part_tokens)
    # Up to the nearest limit of the tile all rows see all keys: most of the context, as rows are near each other.
    nearest = tl.min(tl.where(live, limit, total), 0) + 1
    open_end = tl.maximum(begin, begin + (tl.minimum(nearest, end) - begin) // KEYS * KEYS)
    for at in range(begin, open_end, KEYS):
        key = at + tl.arange(0, KEYS)
        slot = tl.load(context + key).to(tl.int64)
        place = slot // BLOCK_TOKENS * kv_block + slot % BLOCK_TOKENS * kv_token + kv * kv_head
        keys = _rows_of(k, place, dim, HEAD_DIM, DIMS, WIDEN)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(peak - higher)
        mass = mass * fade + tl.sum(weights, 1)
        values = _rows_of(v, place, dim, HEAD_DIM, DIMS, WIDEN)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = higher
    for at in range(open_end, end, KEYS):
        key = at + tl.arange(0, KEYS)
        there = key < end
        slot = tl.load(context + key, mask=there, other=0).to(tl.int64)
        place = slot // BLOCK_TOKENS * kv_block + slot % BLOCK_TOKENS * kv_token + kv * kv_head
        keys = _rows_of(k, place, dim, HEAD_DIM, DIMS, WIDEN)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where((key[None, :] <= limit[:, None]) & there[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row may have seen nothing yet: subtracting its peak of -inf would give nan.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        mass = mass * fade + tl.sum(weights, 1)
        # Slot 0 stands in for keys behind the end; its values may be anything, and nothing times NaN is NaN.
        values = _rows_of(v, place, dim, HEAD_DIM, DIMS, WIDEN)
        values = tl.where(there[:, None], values, 0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = higher
    place = row.to(tl.int64) * HEADS + head
    writable = live[:, None] & in_head[None, :]
    if not SPLIT:
        mixed = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out + place[:, None] * HEAD_DIM + dim[None, :], mixed.to(out.dtype.element_ty), mask=writable)
    else:
        place += part.to(tl.int64) * rows * HEADS
        tl.store(out + place[:, None] * HEAD_DIM + dim[None, :], mixed, mask=writable)
        tl.store(sums + place * 2, peak, mask=live)
        tl.store(sums + place * 2 + 1, mass, mask=live)


def scattered_attention(
    q: Tensor, positions: Tensor, context: Tensor, k: Tensor, v: Tensor, scale: float, parts: int | None = None
) -> Tensor:
    """Rows ``q[n, heads, d]`` at ascending ``positions[n]`` over the pool rows ``context[T]``; gives ``[n, heads, d]``.

    As ``attend_plain``; ``parts`` cuts the context for programs in parallel, chosen from the shapes unless given.
    Nothing is read back from the device, so this may run in every layer without a wait.
    """
    check_attention(q, positions, context, k, v)
    rows, heads, head_dim = q.shape
    if rows == 0 or len(context) == 0:
        return torch.zeros_like(q)
    q = q if q.stride(2) == 1 else q.contiguous()
    pool_k, pool_v = as_blocks(k), as_blocks(v)
    kv_heads = pool_k.shape[2]
    group = heads // kv_heads
    tile, keys, warps, stages = _work_shape(head_dim, q.dtype)
    tiles = triton.cdiv(rows * group, tile)
    if parts is None:
        parts = _parts(tiles * kv_heads, len(context), q.device)
    part_tokens = triton.cdiv(triton.cdiv(len(context), parts), keys) * keys
    split = parts > 1
    out = torch.empty((parts, rows, heads, head_dim), dtype=torch.float32 if split else q.dtype, device=q.device)
    sums = torch.empty((parts, rows, heads, 2) if split else (1,), dtype=torch.float32, device=q.device)
    _attention_kernel[(tiles, kv_heads, parts)](
        q,
        positions,
        context,
        pool_k,
        pool_v,
        out,
        sums,
        rows,
        len(context),
        part_tokens,
        scale,
        q.stride(0),
        q.stride(1),
        *pool_k.stride()[:3],
        GROUP=group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=pool_k.shape[1],
        TILE=tile,
        KEYS=keys,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        SPLIT=split,
        WIDEN=q.device.type == "cpu" and q.dtype == torch.bfloat16,  # the interpreter multiplies bfloat16 bit patterns
        num_warps=warps,
        num_stages=stages,
    )
    return _joined(out, sums).to(q.dtype) if split else out[0]


def _work_shape(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, and keys loaded ahead; measured by ``bench/splice.py``."""
    if dtype == torch.float32 or head_dim > 128:
        return 32, 32, 4, 2
    return 64, 64, 4, 3


def _parts(programs: int, tokens: int, device: torch.device) -> int:
    """Into how many parts the context is cut: one if two programs a multiprocessor are there anyway, else enough for
    three, and none shorter than 1,024 tokens; measured on an H200, where a cut past that costs more than it gains.
    """
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = 1 if programs >= 2 * processors else -(-3 * processors // programs)
    return max(1, min(wanted, tokens // 1024))


def _joined(mixed: Tensor, sums: Tensor) -> Tensor:
    """Adds up the parts: each has its unscaled sum of values, its highest score (base 2) and its mass."""
    peak, mass = sums[..., 0], sums[..., 1]
    weight = torch.exp2(peak - peak.amax(0))  # a row's first part always sees position 0, so the highest is finite
    return (mixed * weight[..., None]).sum(0) / (mass * weight).sum(0)[..., None]
