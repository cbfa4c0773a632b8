from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import CALLER_DETAILS, TOKEN_KINDS, Receipt
from semblend.errors import ReceiptError
from semblend.plan.reuse_plan import DeclineReason
from semblend.prompt import Namespace
from semblend.span import Span
from tools.reference.event_schema import RECEIPT_FIELDS

MakeReceipt = Callable[..., Receipt]

SPEC_FIELDS = [
    "request_id", "engine", "engine_version", "namespace", "outcome", "mode",
    "prompt_tokens", "exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens",
    "spans", "risk", "escalations", "canary",
    "lookup_ms", "load_ms", "compute_ms", "ttft_ms", "service_ms",
    "kind", "expected_ms", "expected_cold_ms", "reason", "detail",
]  # fmt: skip
WITHOUT_REUSE = [outcome for outcome in Outcome if outcome is not Outcome.BACKEND_MATERIALIZED_REUSE]


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    """Any honest receipt."""
    measure = st.none() | st.floats(0, 1e6)
    spans, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = at + draw(st.integers(0, 50))
        length = draw(st.integers(1, 200))
        spans.append(Span(draw(st.text(min_size=1)), draw(st.integers(0, 500)), start, length, draw(st.integers(0, 9))))
        at = start + length
    span_tokens = sum(span.length for span in spans)
    prompt_tokens = max(1, at + draw(st.integers(0, 100)))
    reused = draw(st.integers(0, span_tokens))
    recomputed = draw(st.integers(0, prompt_tokens - reused))
    exact = draw(st.integers(0, prompt_tokens - reused - recomputed))
    outcome = Outcome.BACKEND_MATERIALIZED_REUSE if reused else draw(st.sampled_from(WITHOUT_REUSE))
    declined = outcome is Outcome.BACKEND_DECLINED_REUSE
    reasons = st.sampled_from(DeclineReason)
    return Receipt(
        request_id=draw(st.text(min_size=1)),
        engine=draw(st.sampled_from(["vllm", "sglang", "semblend"])),
        engine_version=draw(st.text(max_size=5)),
        namespace=Namespace(tenant=draw(st.text(max_size=3))).digest,
        outcome=outcome,
        mode=draw(st.sampled_from(["", "exact", "fast", "balanced"])),
        prompt_tokens=prompt_tokens,
        exact_tokens=exact,
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        prefill_tokens=prompt_tokens - exact - reused - recomputed,
        spans=tuple(spans),
        risk=draw(measure),
        escalations=draw(st.integers(0, 4)),
        canary=draw(measure),
        lookup_ms=draw(measure),
        load_ms=draw(measure),
        compute_ms=draw(measure),
        ttft_ms=draw(measure),
        reason=draw(reasons if declined else st.none() | reasons),
        detail=draw(st.text(max_size=20)),
    )


@given(receipts())
def test_the_four_kinds_always_sum_to_the_prompt(receipt: Receipt) -> None:
    assert sum(receipt.tokens.values()) == receipt.prompt_tokens
    assert tuple(receipt.tokens) == TOKEN_KINDS
    assert 0 <= receipt.reuse_ratio <= 1
    assert receipt.reused_tokens <= receipt.span_tokens


@given(receipts())
def test_a_receipt_survives_json(receipt: Receipt) -> None:
    assert Receipt.from_dict(json.loads(json.dumps(receipt.to_dict()))) == receipt


@given(receipts(), st.sampled_from(TOKEN_KINDS), st.integers(-300, 300).filter(bool))
def test_a_receipt_whose_parts_do_not_add_up_is_refused(receipt: Receipt, kind: str, error: int) -> None:
    record = receipt.to_dict()
    record[f"{kind}_tokens"] += error
    with pytest.raises(ReceiptError):
        Receipt.from_dict(record)


def test_a_receipt_has_exactly_the_fields_of_the_interface() -> None:
    assert [f.name for f in fields(Receipt)] == SPEC_FIELDS
    assert [row.name for row in RECEIPT_FIELDS] == SPEC_FIELDS
    assert all(row.help.endswith((".", "…")) for row in RECEIPT_FIELDS)


def test_a_receipt_cannot_be_changed(make_receipt: MakeReceipt) -> None:
    with pytest.raises(FrozenInstanceError):
        make_receipt().reused_tokens = 90  # type: ignore[misc]


def test_spans_are_written_with_the_names_of_the_interface(make_receipt: MakeReceipt) -> None:
    assert make_receipt().to_dict()["spans"] == [
        {"donor_id": "req-1", "generation": 3, "donor_start": 0, "target_start": 20, "length": 64}
    ]


