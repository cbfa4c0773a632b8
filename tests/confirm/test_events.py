from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from typing import Any, get_args

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.confirm import events
from semblend.confirm.events import Event, EventKind, EvictionReason
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import TEXT_LIMIT, Receipt
from semblend.errors import ReceiptError
from semblend.plan.reuse_plan import DeclineReason
from semblend.span import Span
from tools.reference.event_pages import SCHEMA_FILE, events_markdown, schema_json
from tools.reference.event_schema import ENVELOPE, EVICTION_REASONS, KINDS, event_schema

MakeReceipt = Callable[..., Receipt]
VALIDATOR = jsonschema.Draft202012Validator(event_schema())


def errors_in(record: Any) -> list[str]:
    return [problem.message for problem in VALIDATOR.iter_errors(record)]


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(event_schema())


def test_the_schema_file_is_fresh() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_json(), "run python -m tools.reference.event_pages"
    assert json.loads(schema_json()) == event_schema()


@pytest.mark.parametrize("kind", EventKind)
def test_every_kind_of_event_is_valid(event_of: dict[EventKind, Event], kind: EventKind) -> None:
    line = event_of[kind].to_json_line()
    record = json.loads(line)
    assert errors_in(record) == []
    assert "\n" not in line
    assert list(record)[:5] == [row.name for row in ENVELOPE]
    assert (record["schema_version"], record["event"]) == (1, kind.value)


@pytest.mark.parametrize("kind", EventKind)
def test_the_schema_wants_every_required_field_and_no_other(event_of: dict[EventKind, Event], kind: EventKind) -> None:
    record = event_of[kind].to_dict()
    assert errors_in({**record, "prompt": "secret"})
    for row in (*ENVELOPE, *KINDS[kind].fields):
        if row.required:
            assert errors_in({name: value for name, value in record.items() if name != row.name}), row.name


def test_the_schema_refuses_wrong_values(event_of: dict[EventKind, Event]) -> None:
    wrong: list[tuple[EventKind, dict[str, Any]]] = [
        (EventKind.DONOR_REGISTERED, {"schema_version": 2}),
        (EventKind.DONOR_REGISTERED, {"namespace": "acme-corp"}),
        (EventKind.DONOR_REGISTERED, {"tokens": -1}),
        (EventKind.DONOR_EVICTED, {"reason": "boredom"}),
        (EventKind.LOOKUP, {"lookup_ms": "fast"}),
        (EventKind.REUSE_PLANNED, {"spans": [{"donor_id": "a"}]}),
        (EventKind.REUSE_DECLINED, {"reason": "boredom"}),
        (EventKind.REUSE_CONFIRMED, {"receipt": {}}),
        (EventKind.REUSE_CONFIRMED, {"request_id": None}),
        (EventKind.ERROR, {"event": "surprise"}),
    ]
    for kind, change in wrong:
        assert errors_in({**event_of[kind].to_dict(), **change}), (kind, change)


@pytest.mark.parametrize("kind", EventKind)
def test_the_table_and_the_constructor_agree(event_of: dict[EventKind, Event], kind: EventKind) -> None:
    assert set(event_of[kind].fields) == {row.name for row in KINDS[kind].fields}
    assert kind.value in vars(events), "a constructor carries the name of its kind"
    assert not {row.name for row in KINDS[kind].fields} & {row.name for row in ENVELOPE}


def test_no_constructor_takes_text_or_a_namespace() -> None:
    for kind in EventKind:
        parameters = inspect.signature(getattr(events, kind.value)).parameters
        assert not {"prompt", "text", "token_ids", "namespace", "salt"} & set(parameters)


def test_the_words_for_evictions_are_the_same_everywhere() -> None:
    assert get_args(EvictionReason) == EVICTION_REASONS


def test_an_event_knows_when_it_was_made() -> None:
    event = events.error("store", "disk full")
    assert event.time_unix_s > 1.7e9


