"""Attention of rows over the paged pool: every row sees the positions of its sequence up to its own.

`attend` picks the cheapest way for each segment; the tests hold it to a gather and a masked softmax in float32.

| rows of the segment        | CPU                               | CUDA                                   |
|----------------------------|-----------------------------------|----------------------------------------|
| all from position 0        | causal SDPA                       | causal SDPA                            |
| an unbroken later stretch  | SDPA twice, joined (watched: tiles) | SDPA, causal from the lower right    |
| one row (decode)           | SDPA without a mask               | the same; of many: in padded batches   |
| scattered                  | tiles of rows                     | the Triton kernel, else as on the CPU  |

Tiles. Rows ascend by position, so neighbours see nearly the same keys: all of a tile's rows see those up to its first
row, and only the few between its first and its last row need a mask. In float32 a tile is two plain matrix products
around a softmax, in one buffer that stays in the cache; half precision goes through SDPA, which sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from semblend.engine.model.paged_kv import KvPool
from semblend.materialize.attention_runs import attend_runs
from semblend.materialize.contract import Rows

# -- The rows of one step of the engine: those of several prompts, side by side in one forward pass.


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[start, end)`` of a batch: those of one prompt, whose position ``p`` lies in pool slot ``context[p]``.

    ``first`` and ``last`` are positions, known on the host without asking the device again. ``slots_from`` is the first
    slot of the context where its slots ascend one by one, so that its K and V need no gathering; None elsewhere.
    """

    start: int
    end: int
    context: Tensor
    first: int
    last: int
    slots_from: int | None

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def reach(self) -> int:
        """How many positions the segment's last row attends to."""
        return self.last + 1

    @property
    def unbroken(self) -> bool:
        """No gaps between the rows: prefill, a later chunk of a prefill, or a decode step."""
        return self.last - self.first + 1 == len(self)


@dataclass(frozen=True)
class RowBatch:
    """The rows of one or more prompts, one after another; each prompt's rows ascend by position."""

    parts: tuple[Rows, ...]

    @classmethod
    def of(cls, parts: Rows | Sequence[Rows]) -> RowBatch:
        """The rows of one prompt, or those of several in this order."""
        return cls((parts,) if isinstance(parts, Rows) else tuple(parts))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def tokens(self) -> Tensor:
        return self._join([part.tokens for part in self.parts])

    @cached_property
    def positions(self) -> Tensor:
        return self._join([part.positions for part in self.parts])

    @cached_property
    def slots(self) -> Tensor:
        return self._join([part.slots for part in self.parts])

    @cached_property
    def host_positions(self) -> Tensor:
        """Positions in host memory; on a GPU this waits for the device once per pass, not once per layer."""
        return self._join([part.host_positions for part in self.parts])

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """One per prompt."""
        found, start = [], 0
        for part in self.parts:
            first, last = int(part.host_positions[0]), part.reach - 1
            end = start + len(part)
            found.append(Segment(start, end, part.context, first, last, _slots_from(part.context[: last + 1])))
            start = end
        return tuple(found)

    @property
    def last_rows(self) -> list[int]:
        """The row of each prompt that predicts the next token."""
        return [segment.end - 1 for segment in self.segments]

    @cached_property
    def scratch(self) -> dict[object, object]:
        """What attention makes once a pass and uses in every layer."""
        return {}

    def check(self) -> None:
        """Raise `InputError` where the rows contradict their own rules; for tests and for debugging."""
        for part in self.parts:
            part.check()

    def _join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def _slots_from(context: Tensor) -> int | None:
    """The first slot where the context is one ascending run of slots: then its K and V need no gathering."""
    if context.device.type != "cpu":  # asking a GPU would cost more than the copy it saves
        return None
    first = int(context[0])
    if int(context[-1]) - first != len(context) - 1:
        return None
    return first if bool((context[1:] - context[:-1] == 1).all()) else None


