"""The dial: of the ways to fill a prompt, the cheapest one that is expected to stay below a number of nats.

The ways, by rising cost: donor KV with its seams and gaps computed (0 %), then 10, 20 or 40 % of the reused tokens
computed again, then a prefill. A `DialTable` holds what `semblend calibrate` measured for a model: how far the answer
of each way is from a cold one, as it can be expected at three moments.

    the plan is known    mean by the order of its passages; where no way is below the number: a prefill at once
    after the first pass the layer-1 deviation of what the question attends to most chooses the way to begin with
    after a repair       what the repair changed says whether it was enough; if not, the next way follows

A larger number never chooses a dearer way, and no way is chosen whose expected divergence is above the number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semblend.errors import ConfigError
from semblend.materialize.gate.plan_shape import PassageOrder
from semblend.materialize.gate.risk import RiskFeatures, bound_risk
from semblend.quality import MODE_NATS

WAYS = (0, 10, 20, 40)
"""Percent of the reused tokens that each way computes again."""
NUMBERS = (0.003, 0.01, 0.02, 0.05, 0.1, 0.3)
"""Where calibration and benchmarks look at the dial."""
FALSE_SAFE_TIMES = 5.0
"""A prompt that was served with more than so many times the number is a false safe."""
MOST_UNPROBED = MODE_NATS["balanced"]
"""Up to this number nothing is served that no repair has probed.

A repair is a measurement of the prompt itself; before it there is only what layer 1 shows. And splices alone change
words: KL .007, but F1 .885 against cold for one document under another instruction (decision 0088).
"""
LEAST_OF_AN_ORDER = 8
"""Prompts of an order of passages, below which nothing is expected of it."""
_LEAST = 1e-6
_ORDERS = tuple(PassageOrder)


@dataclass(frozen=True, slots=True)
class WayChoice:
    """What the gate does next: compute ``percent`` of the reused tokens again (0: nothing more), None: a prefill.

    ``expected``: divergence from cold of the chosen way, in nats; for a prefill, that of the best way there was.
    """

    percent: int | None
    expected: float
    reason: str


def choose_way(expected: Mapping[int, float], nats: float) -> WayChoice:
    """The cheapest way that is expected to stay below ``nats``; ``expected`` by percent.

    >>> choose_way({0: .2, 10: .04, 20: .03}, .05).percent
    10
    >>> choose_way({0: .2, 10: .04}, .01).reason
    'at best 0.04 nats are expected, 0.01 are allowed'
    """
    allowed = [percent for percent in sorted(expected) if percent or nats > MOST_UNPROBED]
    for percent in allowed:
        if bound_risk(expected[percent]) <= nats:
            return WayChoice(percent, expected[percent], f"{expected[percent]:.3g} of {nats:g} nats are expected")
    best = min((bound_risk(expected[percent]) for percent in allowed), default=bound_risk(math.inf))
    return WayChoice(None, best, f"at best {best:.3g} nats are expected, {nats:g} are allowed")


@dataclass(frozen=True, slots=True)
class DialTable:
    """Expected divergence from cold by way, in nats; empty where nothing was measured.

    ``means``: by order of passages and way, the mean of what was measured.
    ``glance``: by way, weights of the logarithm of the layer-1 deviation, of each order, and a constant.
    ``repair``: by way, weights of `RiskFeatures.logs` without its constant, of each order, and a constant.
    Weights give the logarithm of the expected divergence.
    """

    means: Mapping[PassageOrder, Mapping[int, float]] = field(default_factory=dict)
    glance: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    repair: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, rows, length in (("glance", self.glance, 1), ("repair", self.repair, 3)):
            for percent, weights in rows.items():
                if len(weights) != length + len(_ORDERS) or not all(map(math.isfinite, weights)):
                    raise ConfigError(
                        f"the dial's {name} row for {percent} % has weights {weights}",
                        hint=f"give {length + len(_ORDERS)} numbers, as `semblend calibrate` writes them",
                    )
        for order, row in self.means.items():
            if any(not (math.isfinite(nats) and nats >= 0) for nats in row.values()):
                raise ConfigError(f"the dial's means of {order} are {dict(row)}", hint="give nats of 0 or more")

    def knows(self, order: PassageOrder) -> bool:
        """Whether prompts of this order were measured."""
        return bool(self.means.get(order)) and bool(self.glance) and bool(self.repair)

    def expect_by_plan(self, order: PassageOrder) -> Mapping[int, float]:
        """By way, before anything is computed."""
        return self.means[order]

    def expect_by_glance(self, order: PassageOrder, deviation: float) -> dict[int, float]:
        """By way, after the first pass. What is no number is the worst."""
        features = make_glance_features(order, deviation)
        return {percent: _expect(weights, features) for percent, weights in self.glance.items()}

    def expect_by_repair(self, order: PassageOrder, percent: int, features: RiskFeatures) -> float:
        """Of the way that was taken."""
        weights = self.repair.get(percent)
        if weights is None or not math.isfinite(features.moved):
            return bound_risk(math.inf)
        return _expect(weights, make_repair_features(order, features))

    def to_record(self) -> dict[str, Any]:
        """As JSON holds it; `from_record` takes it back."""
        means = {str(order): {str(percent): nats for percent, nats in row.items()} for order, row in self.means.items()}
        rows = {
            name: {str(percent): list(weights) for percent, weights in getattr(self, name).items()}
            for name in ("glance", "repair")
        }
        return {"means": means, **rows}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DialTable:
        """Raises what a wrong record raises: `Thresholds.from_json` says which file it is."""
        means = {
            PassageOrder(order): {int(percent): float(nats) for percent, nats in row.items()}
            for order, row in record.get("means", {}).items()
        }
        glance, repair = (
            {int(percent): tuple(map(float, weights)) for percent, weights in record.get(name, {}).items()}
            for name in ("glance", "repair")
        )
        return cls(means, glance, repair)


def make_glance_features(order: PassageOrder, deviation: float) -> tuple[float, ...]:
    """What the weights of `DialTable.glance` weigh."""
    deviation = deviation if math.isfinite(deviation) else 1 / _LEAST
    return (math.log(max(deviation, _LEAST)), *_mark_order(order))


def make_repair_features(order: PassageOrder, features: RiskFeatures) -> tuple[float, ...]:
    """What the weights of `DialTable.repair` weigh."""
    return (*features.logs[:-1], *_mark_order(order))


def _mark_order(order: PassageOrder) -> tuple[float, ...]:
    """1 for an order that is not the usual one, and a constant."""
    return (*(float(order is one) for one in _ORDERS[1:]), 1.0)


def _expect(weights: Sequence[float], features: Sequence[float]) -> float:
    return math.exp(min(20.0, sum(w * f for w, f in zip(weights, features, strict=True))))
