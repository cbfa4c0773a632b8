from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.confirm.ledger import Ledger
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.errors import ReceiptError
from semblend.plan.reuse_plan import DeclineReason, ReusePlan
from semblend.span import Span

MakeReceipt = Callable[..., Receipt]
PLANNED = Span("req-1", donor_start=0, target_start=20, length=64, generation=3)
PLAN = ReusePlan((PLANNED,), prompt_tokens=100, exact_tokens=10)


def test_a_plan_is_never_counted_as_reuse() -> None:
    ledger = Ledger()
    ledger.note_plan("req-2", PLAN)
    totals = ledger.totals()
    assert set(totals.tokens.values()) == {0}
    assert set(totals.requests.values()) == {0}
    assert (totals.open_plans, totals.unconfirmed, totals.refused) == (1, 0, 0)


def test_receipts_are_added_up(make_receipt: MakeReceipt, make_cold_receipt: MakeReceipt) -> None:
    ledger = Ledger()
    ledger.note_plan("req-2", PLAN)
    receipt = make_receipt()
    assert ledger.confirm(receipt) is receipt
    ledger.confirm(make_cold_receipt(request_id="req-3", reason=DeclineReason.NOTHING_SHARED))
    totals = ledger.totals()
    assert totals.requests[Outcome.BACKEND_MATERIALIZED_REUSE] == 1
    assert totals.requests[Outcome.COLD_FALLBACK] == 1
    assert dict(totals.tokens) == {"exact": 10, "reused": 60, "recomputed": 4, "prefill": 126}
    assert dict(totals.declines) == {DeclineReason.NOTHING_SHARED: 1}
    assert totals.open_plans == 0


def test_a_second_receipt_for_a_request_is_refused(make_receipt: MakeReceipt, make_cold_receipt: MakeReceipt) -> None:
    ledger = Ledger()
    ledger.note_plan("req-2", PLAN)
    ledger.confirm(make_receipt())
    ledger.note_plan("req-2", PLAN)
    for again in (make_receipt(), make_cold_receipt()):
        with pytest.raises(ReceiptError, match="has a receipt already"):
            ledger.confirm(again)
    totals = ledger.totals()
    assert totals.tokens["reused"] == 60
    assert (totals.open_plans, totals.refused) == (0, 2)


def test_reuse_without_a_plan_is_refused(make_receipt: MakeReceipt) -> None:
    ledger = Ledger()
    with pytest.raises(ReceiptError, match="no plan is known"):
        ledger.confirm(make_receipt())
    assert ledger.totals().tokens["reused"] == 0


def test_a_receipt_without_reuse_needs_no_plan(make_cold_receipt: MakeReceipt) -> None:
    assert Ledger().confirm(make_cold_receipt()).outcome is Outcome.COLD_FALLBACK


@pytest.mark.parametrize(
    "claimed",
    [
        Span("req-9", 0, 20, 64, 3),
        Span("req-1", 0, 20, 64, 4),
        Span("req-1", 1, 20, 63, 3),
        Span("req-1", 0, 20, 65, 3),
        Span("req-1", 16, 36, 64, 3),
        Span("req-1", 0, 16, 64, 3),
    ],
    ids=["other donor", "other generation", "other shift", "longer", "past the end", "before the start"],
)
def test_a_span_outside_the_plan_is_refused(make_receipt: MakeReceipt, claimed: Span) -> None:
    ledger = Ledger()
    ledger.note_plan("req-2", PLAN)
    with pytest.raises(ReceiptError, match="not planned"):
        ledger.confirm(make_receipt(spans=(claimed,)))
    totals = ledger.totals()
    assert (totals.tokens["reused"], totals.open_plans, totals.refused) == (0, 1, 1)