# Scores of a tile: 8 MiB in float32. Of 4, 8 and 16 MiB (9 heads, 4,096 keys, one core) 4 was slower, 16 no faster.
TILE_SCORES = 1 << 21
MAX_TILE_ROWS = 64
# A tile's last row sees at most this many times the keys of its first: further ones would be computed in vain.
MAX_GROWTH = 1.5
# Padded decode batches gather at most this many K rows at once.
DECODE_ROWS = 1 << 19


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows ``[start, end)`` of a segment: all see ``seen`` keys, the last sees ``reach``.

    ``mask`` is ``[rows, reach - seen]``, to be added to the scores behind ``seen``; None where nothing is hidden.
    """

    start: int
    end: int
    seen: int
    reach: int
    mask: Tensor | None


OnWeights = Callable[[Tensor, int], None]
"""Told ``weights[heads, some rows, keys]`` and the first of these rows; read at once, for the buffer is used again."""


def attend(q: Tensor, layer: int, rows: RowBatch, pool: KvPool, on_weights: OnWeights | None = None) -> Tensor:
    """``q[n, heads, head_dim]`` -> ``[n, heads * head_dim]``; the rows' K and V are already in the pool.

    ``on_weights`` hears the weights of all rows; only where `shows_weights` says that there are any.
    """
    n, heads, head_dim = q.shape
    if len(rows.segments) == 1:
        return _attend_segment(q, layer, rows, 0, pool, on_weights).reshape(n, heads * head_dim)
    out = q.new_empty(n, heads, head_dim)
    decoding: list[int] = []
    for at, segment in enumerate(rows.segments):
        if len(segment) == 1 and q.is_cuda:
            decoding.append(at)
            continue
        span = slice(segment.start, segment.end)
        out[span] = _attend_segment(q[span], layer, rows, at, pool)
    if decoding:
        _decode_batches(q, out, layer, rows, decoding, pool)
    return out.view(n, heads * head_dim)


def shows_weights(q: Tensor, rows: RowBatch) -> bool:
    """Whether `attend` computes weights that one can look at: one sequence that goes in tiles of plain products."""
    return len(rows.segments) == 1 and _goes_in_tiles(q, rows.segments[0])


def _goes_in_tiles(q: Tensor, segment: Segment) -> bool:
    whole = segment.unbroken and segment.first == 0
    return q.dtype == torch.float32 and q.device.type == "cpu" and len(segment) > 1 and not whole


def _attend_segment(
    q: Tensor, layer: int, rows: RowBatch, at: int, pool: KvPool, on_weights: OnWeights | None = None
) -> Tensor:
    """``[n, heads, head_dim]`` of the rows of segment ``at``."""
    segment = rows.segments[at]
    if q.is_cuda and not segment.unbroken and (kernel := _kernel()) is not None:
        positions, context = rows.positions[segment.start : segment.end], segment.context[: segment.reach]
        return kernel(q, positions, context, pool.k[layer], pool.v[layer], q.shape[2] ** -0.5)
    k, v = _context_kv(layer, segment, pool)
    if len(segment) == 1:
        return _one_row(q, k, v)
    if segment.unbroken and segment.first > 0 and on_weights is None and q.device.type == "cpu":
        return _attend_later_stretch(q, k, v, segment.first)
    if _goes_in_tiles(q, segment):
        return _in_tiles(q, k, v, rows, at, on_weights)
    if segment.unbroken and segment.first == 0:
        return _sdpa(q, k, v, is_causal=True)
    if segment.unbroken and q.is_cuda:
        return _lower_right(q, k, v)
    return attend_runs(q, rows.parts[at], k, v, q.shape[2] ** -0.5)


def _context_kv(layer: int, segment: Segment, pool: KvPool) -> tuple[Tensor, Tensor]:
    """K and V ``[reach, kv_heads, head_dim]``: a view where the slots are one run, a copy elsewhere."""
    if segment.slots_from is not None:
        span = slice(segment.slots_from, segment.slots_from + segment.reach)
        return pool.k[layer, span], pool.v[layer, span]
    slots = segment.context[: segment.reach]
    return pool.k[layer].index_select(0, slots), pool.v[layer].index_select(0, slots)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Grouped-query SDPA over ``q[n, heads, d]`` and ``k, v[t, kv_heads, d]`` without copying K and V.

    The KV heads take the batch axis and the group the head axis, K and V repeated by a stride of 0.
    """
    n, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    grouped = q.view(n, kv_heads, group, d).permute(1, 2, 0, 3)
    shared = (kv_heads, group, k.shape[0], d)
    out = scaled_dot_product_attention(
        grouped,
        k.transpose(0, 1)[:, None].expand(shared),
        v.transpose(0, 1)[:, None].expand(shared),
        attn_mask=mask,
        is_causal=is_causal,
    )
    return out.permute(2, 0, 1, 3).reshape(n, heads, d)


