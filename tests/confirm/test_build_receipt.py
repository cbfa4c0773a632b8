"""One builder of receipts: the same facts give the same outcome in every engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import RequestFacts, build_receipt
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Namespace
from semblend.span import Span

PLAN = ReusePlan((Span("d", donor_start=0, target_start=20, length=64),), prompt_tokens=100)


@dataclass(frozen=True)
class Work:
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    risk: float | None = 0.1
    escalations: int = 2
    canary: float | None = 0.01
    load_ms: float | None = 3.0
    compute_ms: float | None = 7.0


def facts(decision=None, *, exact_tokens=0):
    return RequestFacts(
        request_id="r",
        engine="e",
        engine_version="1",
        namespace=Namespace(tenant="t"),
        mode="balanced",
        prompt_tokens=100,
        exact_tokens=exact_tokens,
        decision=decision,
        lookup_ms=1.0,
        compute_ms=50.0,
        ttft_ms=60.0,
    )


def test_reuse_is_counted_from_the_backends_work_and_the_kinds_add_up():
    receipt = build_receipt(facts(PLAN, exact_tokens=10), Work(60, 4))
    assert receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE
    assert dict(receipt.tokens) == {"exact": 10, "reused": 60, "recomputed": 4, "prefill": 26}
    assert (receipt.risk, receipt.escalations, receipt.canary) == (0.1, 2, 0.01)
    assert (receipt.lookup_ms, receipt.load_ms, receipt.compute_ms, receipt.ttft_ms) == (1.0, 3.0, 7.0, 60.0)
    assert receipt.spans == PLAN.spans
    assert receipt.reason is None
    assert receipt.namespace == Namespace(tenant="t").digest


def test_a_plan_without_the_backends_work_counts_no_reuse():
    receipt = build_receipt(facts(PLAN))
    assert receipt.outcome is Outcome.COLD_FALLBACK
    assert (receipt.reused_tokens, receipt.prefill_tokens, receipt.spans) == (0, 100, ())
    assert receipt.compute_ms == 50.0


def test_a_backend_that_recomputed_every_token_declines_and_still_names_the_spans():
    declined = Decline(DeclineReason.QUALITY_RISK, "all of them")
    receipt = build_receipt(facts(PLAN), Work(0, 64), declined)
    assert (receipt.outcome, receipt.reason) == (Outcome.BACKEND_DECLINED_REUSE, DeclineReason.QUALITY_RISK)
    assert receipt.spans == PLAN.spans


def test_the_backends_reason_wins_over_an_exact_prefix():
    receipt = build_receipt(facts(PLAN, exact_tokens=16), None, Decline(DeclineReason.STALE, "gone"))
    assert (receipt.outcome, receipt.reason, receipt.detail) == (
        Outcome.BACKEND_DECLINED_REUSE,
        DeclineReason.STALE,
        "gone",
    )


@pytest.mark.parametrize(
    ("decision", "exact_tokens", "outcome"),
    [
        (None, 0, Outcome.COLD_FALLBACK),
        (None, 16, Outcome.EXACT_PREFIX_ROUTE),
        (Decline(DeclineReason.NOTHING_SHARED), 0, Outcome.COLD_FALLBACK),
        (Decline(DeclineReason.NOTHING_SHARED), 16, Outcome.EXACT_PREFIX_ROUTE),
        (Decline(DeclineReason.DISABLED, "found", discovery_only=True), 0, Outcome.SEMANTIC_DISCOVERY_ONLY),
        (Decline(DeclineReason.DISABLED, "found", discovery_only=True), 16, Outcome.EXACT_PREFIX_ROUTE),
        (Decline(DeclineReason.DISABLED, "discovery only: prose decides nothing"), 0, Outcome.COLD_FALLBACK),
    ],
)
def test_without_a_backends_word_the_decision_and_the_exact_prefix_decide(decision, exact_tokens, outcome):
    receipt = build_receipt(facts(decision, exact_tokens=exact_tokens))
    assert receipt.outcome is outcome
    assert receipt.reason is (decision.reason if decision else None)
