"""The shortest engine that satisfies `semblend.materialize.contract`: a tiny transformer, computed row by row.

For tests, and to read before writing an adapter. Nothing is fast here: every row gathers its whole context, asks every
head of it, and writes through the layout. Weights are drawn from a seed, so two engines with one seed are one model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from semblend.materialize.contract import Capabilities, KvLayout, Layout, Observer, Rows
from semblend.materialize.kv.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class NaiveLayer:
    """One layer's projections, each ``[hidden, hidden]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    mix: Tensor


@dataclass(eq=False)
class NaiveEngine:
    """A model over a cache of its own. ``passes`` lists the positions of every pass, for tests."""

    layout: Layout
    rope: RopeSpec
    table: Tensor
    layers: tuple[NaiveLayer, ...]
    capabilities: Capabilities = field(default_factory=Capabilities)
    passes: list[list[int]] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        *,
        slots: int = 256,
        layers: int = 3,
        heads: int = 2,
        head_dim: int = 8,
        vocabulary: int = 32,
        seed: int = 1,
        layout: Layout | None = None,
        capabilities: Capabilities | None = None,
    ) -> NaiveEngine:
        """An engine with as many slots; ``layout`` puts its KV somewhere else."""
        generator, hidden = torch.Generator().manual_seed(seed), heads * head_dim

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5)

        made = tuple(NaiveLayer(*(draw(hidden, hidden) for _ in range(5))) for _ in range(layers))
        pool = torch.zeros(2, layers, slots, heads, head_dim)
        place = KvLayout.of_pool(pool[0], pool[1]) if layout is None else layout
        table = torch.randn(vocabulary, hidden, generator=generator)
        return cls(place, RopeSpec.plain(head_dim), table, made, capabilities or Capabilities())

    @property
    def device(self) -> torch.device:
        return self.layout.device

    def forward(self, rows: Rows, observer: Observer | None = None) -> Tensor:
        """Computes the rows through all layers; see `contract.Model`."""
        self.passes.append(rows.host_positions.tolist())
        look = Observer() if observer is None or not self.capabilities.observers else observer
        shape = (len(rows), self.layout.kv_heads, self.layout.head_dim)
        cos, sin = self.rope.cos_sin(rows.positions)
        hidden = self.table[rows.tokens % len(self.table)]
        for number, layer in enumerate(self.layers):
            x = _normalize(hidden)
            q, k = (self.rope.rotate((x @ w).view(shape), cos, sin) for w in (layer.q, layer.k))
            v = (x @ layer.v).view(shape)
            look.before_write(number, k, v, rows, self.layout)
            self.layout.scatter(number, rows.slots, k, v)
            look.on_layer(number, q, rows, self.layout)
            hidden = hidden + self._attend(number, q, rows).flatten(1) @ layer.out
            hidden = hidden + torch.tanh(_normalize(hidden) @ layer.mix)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return _normalize(hidden) @ self.table.T

    def agree(self, values: Tensor, how: str) -> Tensor:
        del how  # one rank is always of its own opinion
        return values

    def _attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        """Each row over every position of its prompt up to its own."""
        found, positions = torch.empty_like(q), rows.host_positions.tolist()
        keys, values = self.layout.gather(layer, rows.context[: max(positions, default=-1) + 1])
        for row, position in enumerate(positions):
            scores = torch.einsum("hd,thd->ht", q[row], keys[: position + 1]) * q.shape[-1] ** -0.5
            found[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values[: position + 1])
        return found


def _normalize(x: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
