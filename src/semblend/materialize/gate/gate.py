"""The gate of one request: which level of recomputation to begin with, and whether what a repair left is close enough.

`OutcomeMemory` declines plans of a kind that was refused before.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from semblend.plan.times import AT_ONCE, EDITED, PAYS_BELOW, Forecast
from semblend.prompt import Namespace
from semblend.quality import GATED_MODE, MODE_NATS, find_path, read_nats


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of one prompt at one number of nats.

    With a ``dial``, which was measured for the model at any number, by what that expects of prompts whose passages have
    this ``order``. Without one by ``thresholds``, which hold at .02 nats, at another number scaled with it.
    ``least``: percent that a repair computes at least, because smaller ones were seldom enough for such prompts.
    ``is_edited``: such prompts were measured (`PlanShape.is_edited`), with one pass: to compute what is new in them
    twice saves little.
    """

    thresholds: Thresholds = DEFAULT
    nats: float = MODE_NATS["balanced"]
    dial: DialTable | None = None
    order: PassageOrder = PassageOrder.IN_ORDER
    least: int = 0
    is_edited: bool = False

    @classmethod
    def of(cls, thresholds: Thresholds, plan: ReusePlan, nats: float) -> Gate:
        """The gate of a plan: by the dial that was measured on prompts like this one, else by the thresholds."""
        shape = PlanShape.of(plan)
        if shape.is_edited and thresholds.edit_dial.knows(shape.order):
            return cls(thresholds, nats, thresholds.edit_dial, shape.order, plan.repair, is_edited=True)
        # Of a part of a donor nothing is known: dials were measured on whole documents, and take nearly all of them.
        dial = None if shape.in_part else thresholds.find_dial(shape.order)
        return cls(thresholds, nats, dial, shape.order, plan.repair)

    @property
    def sees_at_once(self) -> bool:
        """Whether one pass is enough to judge a repair by: a dial does, and it was tried on passages in order."""
        return self.dial is not None and self.order is PassageOrder.IN_ORDER

    def begin(self) -> RecomputeLevel:
        """The level to begin with, known before anything is computed."""
        if self.dial is not None:
            level = self.dial.begin(self.order, self.nats)
        else:
            unknown = "nothing was measured of such prompts: the smallest repair will tell"
            level = RecomputeLevel(STEPS[0], math.nan, unknown)
        return replace(level, percent=max(level.percent, self.least)) if level.percent else level

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


# -- What became of earlier plans of each kind, so that a plan that does not pay is not begun.
#
# What a plan is expected to take comes from the engine's times (`semblend.plan.times`). Plans of one kind may take
# longer than that, or less: the gate refuses some, and then the first pass and the repairs come on top of a prefill.
# So the memory keeps, for each kind of plan (`semblend.materialize.gate.thresholds`), how much longer those took that
# were begun. A plan that is then expected to take as long as a prefill is not begun. Every so often one is begun all
# the same, so that a kind can recover; retries are so rare that they cost `RETRY_BUDGET` of a prefill on average.
#
# - A namespace learns from its own requests only. A memory for all would tell one tenant, by the time a prompt takes,
#   what others send, and would let one tenant spoil the reuse of the others.
# - It is bounded by tenant: a tenant that invents namespaces pushes out its own records, nobody else's.
# - It belongs to the one process that decides what is begun: the embedded engine, or the scheduler of an engine with
#   several ranks. Ranks have none, so they cannot disagree.


