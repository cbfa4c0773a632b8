"""What an engine must offer so that our blender can work in its KV cache, and a fake that offers it.

Two things, no more: a `Layout` (where the key and value of a slot lie) and a `Stack` (its own model, which computes
rows of a prompt and writes their KV through that layout, watched by an observer). Everything above is shared:
`PagedPool` makes the layout look like the embedded engine's pool, `EngineRows` says what one pass computes, and
`PagedBlender` is the blender itself. An adapter for a new engine is these two objects and the hooks that call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from semblend.materialize.blend.blend_state import runs_of
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.blend.queueing import QueueingBlender
from semblend.materialize.donors.donor_kv import DonorKv
from semblend.materialize.kv.host_memory import sent
from semblend.materialize.kv.layout import KvLayout
from semblend.materialize.kv.rope import RopeSpec


class Layout(Protocol):
    """Keys and values by slot, ``[n, kv_heads, head_dim]``; `KvLayout` is one."""

    @property
    def layers(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]: ...
    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The little that is asked about a model besides running it."""

    rope: RopeSpec


class Stack(Protocol):
    """The engine's model over its own cache; an observer may end a pass early by raising `Enough`.

    Where several ``ranks`` compute it together, all call it alike, and ``agreed`` gives each the mean or the largest of
    what they say.
    """

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def ranks(self) -> int: ...
    def agreed(self, values: Tensor, how: str) -> Tensor: ...
    def forward(self, rows: EngineRows, pool: PagedPool, observer: Any = None) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """The whole pass belongs to one prompt, whose position ``p`` lies in slot ``context[p]``."""

    context: Tensor


@dataclass(frozen=True, slots=True)
class Extent:
    """How far the last row sees; ``slots_from`` is None because pages need not be adjacent."""

    reach: int
    slots_from: None = None


@dataclass(frozen=True)
class EngineRows:
    """Some positions of one prompt, ascending, and the slots their KV is written to.

    >>> EngineRows.of(torch.tensor([7, 9, 9]), torch.tensor([0, 2, 3]), torch.arange(8)).runs
    ((0, 1), (2, 4))
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    context: Tensor

    @classmethod
    def of(cls, tokens: Tensor, positions: Tensor, context: Tensor) -> EngineRows:
        there = sent(positions, context.device)
        rows = cls(sent(tokens, context.device), there, context[there], context)
        if positions.device.type == "cpu":
            rows.__dict__["host_positions"] = positions  # known already: no wait for a GPU to say it
        return rows

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def host_positions(self) -> Tensor:
        return self.positions.cpu()

    @cached_property
    def segments(self) -> tuple[Segment]:
        return (Segment(self.context),)

    @cached_property
    def extents(self) -> tuple[Extent]:
        return (Extent(int(self.host_positions[-1]) + 1),)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Positions without a hole between them, half-open: each is a stretch of ordinary chunked prefill."""
        return runs_of(self.host_positions.numpy())


