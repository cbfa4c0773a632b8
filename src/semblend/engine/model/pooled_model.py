"""The embedded model over its pool, as `semblend.materialize.contract` wants a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semblend.engine.model.model import DecoderModel
from semblend.engine.model.paged_kv import KvPool
from semblend.materialize.contract import Capabilities, KvLayout, Observer, Rows
from semblend.materialize.kv.rope import RopeSpec


@dataclass(frozen=True, slots=True, eq=False)
class PooledModel:
    """A model and the pool it computes in; translates and does not think."""

    model: DecoderModel
    pool: KvPool
    capabilities: ClassVar[Capabilities] = Capabilities(native_spans=True)

    @property
    def layout(self) -> KvLayout:
        return self.pool.layout

    @property
    def rope(self) -> RopeSpec:
        return self.model.spec.rope

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def forward(self, rows: Rows, observer: Observer | None = None) -> Tensor:
        return self.model.forward(rows, self.pool, observer)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def agree(self, values: Tensor, how: str) -> Tensor:
        del how  # there is one rank
        return values