def test_donors_are_listed_once_in_order_of_use(make_receipt: MakeReceipt) -> None:
    spans = (Span("b", 0, 0, 20), Span("a", 0, 20, 20), Span("b", 40, 40, 20))
    assert make_receipt(spans=spans).donor_ids == ("b", "a")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prefill_tokens": 27}, "= 101, but the prompt has 100"),
        ({"exact_tokens": -1, "prefill_tokens": 37}, "exact_tokens is -1"),
        ({"reused_tokens": 60.0}, "reused_tokens is 60.0"),
        ({"escalations": True}, "escalations is True"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"spans": (Span("a", 0, 0, 40), Span("b", 0, 39, 40))}, "starts before"),
        ({"spans": (Span("b", 0, 50, 40), Span("a", 0, 0, 40))}, "starts before"),
        ({"spans": (Span("a", 0, 40, 64),)}, "a span ends at 104"),
        ({"spans": (Span("a", 0, -1, 64),)}, "starts before"),
        ({"spans": (Span("a", 0, 20, 64), Span("a", 64, 84, 0))}, "a span of 0 tokens"),
        ({"spans": (Span("a", -4, 20, 64),)}, "from donor token -4"),
        ({"spans": (Span("a", 0, 20, 59),)}, "60 tokens reused, but the spans hold 59"),
        ({"spans": ()}, "60 tokens reused, but the spans hold 0"),
        ({"spans": [Span("a", 0, 20, 64)]}, "not a tuple of Span"),
        ({"outcome": Outcome.COLD_FALLBACK}, "cold_fallback with 60 tokens reused"),
        ({"outcome": Outcome.SEMANTIC_PLACEMENT}, "semantic_placement with 60 tokens reused"),
        ({"reused_tokens": 0, "prefill_tokens": 86}, "backend_materialized_reuse with 0 tokens"),
        ({"outcome": "backend_materialized_reuse"}, "outcome is 'backend_materialized_reuse'"),
        ({"reason": "stale"}, "reason is 'stale'"),
        ({"risk": math.nan}, "risk is nan"),
        ({"risk": math.inf}, "risk is inf"),
        ({"risk": -0.1}, "risk is -0.1"),
        ({"canary": True}, "canary is True"),
        ({"ttft_ms": -1.0}, "ttft_ms is -1.0"),
        ({"request_id": ""}, "request_id is empty"),
        ({"engine": None}, "engine is NoneType"),
        ({"namespace": "acme-corp"}, "namespace is not a digest"),
    ],
)
def test_a_receipt_that_contradicts_itself_is_refused(
    make_receipt: MakeReceipt, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ReceiptError, match="receipt refused") as refusal:
        make_receipt(**changes)
    assert complaint in refusal.value.message
    assert refusal.value.hint
    assert "\n" not in str(refusal.value)


def test_a_decline_needs_a_reason(make_cold_receipt: MakeReceipt) -> None:
    with pytest.raises(ReceiptError, match="without a reason"):
        make_cold_receipt(outcome=Outcome.BACKEND_DECLINED_REUSE)
    receipt = make_cold_receipt(outcome=Outcome.BACKEND_DECLINED_REUSE, reason=DeclineReason.CAPACITY)
    assert receipt.reason is DeclineReason.CAPACITY


def test_a_span_may_be_recomputed_as_a_whole(make_cold_receipt: MakeReceipt) -> None:
    receipt = make_cold_receipt(spans=(Span("a", 0, 0, 40),), recomputed_tokens=40, prefill_tokens=60)
    assert receipt.reuse_ratio == 0


NEWER = ("service_ms", "kind", "expected_ms", "expected_cold_ms")


def test_a_record_of_an_earlier_version_is_read(make_receipt: MakeReceipt) -> None:
    record = {name: value for name, value in make_receipt().to_dict().items() if name not in NEWER}
    assert Receipt.from_dict(record) == make_receipt()


@pytest.mark.parametrize("name", [name for name in SPEC_FIELDS if name not in NEWER])
def test_a_missing_key_is_named(make_receipt: MakeReceipt, name: str) -> None:
    record = make_receipt().to_dict()
    del record[name]
    with pytest.raises(ReceiptError, match=f"lacks {name}"):
        Receipt.from_dict(record)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"surprise": 1}, "unknown keys 'surprise'"),
        ({"outcome": "great_success"}, "outcome is 'great_success'"),
        ({"reason": "bored"}, "reason is 'bored'"),
        ({"spans": "none"}, "spans is not a list"),
        ({"spans": [7]}, "a span is int, not an object"),
        ({"spans": [{"donor_id": "a"}]}, "span lacks generation, donor_start, target_start, length"),
        (
            {"spans": [{"donor_id": 1, "generation": 0, "donor_start": 0, "target_start": 0, "length": 64}]},
            "donor_id of a span is not a string",
        ),
        (
            {"spans": [{"donor_id": "a", "generation": 0, "donor_start": 0.5, "target_start": 0, "length": 64}]},
            "donor_start of a span is 0.5",
        ),
    ],
)
def test_a_record_that_is_no_receipt_is_refused(
    make_receipt: MakeReceipt, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ReceiptError) as refusal:
        Receipt.from_dict({**make_receipt().to_dict(), **changes})
    assert complaint in refusal.value.message


CALLER_FIELDS = [name for name in SPEC_FIELDS if name not in ("namespace", "spans", *NEWER)]


@given(receipts())
def test_a_caller_sees_counts_outcome_risk_and_times_but_no_spans(receipt: Receipt) -> None:
    seen = receipt.to_caller_dict()
    assert list(seen) == CALLER_FIELDS
    assert all(seen[name] == receipt.to_dict()[name] for name in CALLER_FIELDS if name != "detail")


@pytest.mark.parametrize("reason", [*DeclineReason, None])
def test_what_a_caller_reads_names_no_donor(make_cold_receipt: MakeReceipt, reason: DeclineReason | None) -> None:
    said = "donor 'req-17' at 4096, 512 tokens"
    seen = make_cold_receipt(reason=reason, detail=said).to_caller_dict()
    own_text = (DeclineReason.TOO_SHORT, DeclineReason.UNSUPPORTED_MODE)  # written before any donor is looked at
    assert (seen["detail"] == said) is (reason in own_text)
    assert "req-17" not in json.dumps(seen) or reason in own_text


def test_every_reason_has_words_for_the_caller() -> None:
    assert set(CALLER_DETAILS) == set(DeclineReason)
