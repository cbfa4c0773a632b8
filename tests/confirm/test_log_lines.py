from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.confirm import events
from semblend.confirm.events import Event, EventKind
from semblend.confirm.log_lines import LogFormat, format_line
from semblend.confirm.receipt import Receipt
from semblend.plan.reuse_plan import DeclineReason
from semblend.span import Span

MakeReceipt = Callable[..., Receipt]
DIGEST = "0123456789abcdef0123456789abcdef"

GOLDEN: dict[str, dict[EventKind, str]] = {
    "vllm": {
        EventKind.DONOR_REGISTERED: (
            f"SemBlend donor registered request_id=req-1 namespace={DIGEST} tokens=512 blocks=32"
        ),
        EventKind.LOOKUP: (
            "SemBlend semantic lookup hit request_id=req-2 donor_id=req-1,req-0 similarity=0.9670 "
            "kind=request_local_segmented reusable_tokens=72 reason=ok latency_ms=0.412"
        ),
        EventKind.REUSE_PLANNED: (
            "SemBlend request-local experimental load advertised request_id=req-2 donor_id=req-1,req-0 tokens=72"
        ),
        EventKind.REUSE_CONFIRMED: "SemBlend materialized request_id=req-2 donor_id=req-1 tokens=60",
        EventKind.ERROR: 'ERROR SemBlend store request_id=req-2 message="disk full"',
    },
    "sglang": {
        EventKind.DONOR_REGISTERED: "[FUZZY] register_donor: ok request_id=req-1 tokens=512",
        EventKind.LOOKUP: "[FUZZY] semantic hit request_id=req-2 similarity=0.9670 matched_tokens=72",
        EventKind.REUSE_CONFIRMED: "[FUZZY] Realized 60 fuzzy tokens request_id=req-2 spans=1",
        EventKind.ERROR: 'ERROR SemBlend store request_id=req-2 message="disk full"',
    },
    "trtllm": {
        EventKind.DONOR_REGISTERED: (
            '{"event":"donor_registered","time_unix_s":1750000000.25,"request_id":"req-1","donor_id":"req-1",'
            f'"namespace":"{DIGEST}","token_count":512}}'
        ),
        EventKind.LOOKUP: (
            '{"event":"lookup","time_unix_s":1750000000.25,"request_id":"req-2","found":true,'
            '"materialization_enabled":true,"num_computed_tokens":10,"num_new_matched_tokens":72,'
            '"prefix_token_count":82,"computed_token_count":10,"kind":"request_local_segmented","similarity":0.967,'
            '"reuse_ratio":0.72,"rejection_reason":""}'
        ),
        EventKind.REUSE_PLANNED: (
            '{"event":"plan_dispatched","time_unix_s":1750000000.25,"request_id":"req-2",'
            '"kind":"request_local_segmented","segment_count":2,"covered_token_count":72}'
        ),
        EventKind.REUSE_CONFIRMED: (
            '{"event":"materialized","time_unix_s":1750000000.25,"request_id":"req-2","materialized":1,'
            '"kind":"request_local_segmented","segment_count":1,"covered_token_count":60,"prefix_token_count":84,'
            '"computed_token_count":10,"requires_rope_correction":true}'
        ),
    },
    "lmcache": {
        EventKind.DONOR_REGISTERED: "Stored 512 out of total 512 tokens",
        EventKind.REUSE_PLANNED: (
            "Reqid: req-2, Total tokens 100, Inference Engine computed tokens: 10, "
            "LMCache hit tokens: 82, need to load: 72"
        ),
        EventKind.REUSE_CONFIRMED: "Retrieved 60 out of 100 tokens",
        EventKind.ERROR: 'ERROR SemBlend store request_id=req-2 message="disk full"',
    },
}

# How a reader recognises that KV was materialized, one pattern a format.
MATERIALIZED = re.compile(r'SemBlend materialized|\[FUZZY\] Realized|"event":"materialized"|Retrieved \d+')


@pytest.mark.parametrize("engine", GOLDEN)
@pytest.mark.parametrize("kind", EventKind)
def test_each_format_has_its_own_lines_and_no_others(
    event_of: dict[EventKind, Event], engine: LogFormat, kind: EventKind
) -> None:
    assert format_line(event_of[kind], engine) == GOLDEN[engine].get(kind)


@pytest.mark.parametrize("kind", EventKind)
def test_our_own_format_is_the_audit_line(event_of: dict[EventKind, Event], kind: EventKind) -> None:
    assert format_line(event_of[kind], "semblend") == event_of[kind].to_json_line()


