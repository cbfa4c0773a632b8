"""The books: plans are written in pencil, receipts in ink, and only ink is added up."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import TOKEN_KINDS, Receipt
from semblend.errors import ReceiptError
from semblend.plan.reuse_plan import DeclineReason, ReusePlan
from semblend.span import Span


@dataclass(frozen=True, slots=True)
class Totals:
    """The sum of all receipts so far.

    ``open_plans`` still wait for a receipt, ``unconfirmed`` ones waited too long and were dropped, and
    ``refused`` counts receipts that were turned away. None of the three is reuse.
    """

    requests: Mapping[Outcome, int]
    tokens: Mapping[str, int]
    declines: Mapping[DeclineReason, int]
    open_plans: int
    unconfirmed: int
    refused: int


class Ledger:
    """Matches receipts with plans and adds them up. Thread-safe; remembers ``limit`` plans and as many answers.

    >>> ledger = Ledger()
    >>> ledger.note_plan("r", ReusePlan((Span("donor", 0, 0, 64),), prompt_tokens=100))
    >>> ledger.totals().tokens["reused"]
    0
    """

    def __init__(self, limit: int = 10_000) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit}, not 1 or more")
        self._limit = limit
        self._lock = threading.Lock()
        self._plans: OrderedDict[str, ReusePlan] = OrderedDict()
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._requests: Counter[Outcome] = Counter()
        self._tokens: Counter[str] = Counter()
        self._declines: Counter[DeclineReason] = Counter()
        self._unconfirmed = 0
        self._refused = 0

    def note_plan(self, request_id: str, plan: ReusePlan) -> None:
        """Remember the plan that a receipt will have to answer.

        A later plan for the same request replaces the earlier one. A plan for a request that was answered
        already is ignored: its first receipt stands.
        """
        with self._lock:
            if request_id in self._answered:
                return
            self._plans[request_id] = plan
            self._plans.move_to_end(request_id)
            if len(self._plans) > self._limit:
                self._plans.popitem(last=False)
                self._unconfirmed += 1

    def confirm(self, receipt: Receipt) -> Receipt:
        """Book a receipt and hand it back; `ReceiptError` if it contradicts the plan or an earlier receipt."""
        with self._lock:
            try:
                self._check(receipt)
            except ReceiptError:
                self._refused += 1
                raise
            self._book(receipt)
        return receipt

    def totals(self) -> Totals:
        """What the receipts add up to; every outcome and every kind of token has a number."""
        with self._lock:
            return Totals(
                requests=MappingProxyType({outcome: self._requests[outcome] for outcome in Outcome}),
                tokens=MappingProxyType({kind: self._tokens[kind] for kind in TOKEN_KINDS}),
                declines=MappingProxyType(dict(self._declines)),
                open_plans=len(self._plans),
                unconfirmed=self._unconfirmed,
                refused=self._refused,
            )

    def _check(self, receipt: Receipt) -> None:
        name = repr(receipt.request_id)
        if receipt.request_id in self._answered:
            raise ReceiptError(f"request {name} has a receipt already", hint="send one receipt per request")
        if receipt.reused_tokens == 0:
            return
        plan = self._plans.get(receipt.request_id)
        if plan is None:
            raise ReceiptError(
                f"the receipt of {name} claims reuse, but no plan is known",
                hint="call note_plan() before the backend starts, and answer within the ledger's limit",
            )
        if receipt.reused_tokens > plan.reused_tokens:
            raise ReceiptError(
                f"the receipt of {name} claims {receipt.reused_tokens} tokens, the plan {plan.reused_tokens}",
                hint="reuse what was planned, or less",
            )
        starts = [span.target_start for span in plan.spans]
        for span in receipt.spans:
            at = bisect_right(starts, span.target_start) - 1
            if at < 0 or not _lies_within(span, plan.spans[at]):
                raise ReceiptError(
                    f"the receipt of {name} claims a span that was not planned: {span.length} tokens of "
                    f"{span.donor_id!r} generation {span.generation} at {span.target_start}",
                    hint="a backend may shorten or drop planned spans, never move or add one",
                )

    def _book(self, receipt: Receipt) -> None:
        self._plans.pop(receipt.request_id, None)
        self._answered[receipt.request_id] = None
        if len(self._answered) > self._limit:
            self._answered.popitem(last=False)
        self._requests[receipt.outcome] += 1
        self._tokens.update(receipt.tokens)
        if receipt.reason is not None:
            self._declines[receipt.reason] += 1


def _lies_within(span: Span, whole: Span) -> bool:
    same_source = (span.donor_id, span.generation, span.shift) == (whole.donor_id, whole.generation, whole.shift)
    return same_source and whole.target_start <= span.target_start and span.target_end <= whole.target_end
