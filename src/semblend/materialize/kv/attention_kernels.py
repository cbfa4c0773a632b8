"""The Triton kernels for attention of scattered rows, and for the attention that a question pays to every key.

Imported only where they run (a GPU, or Triton's interpreter in the tests); the plain twins are ``attend_plain`` in
``tests/plain_attention.py`` and ``observers.add_attention``.

Queries of one KV head are packed, row by row, into tiles; rows ascend by position, so a tile's rows need about the same
keys, and it walks the context once: without a mask up to the nearest of the rows, with every row's own limit from there
to the furthest. Few rows over a long context would leave most of a GPU idle: then the context is cut into parts, whose
sums are joined after. Where somebody else has attended to the first keys already, each row goes on from there
(`Attended`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.kv.layout import KvLayout, copy_to_device

LOG2_E = tl.constexpr(1.4426950408889634)
MUCH_NEAR_MEMORY = 200 << 10
"""Bytes: in large tiles three loads of 64 KiB are on the way at once; only some GPUs have so much near their cores."""


@triton.jit
def heads_at(pool, place, dim, HEAD_DIM: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One head a place; padded with zeros where its size is no power of two."""
    if dim.shape[0] == HEAD_DIM:
        found = tl.load(pool + place[:, None] + dim[None, :])
    else:
        found = tl.load(pool + place[:, None] + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
    return found.to(tl.float32) if WIDEN else found


@triton.jit
def _attended(  # type: ignore[no-untyped-def]
    state, asked, first, limit, key, end, k, v, context, strides, scale, dim,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, MASKED: tl.constexpr, GOES_ON: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One step of a tile along the context: its highest scores, the mass under them, and the mixed values so far."""
    peak, mass, mixed = state
    kv_block, kv_token, kv_start = strides
    if MASKED:
        slot = tl.load(context + key, mask=key < end, other=0).to(tl.int64)
    else:
        slot = tl.load(context + key).to(tl.int64)
    place = slot // BLOCK_TOKENS * kv_block + slot % BLOCK_TOKENS * kv_token + kv_start
    keys = heads_at(k, place, dim, HEAD_DIM, WIDEN)
    scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
    values = heads_at(v, place, dim, HEAD_DIM, WIDEN)
    if MASKED:
        scores = tl.where((key[None, :] <= limit[:, None]) & (key < end)[None, :], scores, float("-inf"))
        if GOES_ON:
            scores = tl.where(key[None, :] >= first[:, None], scores, float("-inf"))
        # Slot 0 stands in for keys behind the end; its values may be anything, and nothing times NaN is NaN.
        values = tl.where((key < end)[:, None], values, 0.0)
    higher = tl.maximum(peak, tl.max(scores, 1))
    # A row may have seen nothing yet: subtracting its peak of -inf would give nan.
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, mass * fade + tl.sum(weights, 1), mixed


@triton.jit(do_not_specialize=["rows", "total"], do_not_specialize_on_alignment=["positions", "context", "firsts"])
def _attention_kernel(  # type: ignore[no-untyped-def]
    q, positions, context, k, v, out, partial, sums, before, before_sums, firsts,
    rows, total, part_tokens, scale, q_row, q_head, kv_block, kv_token, kv_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, SPLIT: tl.constexpr, GOES_ON: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the furthest rows have most to do: they start first
    kv = tl.program_id(1)
    part = tl.program_id(2)
    packed = tile * TILE + tl.arange(0, TILE)
    live = packed < rows * GROUP
    row = packed // GROUP
    head = kv * GROUP + packed % GROUP
    limit = tl.minimum(tl.load(positions + row, mask=live, other=-1), total - 1).to(tl.int32)
    first = limit
    begin = 0
    seen_by_all = 0  # from here on no row has seen a key yet
    if GOES_ON:
        first = tl.load(firsts + row, mask=live, other=0).to(tl.int32)
        begin = tl.min(tl.where(live, first, total), 0)
        seen_by_all = tl.max(tl.where(live, first, 0), 0)
    end = tl.max(limit, 0) + 1
    place = row.to(tl.int64) * HEADS + head
    if SPLIT:
        if GOES_ON:  # parts of what is left to this tile, so that a long way is never one program's
            part_tokens = tl.maximum(part_tokens, tl.cdiv(end - begin, tl.num_programs(2) * KEYS) * KEYS)
        alone = end - begin <= part_tokens
        begin += part * part_tokens
        end = tl.minimum(end, begin + part_tokens)
        place_of_sums = (place + part.to(tl.int64) * rows * HEADS) * 2
        if (begin >= end) | (alone & (part > 0)):
            tl.store(sums + place_of_sums + 1, tl.zeros([TILE], tl.float32), mask=live)
            return
    dim = tl.arange(0, DIMS)
    real = live[:, None] & (dim < HEAD_DIM)[None, :]
    asked = tl.load(q + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + dim[None, :], mask=real, other=0.0)
    asked = asked.to(tl.float32) if WIDEN else asked
    peak = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DIMS], tl.float32)
    if GOES_ON and part == 0:
        theirs = rows - 1 - row.to(tl.int64)
        peak = tl.load(before_sums + head.to(tl.int64) * rows + theirs, mask=live, other=0.0) * LOG2_E
        mass = tl.full([TILE], 1.0, tl.float32)
        there = (theirs * HEADS + head) * HEAD_DIM
        mixed = tl.load(before + there[:, None] + dim[None, :], mask=real, other=0.0).to(tl.float32)
    strides = (kv_block, kv_token, kv * kv_head)
    nearest = tl.minimum(tl.min(tl.where(live, limit, total), 0) + 1, end)
    inner = begin  # between here and `outer` every row sees every key
    if GOES_ON:
        inner += tl.cdiv(tl.maximum(tl.minimum(seen_by_all, end) - begin, 0), KEYS) * KEYS
        for at in range(begin, tl.minimum(inner, end), KEYS):
            key = at + tl.arange(0, KEYS)
            peak, mass, mixed = _attended(
                (peak, mass, mixed), asked, first, limit, key, end, k, v, context, strides, scale, dim,
                HEAD_DIM, BLOCK_TOKENS, True, True, WIDEN,
            )  # fmt: skip
    outer = inner + tl.maximum(nearest - inner, 0) // KEYS * KEYS
    for at in range(inner, outer, KEYS):
        key = at + tl.arange(0, KEYS)
        peak, mass, mixed = _attended(
            (peak, mass, mixed), asked, first, limit, key, end, k, v, context, strides, scale, dim,
            HEAD_DIM, BLOCK_TOKENS, False, False, WIDEN,
        )  # fmt: skip
    for at in range(outer, end, KEYS):
        key = at + tl.arange(0, KEYS)
        peak, mass, mixed = _attended(
            (peak, mass, mixed), asked, first, limit, key, end, k, v, context, strides, scale, dim,
            HEAD_DIM, BLOCK_TOKENS, True, False, WIDEN,
        )  # fmt: skip
    if SPLIT:
        if not alone:
            there = place[:, None] + part.to(tl.int64) * rows * HEADS
            reached = real & (mass > 0)[:, None]  # of other rows nobody reads anything
            tl.store(partial + there * HEAD_DIM + dim[None, :], mixed, mask=reached)
            tl.store(sums + place_of_sums, peak, mask=live)
            tl.store(sums + place_of_sums + 1, mass, mask=live)
            return
        tl.store(sums + place_of_sums + 1, tl.zeros([TILE], tl.float32), mask=live)
    mixed = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + dim[None, :], mixed.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["total", "parts"], do_not_specialize_on_alignment=["positions"])
def _join_kernel(  # type: ignore[no-untyped-def]
    partial, sums, positions, out, total, parts, part_tokens,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SOME: tl.constexpr,  # noqa: N803
    GOES_ON: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Adds up what a row's parts have: each its unscaled sum of values, its highest score (base 2) and its mass.

    A row whose first part has no mass was finished by one program.
    """
    row = tl.program_id(0).to(tl.int64)
    place, apart = row * HEADS + tl.program_id(1), tl.num_programs(0).to(tl.int64) * HEADS
    if tl.load(sums + place * 2 + 1) == 0:
        return
    if not GOES_ON:
        parts = tl.minimum(parts, tl.minimum(tl.load(positions + row), total - 1) // part_tokens + 1)  # those it sees
    dim = tl.arange(0, DIMS)
    peak = tl.load(sums + place * 2)  # the first part has seen something: it is finite
    mass = tl.full([], 0.0, tl.float32)
    found = tl.zeros([DIMS], tl.float32)
    for begin in range(0, parts, SOME):
        part = begin + tl.arange(0, SOME)
        there = place + part.to(tl.int64) * apart
        their_mass = tl.load(sums + there * 2 + 1, mask=part < parts, other=0.0)
        has = their_mass > 0
        theirs = tl.load(sums + there * 2, mask=has, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(theirs, 0))
        fade, shares = tl.exp2(peak - higher), tl.exp2(theirs - higher)
        mixed = tl.load(
            partial + there[:, None] * HEAD_DIM + dim[None, :], mask=has[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
        )
        mass = mass * fade + tl.sum(their_mass * shares, 0)
        found = found * fade + tl.sum(mixed * shares[:, None], 0)
        peak = higher
    tl.store(out + place * HEAD_DIM + dim, (found / mass).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What rows have of the keys before ``first[n]``, one or more: ``out[n, heads, d]`` and ``logsumexp[heads, n]``.

    These two stand in the reverse order of rows: those with most to do come first, so that no long one is left over
    when a GPU runs out of others.
    """

    first: Tensor
    out: Tensor
    logsumexp: Tensor


def scattered_attention(
    q: Tensor,
    positions: Tensor,
    context: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    parts: int | None = None,
    after: Attended | None = None,
) -> Tensor:
    """Rows ``q[n, heads, d]`` at ascending ``positions[n]`` over the pool rows ``context[T]``; gives ``[n, heads, d]``.

    Each row sees the keys at positions up to its own; position p lies in slot ``context[p]`` of one layer of a pool,
    ``[slots, kv_heads, d]`` or ``[blocks, block_tokens, kv_heads, d]``. ``parts`` cuts the context for programs in
    parallel, chosen from the shapes unless given. ``after``: rows go on from there, with the keys behind it only.
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
    shape = _choose_shape(head_dim, q.dtype, rows * group, q.device, goes_on=after is not None)
    tiles = triton.cdiv(rows * group, shape.tile)
    if parts is None:
        parts = NEAR_PARTS if after is not None else parts_of(tiles * kv_heads, len(context), q.device)
    parts = bound_parts(parts, rows * heads * head_dim)
    split, part_tokens = parts > 1, NEAR_PART_TOKENS
    if after is None:
        part_tokens = triton.cdiv(triton.cdiv(len(context), parts), shape.keys) * shape.keys
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    partial = torch.empty((parts, rows, heads, head_dim) if split else (1,), dtype=torch.float32, device=q.device)
    sums = torch.empty((parts, rows, heads, 2) if split else (1,), dtype=torch.float32, device=q.device)
    shapes = {"HEADS": heads, "HEAD_DIM": head_dim, "DIMS": max(16, triton.next_power_of_2(head_dim))}
    _attention_kernel[(tiles, kv_heads, parts)](
        q,
        positions,
        context,
        pool_k,
        pool_v,
        out,
        partial,
        sums,
        q if after is None else after.out.contiguous(),
        sums if after is None else after.logsumexp.contiguous(),
        positions if after is None else after.first,
        rows,
        len(context),
        part_tokens,
        scale,
        q.stride(0),
        q.stride(1),
        *pool_k.stride()[:3],
        GROUP=group,
        BLOCK_TOKENS=pool_k.shape[1],
        TILE=shape.tile,
        KEYS=shape.keys,
        SPLIT=split,
        GOES_ON=after is not None,
        WIDEN=q.device.type == "cpu" and q.dtype == torch.bfloat16,  # the interpreter multiplies bfloat16 bit patterns
        **shapes,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if split:
        numbers, goes_on = (len(context), parts, part_tokens), after is not None
        _join_kernel[(rows, heads)](
            partial, sums, positions, out, *numbers, SOME=JOINED_AT_ONCE, GOES_ON=goes_on, **shapes, num_warps=1
        )
    return out


def as_blocks(pool: Tensor) -> Tensor:
    """A layer of a pool with its slots in blocks; rows without blocks become blocks of one."""
    return pool.unsqueeze(1) if pool.dim() == 3 else pool


def check_attention(q: Tensor, positions: Tensor, context: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes only: positions and slots stay on the device, and whoever made the rows vouches for them."""
    pool = as_blocks(k)
    if q.dim() != 3 or pool.dim() != 4 or k.shape != v.shape or k.stride() != v.stride():
        raise InputError(
            f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}",
            hint="expected [n, heads, d] and two alike of [slots, kv_heads, d]",
        )
    if q.shape[2] != pool.shape[3] or q.shape[1] % pool.shape[2] or q.dtype != k.dtype or v.dtype != k.dtype:
        raise InputError(
            f"queries {list(q.shape)} {q.dtype} over keys {list(k.shape)} {k.dtype}",
            hint="same head size and type; heads are a multiple of kv_heads",
        )
    if positions.shape != (q.shape[0],) or context.dim() != 1 or positions.is_floating_point():
        raise InputError(
            f"{q.shape[0]} rows, positions {list(positions.shape)}, context {list(context.shape)}",
            hint="one position for each row, and a flat list of slots",
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Queries and keys of a tile, warps, and keys loaded ahead."""

    tile: int
    keys: int
    warps: int
    stages: int


NEAR_PARTS, NEAR_PART_TOKENS = 16, 512
"""Rows that go on from what others have done walk to their own keys in so many parts at most, none shorter."""
JOINED_AT_ONCE = 16


def _choose_shape(head_dim: int, dtype: torch.dtype, queries: int, device: torch.device, *, goes_on: bool) -> _Shape:
    """Measured on an H200 (`research/vllm/attention_shapes.py`)."""
    if dtype == torch.float32 or head_dim > 128:
        return _Shape(32, 32, 4, 2)
    if goes_on or queries < 4096 or near_memory(device) < MUCH_NEAR_MEMORY:
        return _Shape(64, 64, 4, 3)
    return _Shape(128, 128, 8, 3)


@cache
def near_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


PARTIAL_BYTES = 128 << 20
"""What the partial sums of one call may take: recorded passes of 64 rows over a million tokens would take 0.94 GB."""


def bound_parts(parts: int, numbers: int) -> int:
    """As many of the parts as fit into memory with so many numbers each, of 4 bytes.

    >>> bound_parts(128, 64 * 28 * 128), bound_parts(1024, 64 * 28 * 128)
    (128, 146)
    """
    return max(1, min(parts, PARTIAL_BYTES // (4 * numbers)))


def parts_of(programs: int, tokens: int, device: torch.device) -> int:
    """Into how many parts the context is cut: one if two programs a multiprocessor are there anyway, else enough for
    three, and none shorter than 1,024 tokens; measured on an H200, where a cut past that costs more than it gains.
    """
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = 1 if programs >= 2 * processors else -(-3 * processors // programs)
    return max(1, min(wanted, tokens // 1024))


def recorded_parts(rows: int, heads: int, kv_heads: int, longest: int) -> int:
    """Into how many parts the context is cut where a pass is recorded, for prompts of up to ``longest`` tokens.

    A recording does not know how long its prompt will be: cut by the longest one, the few parts that a short prompt
    reaches would leave a GPU idle (64 rows of 12 heads among 8,192 tokens: 31 us a layer in parts of 512, 43 of 1,024).

    >>> recorded_parts(64, 12, 2, 25_088), recorded_parts(448, 28, 4, 25_088)
    (49, 3)
    """
    programs = triton.cdiv(rows * heads // kv_heads, 64) * kv_heads
    return max(1, longest // max(512, int(triton.next_power_of_2(32 * programs))))


# -- Triton kernels for the attention that a question pays to every key, summed over its rows and heads.
#
# The plain twin, ``observers.add_attention``, writes down every weight. Here none leaves the chip: the first kernel
# finds each row's highest score and the mass under it, part of the context by part; the second walks over the keys,
# computes the weights again, and adds them up.


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q, k, context, packed, key, rows, reach, scale, q_row, q_head, strides, kv, dim,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WIDEN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Of a tile of packed queries with some keys, in base 2; minus infinity where a row would look ahead."""
    kv_block, kv_token, kv_head = strides
    row, head, live = packed // GROUP, kv * GROUP + packed % GROUP, packed < rows * GROUP
    real = live[:, None] & (dim < HEAD_DIM)[None, :]
    asked = tl.load(q + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + dim[None, :], mask=real, other=0.0)
    asked = asked.to(tl.float32) if WIDEN else asked
    slot = tl.load(context + key, mask=key < reach, other=0).to(tl.int64)
    place = slot // BLOCK_TOKENS * kv_block + slot % BLOCK_TOKENS * kv_token + kv * kv_head
    keys = heads_at(k, place, dim, HEAD_DIM, WIDEN)
    scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
    return tl.where(live[:, None] & (key[None, :] <= (reach - rows + row)[:, None]), scores, float("-inf"))


@triton.jit(do_not_specialize=["rows", "reach", "parts"], do_not_specialize_on_alignment=["q", "context", "starts"])
def _peaks_kernel(  # type: ignore[no-untyped-def]
    q, context, k, starts, sums, rows, reach, parts, part_tokens, scale, q_layer, q_row, q_head,
    kv_block, kv_token, kv_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr, DIMS: tl.constexpr, WIDEN: tl.constexpr, STEP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    kv, layer = tl.program_id(1), tl.program_id(2) // parts
    part = tl.program_id(2) % parts
    q += layer.to(tl.int64) * q_layer
    k += tl.multiple_of(tl.load(starts + 2 * layer), STEP)
    sums += layer.to(tl.int64) * parts * tl.num_programs(1) * rows * GROUP * 2
    packed = tl.program_id(0) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, DIMS)
    strides = (kv_block, kv_token, kv_head)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    for at in range(part * part_tokens, tl.minimum(reach, (part + 1) * part_tokens), KEYS):
        scores = _scores(
            q, k, context, packed, at + tl.arange(0, KEYS), rows, reach, scale, q_row, q_head, strides, kv, dim,
            GROUP, HEAD_DIM, BLOCK_TOKENS, WIDEN,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp2(peak - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        peak = higher
    place = ((part * tl.num_programs(1) + kv) * rows * GROUP + packed) * 2
    tl.store(sums + place, peak, mask=packed < rows * GROUP)
    tl.store(sums + place + 1, mass, mask=packed < rows * GROUP)


@triton.jit(
    do_not_specialize=["rows", "reach", "parts"], do_not_specialize_on_alignment=["q", "context", "starts", "found"]
)
def _mass_kernel(  # type: ignore[no-untyped-def]
    q, context, k, starts, sums, found, rows, reach, parts, scale, share, q_layer, q_row, q_head,
    kv_block, kv_token, kv_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, WIDEN: tl.constexpr, STEP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    layer = tl.program_id(1)
    q += layer.to(tl.int64) * q_layer
    k += tl.multiple_of(tl.load(starts + 2 * layer), STEP)
    sums += layer.to(tl.int64) * parts * KV_HEADS * rows * GROUP * 2
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, DIMS)
    strides = (kv_block, kv_token, kv_head)
    total = tl.zeros([KEYS], tl.float32)
    for kv in range(KV_HEADS):
        for begin in range(0, rows * GROUP, TILE):
            packed = begin + tl.arange(0, TILE)
            live = packed < rows * GROUP
            peak = tl.full([TILE], float("-inf"), tl.float32)
            mass = tl.zeros([TILE], tl.float32)
            for part in range(parts):
                place = ((part * KV_HEADS + kv) * rows * GROUP + packed) * 2
                theirs = tl.load(sums + place, mask=live, other=0.0)
                higher = tl.maximum(peak, theirs)
                mass *= tl.exp2(peak - higher)
                mass += tl.load(sums + place + 1, mask=live, other=1.0) * tl.exp2(theirs - higher)
                peak = higher
            scores = _scores(
                q, k, context, packed, key, rows, reach, scale, q_row, q_head, strides, kv, dim,
                GROUP, HEAD_DIM, BLOCK_TOKENS, WIDEN,
            )  # fmt: skip
            total += tl.sum(tl.exp2(scores - peak[:, None]) / mass[:, None], 0)
    tl.store(found + layer.to(tl.int64) * reach + key, total * share, mask=key < reach)


def measure_question_mass(q: Tensor, context: Tensor, layout: KvLayout) -> Tensor:
    """The attention that ``q[layers, n, heads, d]`` pays to every key of ``context`` (slots), summed over all layers.

    As ``observers.add_attention`` for each, in two launches: a pair a layer would take longer to start than to run.
    """
    layers, rows, heads, head_dim = q.shape
    kv_heads, reach = layout.kv_heads, len(context)
    group = heads // kv_heads
    q = q if q.stride(3) == 1 else q.contiguous()
    tile = _tile(head_dim, q.dtype, q.device)
    tiles = triton.cdiv(rows * group, tile)
    parts = parts_of(tiles * kv_heads * layers, reach, q.device)
    part_tokens = triton.cdiv(triton.cdiv(reach, parts), tile) * tile
    sums = torch.empty((layers, parts, kv_heads, rows * group, 2), dtype=torch.float32, device=q.device)
    found = torch.empty((layers, reach), dtype=torch.float32, device=q.device)
    kv_strides = layout.k[0].stride()[:3]
    strides = (*q.stride()[:3], *kv_strides)
    numbers = (*layout.layer_starts[:, 0].tolist(), *kv_strides)
    shapes = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_TOKENS": layout.block_tokens,
        "STEP": 8 if all(number % 8 == 0 for number in numbers) else 1,
        "TILE": tile,
        "KEYS": tile,
        "DIMS": max(16, triton.next_power_of_2(head_dim)),
        "num_stages": 2 if tile == 32 else 3,
        "WIDEN": q.device.type == "cpu" and q.dtype == torch.bfloat16,  # the interpreter multiplies bit patterns
    }
    scale = head_dim**-0.5
    starts = copy_to_device(torch.from_numpy(layout.layer_starts), q.device)
    pool, share = layout.k[0], 1 / (rows * heads)
    _peaks_kernel[(tiles, kv_heads, layers * parts)](
        q, context, pool, starts, sums, rows, reach, parts, part_tokens, scale, *strides, **shapes
    )
    _mass_kernel[(triton.cdiv(reach, tile), layers)](
        q, context, pool, starts, sums, found, rows, reach, parts, scale, share, *strides, KV_HEADS=kv_heads, **shapes
    )
    return found.sum(0)


def _tile(head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Queries and keys at once; measured on an H200."""
    if dtype == torch.float32 or head_dim > 128:
        return 32
    return 128 if near_memory(device) >= MUCH_NEAR_MEMORY else 64
