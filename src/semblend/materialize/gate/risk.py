"""From what passes show of themselves to the divergence that an answer is likely to have.

Three signs, all of them by-products of a repair: how far it moved the next-token distribution, how far the donor's KV
of the tokens just computed had been off, and how undecided the model is. Alone, the first ranks the true damage worse
than the three together (docs/decisions/0021-quality-gate.md). How they weigh is measured for each model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.errors import ConfigError

LOOK_EVERY = 4
"""The deviation of repaired tokens is looked at in every fourth layer: all of them say the same at more cost."""
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Signs:
    """What a repair shows, in nats but for ``deviation``, which is relative to the size of KV.

    ``moved`` is the divergence of the next-token distribution now from that of the first look, ``settled`` from that of
    the pass before.
    """

    moved: float
    settled: float
    deviation: float
    entropy: float

    @property
    def features(self) -> tuple[float, float, float, float]:
        """Logarithms of what spans decades, and a one for the constant."""
        return math.log(max(self.moved, _LEAST)), math.log(max(self.deviation, _LEAST)), self.entropy, 1.0


@dataclass(frozen=True, slots=True)
class RiskModel:
    """Expected divergence from cold, in nats: ``exp(weights . features)``, weights for each step in percent.

    A step without weights is judged by whether the distribution still moves.

    >>> RiskModel({10: (1.0, 0.0, 0.0, 0.0)}).expected(10, Signs(moved=.25, settled=.2, deviation=.1, entropy=2.0))
    0.25
    """

    weights: Mapping[int, tuple[float, ...]]

    def __post_init__(self) -> None:
        for step, weights in self.weights.items():
            if len(weights) != 4 or not all(map(math.isfinite, weights)):
                raise ConfigError(f"the risk model for {step} % has weights {weights}", hint="give four numbers")

    def expected(self, step: int, signs: Signs) -> float:
        weights = self.weights.get(step)
        if weights is None or not math.isfinite(signs.moved):
            return signs.settled
        return math.exp(min(20.0, sum(w * f for w, f in zip(weights, signs.features, strict=True))))


def fitted(seen: Sequence[tuple[Signs, float]], ridge: float = 1e-3) -> tuple[float, ...]:
    """Weights by least squares on the logarithm of the true divergence."""
    features = np.array([signs.features for signs, _ in seen])
    target = np.log(np.array([true for _, true in seen]) + 1e-5)
    weights = np.linalg.solve(features.T @ features + ridge * np.eye(features.shape[1]), features.T @ target)
    return tuple(float(w) for w in weights)


class RepairedDeviation:
    """How far rows' KV in the pool is from what a pass computes for them, mean of some layers.

    Passes on to ``inner`` what that wants to see, so that one pass serves both.
    """

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner
        self._chunks: list[list[Tensor]] = []
        if hasattr(inner, "on_weights"):
            self.on_weights = inner.on_weights

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Any, pool: Any) -> None:
        if self._inner is not None:
            self._inner.before_write(layer, k, v, rows, pool)
        if layer == 0:
            self._chunks.append([])
        if layer % LOOK_EVERY == LOOK_EVERY // 2:
            self._chunks[-1].append(relative_deviation(k, v, rows.slots, pool, layer))

    def on_layer(self, layer: int, q: Tensor, rows: Any, pool: Any) -> None:
        if self._inner is not None:
            self._inner.on_layer(layer, q, rows, pool)

    def of(self, at: npt.NDArray[np.bool_], weight: npt.NDArray[np.floating[Any]]) -> float:
        """Mean over the rows that ``at`` marks, by ``weight``."""
        chunks = [torch.stack(chunk).mean(0) for chunk in self._chunks if chunk]
        if not chunks or not at.any() or not weight.sum() > 0:
            return 0.0
        found = torch.cat(chunks).cpu().numpy()[at]
        return float((found * weight).sum() / weight.sum())


def relative_deviation(k: Tensor, v: Tensor, slots: Tensor, pool: Any, layer: int) -> Tensor:
    """Of each row, K and V together: root of the sum of their relative squared distances; at most 2."""
    total = torch.zeros(len(k), device=k.device)
    for computed, held in ((k, pool.k[layer]), (v, pool.v[layer])):
        was = held.index_select(0, slots).float()
        total += (computed.float() - was).square().sum((1, 2)) / was.square().sum((1, 2)).clamp_min(_LEAST)
    return total.clamp_max(4.0).sqrt()


def entropy(logits: Tensor) -> float:
    """Of one distribution, in nats.

    >>> round(entropy(torch.zeros(4)) / math.log(4), 6)
    1.0
    """
    logs = logits.float().log_softmax(-1)
    return float(-(logs.exp() * logs).nan_to_num().sum())
