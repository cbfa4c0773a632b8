"""The gate of one request: which way to begin with, and whether what a repair left is close enough to cold.

`DialGate` goes by what was measured for the model at any number. `ThresholdGate` goes by thresholds that were measured
for mode balanced; at another number it scales them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from semblend.materialize.gate.dial import DialTable, WayChoice, choose_way
from semblend.materialize.gate.plan_shape import PassageOrder, PlanShape
from semblend.materialize.gate.risk import RiskFeatures
from semblend.materialize.gate.thresholds import Thresholds
from semblend.plan.reuse_plan import ReusePlan
from semblend.quality import MODE_NATS


class Gate(Protocol):
    """What `Repair` asks."""

    @property
    def glances(self) -> bool:
        """Whether a look at layer 1 can change anything."""

    def begin(self, deviation: float) -> WayChoice:
        """The way to begin with, by the layer-1 deviation."""

    def expect(self, percent: int, features: RiskFeatures) -> float:
        """Divergence from cold that an answer would have after this repair, in nats."""

    def accepts(self, percent: int, expected: float) -> bool:
        """Whether this is close enough."""


@dataclass(frozen=True, slots=True)
class ThresholdGate:
    """Thresholds that hold at .02 nats, at another number scaled with it.

    Divergence grows with the square of the deviation, so the deviations to begin with grow with the number's root.
    """

    thresholds: Thresholds
    nats: float = MODE_NATS["balanced"]

    @property
    def glances(self) -> bool:
        return self.thresholds.glances

    def begin(self, deviation: float) -> WayChoice:
        percent = self.thresholds.first_step(deviation / math.sqrt(self._scale) if self._scale else math.inf)
        why = f"layer 1 is off by {deviation:.3g}, as thresholds for {self.nats:g} nats take it"
        return WayChoice(percent, math.nan, why)

    def expect(self, percent: int, features: RiskFeatures) -> float:
        return self.thresholds.expect(percent, features)

    def accepts(self, percent: int, expected: float) -> bool:
        return expected <= self.thresholds.after(percent) * self._scale

    @property
    def _scale(self) -> float:
        return self.nats / MODE_NATS["balanced"]


@dataclass(frozen=True, slots=True)
class DialGate:
    """The measured dial, for a prompt whose passages have this order."""

    table: DialTable
    order: PassageOrder
    nats: float

    @property
    def glances(self) -> bool:
        return True

    def begin(self, deviation: float) -> WayChoice:
        return choose_way(self.table.expect_by_glance(self.order, deviation), self.nats)

    def expect(self, percent: int, features: RiskFeatures) -> float:
        return self.table.expect_by_repair(self.order, percent, features)

    def accepts(self, percent: int, expected: float) -> bool:  # noqa: ARG002  (one number for every way)
        return expected <= self.nats


def make_gate(thresholds: Thresholds, plan: ReusePlan, nats: float) -> Gate:
    """The dial that was measured on prompts like this one, else the thresholds."""
    shape = PlanShape.of(plan)
    if dial := _find_dial(thresholds, shape):
        return DialGate(dial, shape.order, nats)
    return ThresholdGate(thresholds, nats)


def prefill_at_once(thresholds: Thresholds, plan: ReusePlan, nats: float) -> WayChoice | None:
    """The choice of a prefill before anything is computed, where no way is expected to be close enough; else None."""
    shape = PlanShape.of(plan)
    dial = _find_dial(thresholds, shape)
    if dial is None:
        return None
    choice = choose_way(dial.expect_by_plan(shape.order), nats)
    return choice if choice.percent is None else None


def _find_dial(thresholds: Thresholds, shape: PlanShape) -> DialTable | None:
    """None for a part of a donor's passages: dials were measured on whole documents, and take nearly all of them."""
    return None if shape.in_part else thresholds.find_dial(shape.order)
