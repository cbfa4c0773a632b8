"""From what passes show of themselves to the divergence that an answer is likely to have.

Three features, all of them by-products of a repair: how far it moved the next-token distribution, how far the donor's
KV of the tokens just computed had been off, and how undecided the model is. Alone, the first ranks true damage worse
than the three together (docs/research/decisions/0021-quality-gate.md). How they weigh is measured for each model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from semblend.errors import ConfigError

UNBOUNDED_RISK = 1e6
"""Stands for a risk that is not a number: logits with NaN or infinities must never pass a gate."""
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class RiskFeatures:
    """What a repair shows, in nats but for ``deviation``, which is relative to the size of KV.

    ``moved`` is the divergence of the next-token distribution now from that of the first look, ``settled`` from that of
    the pass before.
    """

    moved: float
    settled: float
    deviation: float
    entropy: float

    @property
    def logs(self) -> tuple[float, float, float, float]:
        """Logarithms of what spans decades, and a one for the constant."""
        return math.log(max(self.moved, _LEAST)), math.log(max(self.deviation, _LEAST)), self.entropy, 1.0


@dataclass(frozen=True, slots=True)
class RiskModel:
    """Expected divergence from cold, in nats: ``exp(weights . features)``, weights for each step in percent.

    A step without weights is judged by whether the distribution still moves.

    >>> RiskModel({10: (1.0, 0.0, 0.0, 0.0)}).expect(10, RiskFeatures(moved=.25, settled=.2, deviation=.1, entropy=2.0))
    0.25
    """

    weights: Mapping[int, tuple[float, ...]]

    def __post_init__(self) -> None:
        for step, weights in self.weights.items():
            if len(weights) != 4 or not all(map(math.isfinite, weights)):
                raise ConfigError(f"the risk model for {step} % has weights {weights}", hint="give four numbers")

    def expect(self, step: int, features: RiskFeatures) -> float:
        weights = self.weights.get(step)
        if weights is None or not math.isfinite(features.moved):
            return features.settled
        return math.exp(min(20.0, sum(w * f for w, f in zip(weights, features.logs, strict=True))))


def fit_weights(seen: Sequence[tuple[RiskFeatures, float]], ridge: float = 1e-3) -> tuple[float, ...]:
    """Weights by least squares on the logarithm of the true divergence."""
    features = np.array([features.logs for features, _ in seen])
    target = np.log(np.array([true for _, true in seen]) + 1e-5)
    weights = np.linalg.solve(features.T @ features + ridge * np.eye(features.shape[1]), features.T @ target)
    return tuple(float(w) for w in weights)


def compute_entropy(logits: Tensor) -> float:
    """Of one distribution, in nats.

    >>> round(compute_entropy(torch.zeros(4)) / math.log(4), 6)
    1.0
    """
    logs = logits.float().log_softmax(-1)
    return float(-(logs.exp() * logs).nan_to_num().sum())


def bound_risk(risk: float) -> float:
    """The same, or `UNBOUNDED_RISK` for what is not a number."""
    return risk if math.isfinite(risk) else UNBOUNDED_RISK


def next_token_kl(now: Tensor, before: Tensor) -> float:
    """KL divergence in nats of the next-token distribution ``now`` from ``before``, both logits of one row.

    >>> next_token_kl(torch.tensor([1., 2.]), torch.tensor([2., 3.]))
    0.0
    >>> next_token_kl(torch.tensor([1., float("nan")]), torch.tensor([2., 3.])) == UNBOUNDED_RISK
    True
    """
    p, q = (logits.reshape(-1).double().log_softmax(-1) for logits in (now, before))
    risk = float(torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum())
    return max(0.0, bound_risk(risk))
