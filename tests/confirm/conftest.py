"""Receipts and events that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from semblend.confirm import events
from semblend.confirm.events import Event, EventKind
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.plan.reuse_plan import DeclineReason
from semblend.span import Span

DIGEST = "0123456789abcdef0123456789abcdef"
TIME = 1_750_000_000.25


def receipt_with(**changes: Any) -> Receipt:
    """100 tokens: 10 exact, 60 reused and 4 recomputed inside a span of 64, 26 prefilled."""
    values: dict[str, Any] = {
        "request_id": "req-2",
        "engine": "vllm",
        "engine_version": "0.26.0",
        "namespace": DIGEST,
        "outcome": Outcome.BACKEND_MATERIALIZED_REUSE,
        "mode": "balanced",
        "prompt_tokens": 100,
        "exact_tokens": 10,
        "reused_tokens": 60,
        "recomputed_tokens": 4,
        "prefill_tokens": 26,
        "spans": (Span("req-1", donor_start=0, target_start=20, length=64, generation=3),),
        "risk": 0.004,
        "load_ms": 1.5,
    }
    return Receipt(**{**values, **changes})


def cold_receipt_with(**changes: Any) -> Receipt:
    """100 tokens, nothing reused."""
    values: dict[str, Any] = {
        "request_id": "req-2",
        "engine": "vllm",
        "namespace": DIGEST,
        "outcome": Outcome.COLD_FALLBACK,
        "prompt_tokens": 100,
        "prefill_tokens": 100,
    }
    return Receipt(**{**values, **changes})


def one_event_of_each_kind() -> dict[EventKind, Event]:
    spans = (Span("req-1", 0, 20, 64, 3), Span("req-0", 5, 90, 8, 1))
    made = (
        events.donor_registered(
            "req-1", DIGEST, 512, 3, blocks=32, request_id="req-1", engine="vllm"
        ),
        events.donor_evicted("req-1", 3, "engine", engine="vllm"),
        events.lookup(
            "req-2", 100, 7, 2, 0.4125, exact_tokens=10, reusable_tokens=72, donor_ids=("req-1", "req-0"),
            similarity=0.967, engine="vllm",
        ),
        events.reuse_planned(
            "req-2", spans, 72, prompt_tokens=100, exact_tokens=10, saving_ms=12.5, engine="vllm"
        ),
        events.reuse_declined(
            "req-2", DeclineReason.BELOW_BREAK_EVEN, "saves 3 ms, costs 5 ms", engine="vllm"
        ),
        events.reuse_confirmed(receipt_with()),
        events.fallback("req-2", DeclineReason.STALE, "donor replaced", engine="vllm"),
        events.reuse_switched(
            "req-2", "one donor in order, 128+ tokens, 1+ spans", on=False, expected_ms=9.0, expected_cold_ms=7.5,
            detail="reuse is expected to take 9.0 ms, a prefill 7.5 ms", engine="vllm",
        ),
        events.error("store", "disk full", "req-2", engine="vllm"),
    )  # fmt: skip
    return {event.kind: replace(event, time_unix_s=TIME) for event in made}


@pytest.fixture(scope="session")
def make_receipt() -> Callable[..., Receipt]:
    return receipt_with


@pytest.fixture(scope="session")
def make_cold_receipt() -> Callable[..., Receipt]:
    return cold_receipt_with


@pytest.fixture(scope="session")
def event_of() -> dict[EventKind, Event]:
    return one_event_of_each_kind()