def test_more_reuse_than_planned_is_refused(make_receipt: MakeReceipt) -> None:
    ledger = Ledger()
    ledger.note_plan("req-2", ReusePlan((Span("req-1", 0, 20, 40, 3),), prompt_tokens=100))
    with pytest.raises(ReceiptError, match="claims 60 tokens, the plan 40"):
        ledger.confirm(make_receipt())


def test_a_refused_receipt_can_be_corrected(make_receipt: MakeReceipt) -> None:
    ledger = Ledger()
    ledger.note_plan("req-2", PLAN)
    with pytest.raises(ReceiptError):
        ledger.confirm(make_receipt(spans=(Span("req-1", 0, 20, 65, 3),)))
    ledger.confirm(make_receipt())
    assert ledger.totals().tokens["reused"] == 60


def test_a_later_plan_replaces_the_earlier_one(make_receipt: MakeReceipt) -> None:
    ledger = Ledger()
    ledger.note_plan("req-2", ReusePlan((Span("old", 0, 20, 64),), prompt_tokens=100))
    ledger.note_plan("req-2", PLAN)
    ledger.confirm(make_receipt())
    assert ledger.totals().unconfirmed == 0


def test_plans_that_are_never_answered_are_dropped_and_counted(make_receipt: MakeReceipt) -> None:
    ledger = Ledger(limit=3)
    for number in range(5):
        ledger.note_plan(f"lost-{number}", PLAN)
    totals = ledger.totals()
    assert (totals.open_plans, totals.unconfirmed) == (3, 2)
    with pytest.raises(ReceiptError, match="no plan is known"):
        ledger.confirm(make_receipt(request_id="lost-0"))
    ledger.confirm(make_receipt(request_id="lost-4"))


def test_memory_of_answers_is_bounded_and_forgetting_lets_no_reuse_in(
    make_receipt: MakeReceipt, make_cold_receipt: MakeReceipt
) -> None:
    ledger = Ledger(limit=2)
    ledger.note_plan("req-2", PLAN)
    ledger.confirm(make_receipt())
    for number in range(2):
        ledger.confirm(make_cold_receipt(request_id=f"other-{number}"))
    with pytest.raises(ReceiptError, match="no plan is known"):
        ledger.confirm(make_receipt())


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        Ledger(limit=0)


@given(st.data())
def test_any_part_of_a_plan_may_be_confirmed(make_receipt: MakeReceipt, data: Any) -> None:
    planned, at = [], 0
    for number in range(data.draw(st.integers(1, 5))):
        start = at + data.draw(st.integers(0, 20))
        planned.append(Span(f"d{number}", data.draw(st.integers(0, 99)), start, data.draw(st.integers(1, 50)), number))
        at = planned[-1].target_end
    claimed = []
    for span in planned:
        skip = data.draw(st.integers(0, span.length - 1))
        keep = data.draw(st.integers(0, span.length - skip))
        if keep:
            part = Span(span.donor_id, span.donor_start + skip, span.target_start + skip, keep, span.generation)
            claimed.append(part)
    reused = sum(span.length for span in claimed)
    if not reused:
        return
    ledger = Ledger()
    ledger.note_plan("req-2", ReusePlan(tuple(planned), prompt_tokens=at))
    counts = {"exact_tokens": 0, "recomputed_tokens": 0, "reused_tokens": reused, "prefill_tokens": at - reused}
    ledger.confirm(make_receipt(prompt_tokens=at, spans=tuple(claimed), **counts))
    assert ledger.totals().tokens["reused"] == reused


def test_many_threads_lose_no_receipt(make_receipt: MakeReceipt) -> None:
    ledger = Ledger()

    def work(worker: int) -> None:
        for number in range(100):
            request_id = f"{worker}-{number}"
            ledger.note_plan(request_id, PLAN)
            ledger.confirm(make_receipt(request_id=request_id))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = ledger.totals()
    assert totals.requests[Outcome.BACKEND_MATERIALIZED_REUSE] == 400
    assert (totals.tokens["reused"], totals.open_plans) == (400 * 60, 0)