@pytest.mark.parametrize("engine", GOLDEN)
def test_only_a_confirmed_reuse_reads_as_materialized(event_of: dict[EventKind, Event], engine: LogFormat) -> None:
    kinds = [kind for kind in EventKind if MATERIALIZED.search(format_line(event_of[kind], engine) or "")]
    assert kinds == [EventKind.REUSE_CONFIRMED]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_lookup_that_found_nothing_is_no_hit(engine: LogFormat) -> None:
    assert format_line(events.lookup("r", 100, 0, 0, 0.1), engine) is None
    assert format_line(events.lookup("r", 100, 0, 0, 0.1, reusable_tokens=0, similarity=0.99), engine) is None


def test_a_lookup_that_was_declined_says_why() -> None:
    event = events.lookup(
        "r", 100, 1, 1, 0.1, reusable_tokens=40, donor_ids=("d",), reason=DeclineReason.BELOW_BREAK_EVEN
    )
    line = format_line(event, "vllm") or ""
    assert "kind=discovery_only reusable_tokens=40 reason=below_break_even" in line
    audit = json.loads(format_line(event, "trtllm") or "")
    assert (audit["found"], audit["num_new_matched_tokens"]) == (True, 0)
    assert (audit["materialization_enabled"], audit["rejection_reason"]) == (False, "below_break_even")


def test_a_lookup_that_found_nothing_is_in_the_audit() -> None:
    event = events.lookup("r", 100, 0, 0, 0.1, reason=DeclineReason.NOTHING_SHARED)
    audit = json.loads(format_line(event, "trtllm") or "")
    assert (audit["found"], audit["similarity"], audit["rejection_reason"]) == (False, 0.0, "nothing_shared")


@pytest.mark.parametrize(("similarity", "written"), [(None, "0.4000"), (float("nan"), "0.4000"), (-0.2, "0.0000")])
def test_a_hit_line_always_has_a_readable_similarity(similarity: float | None, written: str) -> None:
    event = events.lookup("r", 100, 1, 1, 0.1, reusable_tokens=40, donor_ids=("d",), similarity=similarity)
    for engine in ("vllm", "sglang"):
        assert f"similarity={written} " in (format_line(event, engine) or "")


def test_a_donor_without_a_request_is_named_by_its_id() -> None:
    event = events.donor_registered("donor-7", DIGEST, 64, 1)
    assert format_line(event, "vllm") == (
        f"SemBlend donor registered request_id=donor-7 namespace={DIGEST} tokens=64 blocks=0"
    )


def test_a_leading_span_at_its_old_place_needs_no_rotation(make_receipt: MakeReceipt) -> None:
    receipt = make_receipt(exact_tokens=0, prefill_tokens=36, spans=(Span("d", 0, 0, 64),))
    audit = json.loads(format_line(events.reuse_confirmed(receipt), "trtllm") or "")
    assert (audit["kind"], audit["requires_rope_correction"]) == ("request_local_prefix", False)


def test_a_plan_of_unknown_length_has_no_lmcache_line() -> None:
    assert format_line(events.reuse_planned("r", (Span("d", 0, 0, 64),), 64), "lmcache") is None


def test_an_unknown_format_is_refused(event_of: dict[EventKind, Event]) -> None:
    with pytest.raises(ValueError, match="no log format 'tgi'") as refusal:
        format_line(event_of[EventKind.LOOKUP], "tgi")  # type: ignore[arg-type]
    assert all(name in str(refusal.value) for name in get_args(LogFormat))


@given(st.text(min_size=1), st.text(min_size=1), st.text())
def test_no_id_or_message_can_break_or_imitate_a_line(request_id: str, donor_id: str, message: str) -> None:
    made: tuple[Any, ...] = (
        events.donor_registered(donor_id, DIGEST, 512, 3, blocks=32, request_id=request_id),
        events.lookup(request_id, 100, 7, 2, 0.4, reusable_tokens=72, donor_ids=(donor_id, "d")),
        events.reuse_planned(request_id, (Span(donor_id, 0, 0, 64),), 64, prompt_tokens=100),
    )
    for event in made:
        for engine in ("vllm", "sglang", "lmcache", "trtllm"):
            line = format_line(event, engine)
            if line is None:
                continue
            assert len(line.splitlines()) == 1
            assert line.isascii()
            if engine in ("vllm", "sglang"):
                keys = re.findall(r"(\w+)=", line)
                plain = format_line(events.Event(event.kind, {**event.fields, "donor_id": "d"}, "r"), engine)
                assert keys == re.findall(r"(\w+)=", plain or "")
    error = format_line(events.error("store", message, request_id), "vllm") or ""
    assert len(error.splitlines()) == 1


def test_an_id_that_is_no_valid_text_is_written_all_the_same() -> None:
    event = events.reuse_planned("bad-\ud800", (Span("d", 0, 0, 64),), 64)
    assert "request_id=bad-%5Cud800 donor_id=d" in (format_line(event, "vllm") or "")
    assert json.loads(format_line(event, "semblend") or "")["request_id"] == "bad-\ud800"