def test_unknown_values_are_left_out_not_written_as_zero() -> None:
    record = events.lookup("r", 100, 0, 0, 0.1).to_dict()
    assert errors_in(record) == []
    assert set(record) == {row.name for row in ENVELOPE} | {"prompt_tokens", "seeds", "candidates", "lookup_ms"}


def test_a_lookup_without_a_request_is_valid() -> None:
    assert errors_in(events.lookup(None, 100, 0, 0, 0.1, reason=DeclineReason.NOTHING_SHARED).to_dict()) == []


def test_numpy_numbers_become_json_numbers() -> None:
    span = Span("d", np.int64(1), np.int64(2), np.int64(64))  # type: ignore[arg-type]
    planned = events.reuse_planned("r", (span,), np.int64(64), similarity=np.float32(0.5))  # type: ignore[arg-type]
    record = json.loads(planned.to_json_line())
    assert errors_in(record) == []
    assert record["spans"][0]["length"] == record["reused_tokens"] == 64
    assert record["similarity"] == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
def test_a_number_that_json_cannot_say_is_left_out(value: float) -> None:
    record = json.loads(events.lookup("r", 100, 0, 0, 0.1, similarity=value).to_json_line())
    assert "similarity" not in record
    assert errors_in(record) == []


@given(st.text(), st.text(), st.text())
def test_any_text_stays_on_one_ascii_line(request_id: str, where: str, message: str) -> None:
    line = events.error(where or "x", message, request_id).to_json_line()
    assert line.isascii()
    assert len(line.splitlines()) == 1
    record = json.loads(line)
    assert (record["request_id"], record["message"]) == (request_id, message[:TEXT_LIMIT])
    assert errors_in(record) == []


def test_long_texts_are_cut(make_cold_receipt: MakeReceipt) -> None:
    long = "x" * 10_000
    cut = [
        events.error("store", long),
        events.reuse_declined("r", DeclineReason.ERROR, long),
        events.fallback("r", None, long),
        events.from_receipt(make_cold_receipt(detail=long)),
    ]
    for event in cut:
        assert errors_in(event.to_dict()) == []
        assert len(event.to_json_line()) < 4 * TEXT_LIMIT


def test_an_event_cannot_be_changed(event_of: dict[EventKind, Event]) -> None:
    with pytest.raises(TypeError):
        event_of[EventKind.LOOKUP].fields["seeds"] = 1  # type: ignore[index]


def test_only_a_receipt_with_reuse_confirms_reuse(make_cold_receipt: MakeReceipt) -> None:
    with pytest.raises(ReceiptError, match="confirms no reuse"):
        events.reuse_confirmed(make_cold_receipt())


@pytest.mark.parametrize("outcome", Outcome)
def test_every_receipt_has_one_valid_event(
    make_receipt: MakeReceipt, make_cold_receipt: MakeReceipt, outcome: Outcome
) -> None:
    if outcome is Outcome.BACKEND_MATERIALIZED_REUSE:
        receipt = make_receipt()
    else:
        receipt = make_cold_receipt(outcome=outcome, reason=DeclineReason.STALE, detail="donor replaced")
    expected = {
        Outcome.BACKEND_MATERIALIZED_REUSE: EventKind.REUSE_CONFIRMED,
        Outcome.BACKEND_DECLINED_REUSE: EventKind.REUSE_DECLINED,
    }.get(outcome, EventKind.FALLBACK)
    event = events.from_receipt(receipt)
    assert (event.kind, event.request_id, event.engine) == (expected, "req-2", "vllm")
    record = json.loads(event.to_json_line())
    assert errors_in(record) == []
    assert Receipt.from_dict(record["receipt"]) == receipt


def test_the_page_names_every_kind_and_field() -> None:
    page = events_markdown()
    for kind, spec in KINDS.items():
        assert f"## {kind.value}\n\n{spec.help}" in page
        for row in spec.fields:
            assert f"| `{row.name}` |" in page
    assert page.endswith("\n")
    assert "None" not in page
