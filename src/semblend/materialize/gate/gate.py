"""The gate of one request: which level of recomputation to begin with, and whether what a repair left is close enough.

`OutcomeMemory` declines plans of a kind that was refused before.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from semblend.materialize.gate.thresholds import (
    DEFAULT,
    NUMBERS,
    STEPS,
    DialTable,
    PassageOrder,
    PlanShape,
    RecomputeLevel,
    RiskFeatures,
    Thresholds,
)
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Namespace
from semblend.quality import GATED_MODE, MODE_NATS, read_nats


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of one prompt at one number of nats.

    With a ``dial``, which was measured for the model at any number, by what that expects of prompts whose passages have
    this ``order``. Without one by ``thresholds``, which hold at .02 nats, at another number scaled with it.
    """

    thresholds: Thresholds = DEFAULT
    nats: float = MODE_NATS["balanced"]
    dial: DialTable | None = None
    order: PassageOrder = PassageOrder.IN_ORDER

    @classmethod
    def of(cls, thresholds: Thresholds, plan: ReusePlan, nats: float) -> Gate:
        """The gate of a plan: by the dial that was measured on prompts like this one, else by the thresholds."""
        shape = PlanShape.of(plan)
        return cls(thresholds, nats, _find_dial(thresholds, shape), shape.order)

    def begin(self) -> RecomputeLevel:
        """The level to begin with, known before anything is computed."""
        if self.dial is not None:
            return self.dial.begin(self.order, self.nats)
        return RecomputeLevel(STEPS[0], math.nan, "nothing was measured of such prompts: the smallest repair will tell")

    def expect(self, percent: int, features: RiskFeatures) -> float:
        """Divergence from cold that an answer would have after this repair, in nats."""
        if self.dial is not None:
            return self.dial.expect_by_repair(self.order, percent, features)
        return self.thresholds.expect(percent, features)

    def accepts(self, percent: int, expected: float) -> bool:
        """Whether this is close enough."""
        scaled = self.thresholds.after(percent) * self.nats / MODE_NATS[GATED_MODE]
        return expected <= (self.nats if self.dial is not None else scaled)


def prefill_at_once(thresholds: Thresholds, plan: ReusePlan, nats: float) -> RecomputeLevel | None:
    """The choice of a prefill before anything is computed, where no level is expected to be close enough; else None."""
    choice = Gate.of(thresholds, plan, nats).begin()
    return choice if choice.percent is None else None


def _find_dial(thresholds: Thresholds, shape: PlanShape) -> DialTable | None:
    """None for a part of a donor's passages: dials were measured on whole documents, and take nearly all of them."""
    return None if shape.in_part else thresholds.find_dial(shape.order)


# -- What became of earlier plans of each kind, so that a plan that is likely to be in vain is not begun.
#
# A plan that the gate refuses costs more than a cold prefill: the first pass and the repairs come on top of it. So the
# memory keeps, for each kind of plan (`semblend.materialize.gate.thresholds`), the mean cost of those that were begun,
# where 1 is a cold prefill. A kind whose mean is 1 or more is not begun. Before the first plan of a kind, what was
# measured with the model's thresholds counts, if anything was. Every so often one is begun all the same, so that a kind
# can recover; retries are so rare that they cost `RETRY_BUDGET` of a prefill on average.
#
# - A namespace learns from its own requests only. A memory for all would tell one tenant, by the time a prompt takes,
#   what others send, and would let one tenant spoil the reuse of the others.
# - It is bounded by tenant: a tenant that invents namespaces pushes out its own records, nobody else's.
# - The same plans and costs in the same order give the same decisions. Costs are work, not time.
# - It belongs to the one process that decides what is begun: the embedded engine, or the scheduler of an engine with
#   several ranks. Ranks have none, so they cannot disagree.


COLD = 1.0
"""The cost of a cold prefill, the unit of all costs here."""
RETRY_BUDGET = 0.025
"""Retries of a kind may cost this share of a prefill, on average over all prompts of the kind."""
MIN_SKIPPED, MAX_SKIPPED = 8, 64
FADE = 0.9
"""Each new outcome counts 1, and those before it this much less: about the last ten decide."""
MAX_TENANTS, MAX_RECORDS = 256, 1024
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Record:
    """Outcomes of one kind in one namespace; newer ones count more."""

    weight: float = 0.0
    cost: float = 0.0
    rejected: float = 0.0
    skipped: int = 0

    def add(self, cost: float, rejected: bool) -> None:
        before = self.weight * FADE
        self.weight = before + 1
        self.cost = (self.cost * before + cost) / self.weight
        self.rejected = (self.rejected * before + rejected) / self.weight
        self.skipped = 0