class _Layer:
    """One layer's keys or values; reads like a tensor ``[slots, kv_heads, head_dim]`` as far as we read it."""

    def __init__(self, layout: Layout, layer: int, part: int) -> None:
        self._layout, self._layer, self._part = layout, layer, part

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        assert dim == 0, "rows of a layer are its slots"
        if not isinstance(self._layout, KvLayout):
            return self._layout.gather(self._layer, index)[self._part]
        pages = (self._layout.k, self._layout.v)[self._part][self._layer]
        size = self._layout.block_tokens
        if (blocks := _whole_blocks(index, size)) is not None:
            return pages.index_select(0, blocks).flatten(0, 1)[: len(index)]
        return pages[index // size, index % size]


def _whole_blocks(slots: Tensor, block_tokens: int) -> Tensor | None:
    """The blocks, where the slots are all of theirs in order (but for the end of the last); None where they are not.

    Page by page a CPU copies several times faster than row by row. A GPU does not care, and asking it costs a wait.
    """
    if slots.device.type != "cpu" or len(slots) < block_tokens or block_tokens == 1:
        return None
    blocks = slots[::block_tokens] // block_tokens
    expected = (blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()[: len(slots)]
    return blocks if torch.equal(expected, slots) else None


class _Part:
    """All keys or all values; reads like ``[layers, slots, kv_heads, head_dim]``."""

    def __init__(self, layout: Layout, part: int) -> None:
        self._layout, self._part = layout, part
        self.shape = torch.Size((layout.layers, layout.slots, layout.kv_heads, layout.head_dim))
        self.device, self.dtype = layout.device, layout.dtype

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, layer: int) -> _Layer:
        return _Layer(self._layout, layer, self._part)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        assert dim == 1, "the second axis of a pool is its slots"
        return torch.stack([self[layer].index_select(0, index) for layer in range(self.shape[0])])


class PagedPool:
    """An engine's pages as the pool that capture, probe and blender read; whatever is written goes by the layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.k: Any = _Part(layout, 0)
        self.v: Any = _Part(layout, 1)


class PagedBlender(QueueingBlender):
    """The blender in an engine's cache: the same passes and the same gate, another layout and another model."""

    def __init__(self, stack: Stack, pool: PagedPool, donor_kv: DonorKv, settings: QualitySettings) -> None:
        layout: Any = pool.layout  # as much of a `KvLayout` as splicing asks for
        agree = stack.agreed if stack.ranks > 1 else None
        super().__init__(stack, pool, donor_kv, settings, rows_of=EngineRows.of, layout=layout, agree=agree)


@dataclass
class FakeStack:
    """A model small enough to check by hand: KV of a row is a function of the tokens up to it, rotated like a real one.

    Layer 0 depends on the token alone, later layers on a running mean of what lies before in the cache, so that moved
    KV is exact at layer 0 and approximate above, as in a transformer. ``passes`` lists the positions of every pass.
    """

    layout: KvLayout
    spec: ModelSpec
    vocabulary: int = 32
    passes: list[list[int]] = field(default_factory=list)
    ranks: int = 1

    def agreed(self, values: Tensor, how: str) -> Tensor:
        del how  # one rank is always of its own opinion
        return values

    @classmethod
    def make(cls, slots: int = 256, layers: int = 3, kv_heads: int = 2, head_dim: int = 8) -> FakeStack:
        pool = torch.zeros(2, layers, slots, kv_heads, head_dim)
        return cls(KvLayout.ours(pool[0], pool[1]), ModelSpec(RopeSpec.plain(head_dim)))

    def forward(self, rows: EngineRows, pool: PagedPool, observer: Any = None) -> Tensor:
        self.passes.append(rows.host_positions.tolist())
        rope, heads, dim = self.spec.rope, self.layout.kv_heads, self.layout.head_dim
        hidden = self._embedded(rows.tokens)
        cos, sin = rope.cos_sin(rows.positions)
        for layer in range(self.layout.layers):
            k = rope.rotate(hidden.view(-1, heads, dim), cos, sin)
            v = hidden.view(-1, heads, dim) * (layer + 1)
            if observer is not None:
                observer.before_write(layer, k, v, rows, pool)
            self.layout.scatter(layer, rows.slots, k, v)
            if observer is not None:
                observer.on_layer(layer, k, rows, pool)
            hidden = hidden + 0.1 * self._seen(layer, rows)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._table().T

    def _seen(self, layer: int, rows: EngineRows) -> Tensor:
        values = self.layout.gather(layer, rows.context)[1].flatten(1)
        mean = values.cumsum(0) / torch.arange(1, len(values) + 1)[:, None]
        return mean[rows.positions]

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._table()[tokens % self.vocabulary]

    def _table(self) -> Tensor:
        width = self.layout.kv_heads * self.layout.head_dim
        return torch.randn(self.vocabulary, width, generator=torch.Generator().manual_seed(1))


def slots_of(block_ids: Sequence[int], block_tokens: int, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """The slots of positions 0 … ``tokens`` of a prompt that lies in these blocks.

    >>> slots_of([5, 2], block_tokens=4, tokens=6).tolist()
    [20, 21, 22, 23, 8, 9]
    """
    blocks = sent(torch.from_numpy(np.array(block_ids, dtype=np.int64)), torch.device(device))
    slots = blocks[:, None] * block_tokens + torch.arange(block_tokens, device=device)
    return slots.flatten()[:tokens]