def _one_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last position sees all: no mask, and the group's heads are the queries of one KV head."""
    kv_heads, d = k.shape[1], k.shape[2]
    folded = q.view(1, kv_heads, -1, d)
    seen = scaled_dot_product_attention(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    return seen.reshape(q.shape)


def _attend_later_stretch(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Rows from position ``first`` on: over all keys before them without a mask, over their own causally, then joined.

    Two softmaxes become one by the logarithms of their sums. In chunks of 512 a prompt of 4,096 tokens takes as long as
    at once; in tiles it took 13 % longer (two Neoverse-N1 cores).
    """
    before, before_sum = _flash(q, k[:first], v[:first], is_causal=False)
    own, own_sum = _flash(q, k[first:], v[first:], is_causal=True)
    share = torch.sigmoid(before_sum - own_sum)[..., None]
    joined = torch.lerp(own.float(), before.float(), share).to(q.dtype)
    return joined.permute(2, 0, 1, 3).reshape(q.shape)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """SDPA on a CPU with the logarithm of each row's sum: ``[kv_heads, group, n, d]`` and ``[kv_heads, group, n]``."""
    n, heads, d = q.shape
    kv_heads = k.shape[1]
    shared = (kv_heads, heads // kv_heads, k.shape[0], d)
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.view(n, kv_heads, -1, d).permute(1, 2, 0, 3),
        k.transpose(0, 1)[:, None].expand(shared),
        v.transpose(0, 1)[:, None].expand(shared),
        0.0,
        is_causal,
    )
    return found


def _lower_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last rows of a sequence over all of it, through the fused causal kernel."""
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(q.shape[0], k.shape[0])
    heads = (q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    seen: Tensor = scaled_dot_product_attention(*heads, attn_mask=bias, enable_gqa=True)
    return seen[0].transpose(0, 1)


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, rows: RowBatch, at: int, on_weights: OnWeights | None = None) -> Tensor:
    """Two matrix products a tile, all heads of a KV head together, its keys read once for the whole group."""
    n, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    tiles, buffer = _tiles(rows, at, heads)
    asked = (q * d**-0.5).view(n, kv_heads, group, d).permute(1, 2, 0, 3)
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    out = q.new_empty(n, kv_heads, group, d)
    for tile in tiles:
        count, reach = tile.end - tile.start, tile.reach
        shape = (kv_heads, group * count, reach)
        scores = buffer[: kv_heads * group * count * reach].view(shape)
        torch.bmm(asked[:, :, tile.start : tile.end].reshape(*shape[:2], d), keys[..., :reach], out=scores)
        if tile.mask is not None:
            scores.view(kv_heads, group, count, reach)[..., tile.seen :].add_(tile.mask)
        torch.softmax(scores, -1, out=scores)
        if on_weights is not None:
            on_weights(scores.view(heads, count, reach), tile.start)
        found = torch.bmm(scores, values[:, :reach]).view(kv_heads, group, count, d)
        out[tile.start : tile.end] = found.permute(2, 0, 1, 3)
    return out.view(n, heads, d)


def _tiles(rows: RowBatch, at: int, heads: int) -> tuple[list[Tile], Tensor]:
    """The tiles of a segment and a buffer for the largest; made once a pass and kept by the rows."""
    kept: dict[tuple[int, int], tuple[list[Tile], Tensor]] = rows.scratch.setdefault("tiles", {})  # type: ignore[assignment]
    if (at, heads) not in kept:
        segment = rows.segments[at]
        hosts = rows.host_positions[segment.start : segment.end]
        tiles = list(_cut(hosts.tolist(), hosts, heads))
        most = max((tile.end - tile.start) * tile.reach for tile in tiles)
        kept[at, heads] = tiles, torch.empty(most * heads)
    return kept[at, heads]


def _cut(positions: Sequence[int], hosts: Tensor, heads: int) -> Iterator[Tile]:
    """Neighbours go together while they are few, their scores fit, and they see about the same."""
    start = 0
    for end in range(1, len(positions) + 1):
        seen, count = positions[start] + 1, end - start
        if end < len(positions):
            reach = positions[end] + 1
            fits = (count + 1) * heads * reach <= TILE_SCORES and count < MAX_TILE_ROWS
            if fits and reach <= MAX_GROWTH * seen + MAX_TILE_ROWS:
                continue
        reach = positions[end - 1] + 1
        hidden = torch.arange(seen, reach) > hosts[start:end, None]
        mask = torch.zeros(count, reach - seen).masked_fill_(hidden, float("-inf")) if reach > seen else None
        yield Tile(start, end, seen, reach, mask)
        start = end


def _decode_batches(q: Tensor, out: Tensor, layer: int, rows: RowBatch, decoding: list[int], pool: KvPool) -> None:
    """Single rows of many sequences: contexts padded with the scratch slot, masked, longest together."""
    order = sorted(decoding, key=lambda at: rows.segments[at].reach)
    while order:
        reach = rows.segments[order[-1]].reach
        batch, order = order[-max(1, DECODE_ROWS // reach) :], order[: -max(1, DECODE_ROWS // reach)]
        index, contexts, seen = _pad_contexts(rows, batch, reach, q.device)
        k = pool.k[layer].index_select(0, contexts.flatten()).view(len(batch), reach, *pool.k.shape[2:])
        v = pool.v[layer].index_select(0, contexts.flatten()).view(len(batch), reach, *pool.v.shape[2:])
        kv_heads, d = k.shape[2], k.shape[3]
        folded = q.index_select(0, index).view(len(batch), kv_heads, -1, d)
        found = scaled_dot_product_attention(
            folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen[:, None, None, :]
        )
        out.index_copy_(0, index, found.reshape(len(batch), *q.shape[1:]))


def _pad_contexts(rows: RowBatch, batch: list[int], reach: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers, slots ``[batch, reach]`` and which of them are seen; made once a pass and kept by the rows."""
    kept: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = rows.scratch.setdefault("padded", {})  # type: ignore[assignment]
    key = tuple(batch)
    if key not in kept:
        contexts = torch.zeros(len(batch), reach, dtype=torch.long, device=device)
        for line, at in enumerate(batch):
            length = rows.segments[at].reach
            contexts[line, :length] = rows.segments[at].context[:length]
        lengths = torch.tensor([rows.segments[at].reach for at in batch], device=device)
        seen = torch.arange(reach, device=device) < lengths[:, None]
        index = torch.tensor([rows.segments[at].start for at in batch], device=device)
        kept[key] = (index, contexts, seen)
    return kept[key]


@cache
def _kernel() -> Callable[..., Tensor] | None:
    """The Triton kernel for scattered rows; None, where Triton is not installed, asks for masked tiles instead."""
    try:
        from semblend.materialize.kv.attention_kernels import scattered_attention
    except ImportError:
        return None
    return scattered_attention