COLD = 1.0
"""The cost of a cold prefill, the unit of all costs here."""
RETRY_BUDGET = 0.025
"""Retries of a kind may cost this share of a prefill, on average over all prompts of the kind."""
MIN_SKIPPED, MAX_SKIPPED = 8, 64
FADE = 0.9
"""Each new outcome counts 1, and those before it this much less: about the last ten decide."""
MAX_COLD = 1.5
"""A plan that was not refused counts as so many prefills at most: what took longer was held up by something else."""
TIMED_PRIOR = 3.0
"""Times are noisy: what the engine's times say counts like so many outcomes of a kind. Counted rows are not noisy."""
RAISE_ABOVE = 0.6
"""Where so large a share of a kind needed a second repair, its prompts begin with that one: it costs less than both."""
MIN_REPAIRED = 3.0
"""Outcomes, newer ones counting more, below which nothing is said of that share."""
TRY_LESS_EVERY = 16
"""One in so many begins with the smallest repair all the same, so that a kind can recover."""
MAX_TENANTS, MAX_RECORDS, MAX_DONORS = 256, 1024, 4096
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Record:
    """Outcomes of one kind in one namespace; newer ones count more.

    ``longer``: of those that were served, how much longer than expected, in sum; ``refusals``: what those cost that the
    gate refused, in prefills, in sum. ``repaired``: those that began with the smallest repair; ``raised``: of these,
    the ones that needed another. ``raises``: how many began with the larger one since. ``tries``: how many were
    begun in a row although the kind was not expected to pay, None where no such row is under way; ``spent``: what those
    cost, in prefills. ``tried``: how long the last row was; after a long one more are declined, so that luck gets no
    larger share of the prompts.
    """

    served: float = 0.0
    longer: float = 0.0
    refused: float = 0.0
    refusals: float = 0.0
    skipped: int = 0
    repaired: float = 0.0
    raised: float = 0.0
    raises: int = 0
    tries: int | None = None
    spent: float = 0.0
    tried: int = 1

    @property
    def goes_on(self) -> bool:
        """Whether what was tried has paid so far, which counts more than what was slow before: the engine may have been
        held up. A row of tries ends with the first that costs more than all before it have saved."""
        return self.tries is not None and self.spent < PAYS_BELOW * self.tries

    @property
    def is_empty(self) -> bool:
        return not self.served and not self.refused

    def add(self, *, longer: float | None = None, refusal: float | None = None) -> None:
        self.served, self.longer = self.served * FADE, self.longer * FADE
        self.refused, self.refusals = self.refused * FADE, self.refusals * FADE
        if longer is not None:
            self.served, self.longer = self.served + 1, self.longer + longer
        if refusal is not None:
            self.refused, self.refusals = self.refused + 1, self.refusals + refusal
        self.skipped = 0

    def note_try(self, cost: float) -> None:
        if self.tries is None:
            return
        self.tries, self.spent = self.tries + 1, self.spent + cost
        self.tried = self.tries
        if not self.goes_on:
            self.tries = None

    def note_repair(self, began_with: int, raised: bool) -> None:
        if began_with > STEPS[0]:
            self.raises += 1
            return
        self.repaired, self.raised, self.raises = self.repaired * FADE + 1, self.raised * FADE + raised, 0

    def choose_repair(self) -> int:
        """Percent to begin with; 0 where the gate may choose."""
        if self.repaired < MIN_REPAIRED or self.raised < RAISE_ABOVE * self.repaired:
            return 0
        return 0 if self.raises >= TRY_LESS_EVERY else STEPS[1]

    def expect(self, forecast: Forecast) -> Forecast:
        """The same for a plan of this kind: with the chance that it is refused, and what it takes where it is not."""
        if self.is_empty:
            return forecast
        prior = TIMED_PRIOR if forecast.timed else 0.0
        served = forecast.reuse * (self.longer + prior) / (self.served + prior) if self.served + prior else 0.0
        chance = self.refused / (self.served + self.refused + prior)
        refused = self.refusals / self.refused * forecast.cold if self.refused else 0.0
        return Forecast(chance * refused + (1 - chance) * served, forecast.cold, forecast.timed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the memory says of a plan: what it is expected to cost, and why it is not begun, or None.

    ``is_by_cost``: it is not, because of that cost.
    """

    forecast: Forecast
    decline: Decline | None = None
    is_by_cost: bool = False


class OutcomeMemory:
    """Outcomes by tenant, namespace and kind. Thread-safe.

    ``thresholds``: their dial knows, before anything is computed, which plans cannot stay below a number.

    >>> from semblend.span import Span
    >>> memory, plan = OutcomeMemory(), ReusePlan((Span("d", 0, 10, 190),), 215)
    >>> forecast = Forecast(reuse=40.0, cold=70.0, timed=True)
    >>> memory.judge(plan, Namespace(), forecast).decline is None
    True
    >>> for _ in range(8):
    ...     memory.learn(plan, Namespace(), forecast, took=100.0, reason=DeclineReason.QUALITY_RISK)
    >>> memory.judge(plan, Namespace(), forecast).decline.detail
    'reuse is expected to take 79.3 ms, a prefill 70.0 ms (one donor in order, 128+ tokens, 1+ spans)'
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds
        self._tenants: OrderedDict[str, OrderedDict[tuple[str, str], _Record]] = OrderedDict()
        self._donors: OrderedDict[str, bool] = OrderedDict()  # that passes of ours have looked at
        self._lock = threading.Lock()

    def judge(self, plan: ReusePlan, namespace: Namespace, forecast: Forecast, quality: str = GATED_MODE) -> Verdict:
        """Decline a plan that is expected to cost more than it saves. Counts what it declines.

        Call it once for a request, before anything is claimed or computed.
        """
        nats = read_nats(quality)
        is_gated = find_path(quality) == GATED_MODE
        if is_gated and self._thresholds is not None and (choice := prefill_at_once(self._thresholds, plan, nats)):
            return Verdict(forecast, Decline(DeclineReason.QUALITY_RISK, choice.reason))
        kind = name_kind(plan, nats)
        with self._lock:
            record = self._find(namespace, kind)
            expected = record.expect(forecast)
            if expected.pays:
                record.tries, record.tried = None, 1
                return Verdict(expected)
            if record.goes_on:
                return Verdict(expected)
            if record.skipped >= min(MAX_SKIPPED, record.tried * count_skips(expected.cost)):
                record.skipped, record.tries, record.spent = 0, 0, 0.0
                return Verdict(expected)
            record.skipped += 1
            reason = DeclineReason.QUALITY_RISK if record.refused else DeclineReason.BELOW_BREAK_EVEN
        return Verdict(expected, Decline(reason, f"{expected.describe()} ({kind})"), is_by_cost=True)

    def choose_repair(self, plan: ReusePlan, namespace: Namespace, quality: str = GATED_MODE) -> int:
        """Percent of the reused tokens that the first repair of such a plan shall compute; 0: as the gate says."""
        if find_path(quality) != GATED_MODE:
            return 0
        with self._lock:
            return self._find(namespace, name_kind(plan, read_nats(quality))).choose_repair()

    def foresee_path(self, plan: ReusePlan, quality: str = GATED_MODE) -> str:
        """The passes that such a plan is likely to take: one of `PASSES`.

        One pass does for an edited history, and where earlier questions have shown what matters in its donors.
        """
        path = find_path(quality)
        if path != GATED_MODE or self._thresholds is None:
            return path
        gate = Gate.of(self._thresholds, plan, read_nats(quality))
        if not gate.sees_at_once:
            return path
        if gate.is_edited:
            return EDITED
        with self._lock:
            return AT_ONCE if all(donor_id in self._donors for donor_id in plan.donor_ids) else path

    def learn(
        self,
        plan: ReusePlan,
        namespace: Namespace,
        forecast: Forecast,
        quality: str = GATED_MODE,
        *,
        took: float,
        reason: DeclineReason | None = None,
        escalations: int = 0,
    ) -> None:
        """Take in what a plan that was begun has cost, in the unit of its ``forecast``, which no record has scaled.

        ``reason``: why the prompt holds no donor KV in the end; None where it does. Only the gate's own reason says
        something about the kind. A donor that was lost or a pass that failed does not. ``escalations``: repairs behind
        the first one.
        """
        refused = reason is DeclineReason.QUALITY_RISK
        if (reason is not None and not refused) or min(forecast.reuse, forecast.cold) <= 0:
            return
        most = MAX_COLD * forecast.cold if forecast.timed else math.inf
        kind = name_kind(plan, read_nats(quality))
        with self._lock:
            record = self._find(namespace, kind)
            if find_path(quality) == GATED_MODE:
                for donor_id in plan.donor_ids:
                    _take(self._donors, donor_id, lambda: True, MAX_DONORS)
                if not refused:
                    record.note_repair(plan.repair, escalations > 0)
            record.note_try(max(COLD, took / forecast.cold) if refused else min(took, most) / forecast.cold)
            if refused:
                record.add(refusal=max(COLD, took / forecast.cold))
            else:
                record.add(longer=min(took, max(most, forecast.reuse)) / forecast.reuse)

    def count_records(self) -> int:
        """How many kinds of all namespaces are remembered."""
        with self._lock:
            return sum(map(len, self._tenants.values()))

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
    if math.isinf(nats):
        return f"{kind}, fast"
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