class OutcomeMemory:
    """Outcomes by tenant, namespace and kind. Thread-safe.

    ``expected``: mean cost by kind at balanced, measured beforehand; see `Thresholds.expected_costs`.
    ``thresholds``: their dial knows, before anything is computed, which plans cannot stay below a number.

    >>> from semblend.span import Span
    >>> memory, plan = OutcomeMemory(), ReusePlan((Span("d", 0, 10, 190),), 215)
    >>> memory.predict_loss(plan, Namespace()) is None
    True
    >>> memory.learn(plan, Namespace(), work=1.7, reason=DeclineReason.QUALITY_RISK)
    >>> memory.predict_loss(plan, Namespace()).detail
    'such prompts cost 1.70 of a prefill (one donor in order, 128+ tokens, 1+ spans)'
    """

    def __init__(
        self, expected: Mapping[str, float] = MappingProxyType({}), thresholds: Thresholds | None = None
    ) -> None:
        self._expected = dict(expected)
        self._thresholds = thresholds
        self._tenants: OrderedDict[str, OrderedDict[tuple[str, str], _Record]] = OrderedDict()
        self._lock = threading.Lock()

    def predict_loss(self, plan: ReusePlan, namespace: Namespace, quality: str = GATED_MODE) -> Decline | None:
        """Decline a plan that is expected to cost more than it saves; None for one to begin. Counts what it declines.

        Call it once for a request, before anything is claimed or computed.
        """
        nats = read_nats(quality)
        if self._thresholds is not None and (choice := prefill_at_once(self._thresholds, plan, nats)):
            return Decline(DeclineReason.QUALITY_RISK, choice.reason)
        kind = name_kind(plan, nats)
        with self._lock:
            record = self._find(namespace, kind)
            cost = record.cost if record.weight else self._find_expected(plan, nats)
            if cost < COLD:
                return None
            if record.skipped >= count_skips(cost):
                record.skipped = 0
                return None
            record.skipped += 1
            seen, unsafe = bool(record.weight), bool(record.rejected) or not record.weight
        when = "" if seen else " when thresholds were measured"
        reason = DeclineReason.QUALITY_RISK if unsafe else DeclineReason.BELOW_BREAK_EVEN
        return Decline(reason, f"such prompts cost {cost:.2f} of a prefill{when} ({kind})")

    def learn(
        self,
        plan: ReusePlan,
        namespace: Namespace,
        quality: str = GATED_MODE,
        *,
        work: float,
        reason: DeclineReason | None = None,
    ) -> None:
        """Take in what a plan that was begun has cost: ``work`` of its passes as a share of a cold prefill.

        ``reason``: why the prompt holds no donor KV in the end; None where it does. Only the gate's own reason says
        something about the kind. A donor that was lost or a pass that failed does not.
        """
        rejected = reason is DeclineReason.QUALITY_RISK
        if reason is not None and not rejected:
            return
        kind = name_kind(plan, read_nats(quality))
        with self._lock:
            self._find(namespace, kind).add(max(COLD, work) if rejected else work, rejected)

    def count_records(self) -> int:
        """How many kinds of all namespaces are remembered."""
        with self._lock:
            return sum(map(len, self._tenants.values()))

    def _find_expected(self, plan: ReusePlan, nats: float) -> float:
        """What a kind cost at balanced holds for smaller numbers too. Where the dial knows a kind, it has spoken."""
        shape = PlanShape.of(plan)
        if nats > MODE_NATS[GATED_MODE] or (self._thresholds is not None and self._thresholds.find_dial(shape.order)):
            return 0.0
        return self._expected.get(shape.kind, 0.0)

    def _find(self, namespace: Namespace, kind: str) -> _Record:
        """The record, made where it is missing; the least recently used one goes where there are too many."""
        records = _take(self._tenants, namespace.tenant, OrderedDict, MAX_TENANTS)
        return _take(records, (namespace.digest, kind), _Record, MAX_RECORDS)


def name_kind(plan: ReusePlan, nats: float) -> str:
    """The kind of a plan and, away from balanced, the nearest of the dial's numbers below: few, whatever is asked.

    >>> from semblend.span import Span
    >>> name_kind(ReusePlan((Span("d", 0, 10, 190),), 215), .07)
    'one donor in order, 128+ tokens, 1+ spans, 0.05 nats'
    """
    kind = PlanShape.of(plan).kind
    if nats == MODE_NATS[GATED_MODE]:
        return kind
    return f"{kind}, {max((number for number in NUMBERS if number <= nats), default=0.0):g} nats"


def count_skips(cost: float) -> int:
    """How many plans of a kind with this mean cost are declined before one is begun again.

    >>> [count_skips(cost) for cost in (1.0, 1.08, 1.7, 9.0)]
    [8, 8, 28, 64]
    """
    return min(MAX_SKIPPED, max(MIN_SKIPPED, math.ceil(round((cost - COLD) / RETRY_BUDGET, 6))))


def _take(held: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """The value of ``key``, made where it is missing, as the most recently used of at most ``most``."""
    if key not in held:
        held[key] = make()
        if len(held) > most:
            held.popitem(last=False)
    held.move_to_end(key)
    return held[key]
