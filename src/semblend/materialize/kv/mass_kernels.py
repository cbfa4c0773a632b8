"""Triton kernels for the attention that a question pays to every key, summed over its rows and heads.

Imported only where they run (a GPU, or Triton's interpreter in the tests); the plain twin is ``probe.add_attention``,
which writes down every weight. Here none leaves the chip: the first kernel finds each row's highest score and the mass
under it, part of the context by part; the second walks over the keys, computes the weights again, and adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semblend.materialize.kv.attention_kernels import LOG2_E, MUCH_NEAR_MEMORY, heads_at, near_memory, parts_of
from semblend.materialize.kv.attention_plain import as_blocks


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


@triton.jit(do_not_specialize=["rows", "reach"], do_not_specialize_on_alignment=["q", "context"])
def _peaks_kernel(  # type: ignore[no-untyped-def]
    q, context, k, sums, rows, reach, part_tokens, scale, q_row, q_head, kv_block, kv_token, kv_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr, DIMS: tl.constexpr, WIDEN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    kv, part = tl.program_id(1), tl.program_id(2)
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


@triton.jit(do_not_specialize=["rows", "reach", "parts"], do_not_specialize_on_alignment=["q", "context", "total"])
def _mass_kernel(  # type: ignore[no-untyped-def]
    q, context, k, sums, total, rows, reach, parts, scale, share, q_row, q_head, kv_block, kv_token, kv_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, WIDEN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, DIMS)
    strides = (kv_block, kv_token, kv_head)
    found = tl.zeros([KEYS], tl.float32)
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
            found += tl.sum(tl.exp2(scores - peak[:, None]) / mass[:, None], 0)
    there = key < reach
    tl.store(total + key, tl.load(total + key, mask=there, other=0.0) + found * share, mask=there)


def add_question_mass(total: Tensor, q: Tensor, context: Tensor, k: Tensor) -> None:
    """As ``probe.add_attention``, with the keys of ``context`` (slots) where they lie in a layer ``k`` of a pool."""
    rows, heads, head_dim = q.shape
    pool = as_blocks(k)
    kv_heads, reach = pool.shape[2], len(context)
    group = heads // kv_heads
    q = q if q.stride(2) == 1 else q.contiguous()
    tile = _tile(head_dim, q.dtype, q.device)
    tiles = triton.cdiv(rows * group, tile)
    parts = parts_of(tiles * kv_heads, reach, q.device)
    part_tokens = triton.cdiv(triton.cdiv(reach, parts), tile) * tile
    sums = torch.empty((parts, kv_heads, rows * group, 2), dtype=torch.float32, device=q.device)
    strides = (q.stride(0), q.stride(1), *pool.stride()[:3])
    shapes = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_TOKENS": pool.shape[1],
        "TILE": tile,
        "KEYS": tile,
        "DIMS": max(16, triton.next_power_of_2(head_dim)),
        "num_stages": 2 if tile == 32 else 3,
        "WIDEN": q.device.type == "cpu" and q.dtype == torch.bfloat16,  # the interpreter multiplies bit patterns
    }
    scale = head_dim**-0.5
    _peaks_kernel[(tiles, kv_heads, parts)](q, context, pool, sums, rows, reach, part_tokens, scale, *strides, **shapes)
    share = 1 / (rows * heads)
    _mass_kernel[(triton.cdiv(reach, tile),)](
        q, context, pool, sums, total, rows, reach, parts, scale, share, *strides, KV_HEADS=kv_heads, **shapes
    )


def _tile(head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Queries and keys at once; measured on an H200."""
    if dtype == torch.float32 or head_dim > 128:
        return 32
    return 128 if near_memory(device) >= MUCH_NEAR_MEMORY else 64
