"""Witnesses: who may confirm reuse, and what happens when they disagree."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sembench.backends import ServerAnswer
from sembench.result import RequestRecord
from sembench.witnesses.audit import AuditLog, join_audit, strip_id
from sembench.witnesses.confirmation import Expectation, confirm, measure_shared_text
from sembench.witnesses.prometheus import CounterDelta, merge_deltas, pair_snapshots, parse_samples, summarize_deltas
from semblend.errors import InputError


def answer(reused=300, *, exact=16, cached=None, prompt=500, **more):
    receipt = {
        "outcome": "backend_materialized_reuse" if reused else "cold_fallback",
        "exact_tokens": exact,
        "reused_tokens": reused,
        "recomputed_tokens": 20,
        "prefill_tokens": prompt - exact - reused - 20,
        "donors": ["d"] if reused else [],
        "risk": 0.01,
    } | more.pop("receipt", {})
    cached = exact + reused if cached is None else cached
    return ServerAnswer(receipt=receipt, prompt_tokens=prompt, cached_tokens=cached, **more)


def moved(reused: int, requests: int = 1) -> CounterDelta:
    text = 'semblend_requests_total{{outcome="x"}} {}\nsemblend_tokens_total{{kind="reused"}} {}\n'
    return CounterDelta(parse_samples(text.format(4, 100)), parse_samples(text.format(4 + requests, 100 + reused)))


def test_witnesses_that_agree_confirm_what_is_beyond_the_exact_prefix():
    found = confirm(answer(), Expectation(donor_tokens=400, shared=0.8), moved(300))
    assert found.backend_confirmed_tokens == 300
    assert found.exact_tokens == 16
    assert found.confirmation_sources == ("receipt", "usage", "prometheus")
    assert found.contradictions == ()
    assert found.flush_contaminated is None


@pytest.mark.parametrize(
    ("given_", "expected", "delta", "told"),
    [
        (answer(), Expectation(), moved(0), "the counters did not move"),
        (answer(), Expectation(), moved(100), "the counters moved by 100"),
        (answer(reused=0), Expectation(), moved(300), "claims 0 reused tokens, the counters moved by 300"),
        (answer(), Expectation(), moved(0, requests=0), "the counters saw no request"),
        (answer(cached=10), Expectation(), None, "usage counts 10 cached tokens, the receipt 316"),
        (answer(cached=400), Expectation(), None, "usage counts 400 cached tokens, the receipt only 316"),
        (answer(cached_semantic=7), Expectation(), None, "usage counts 7 semantic tokens"),
        (answer(receipt={"prefill_tokens": 0}), Expectation(), None, "parts sum to 336, the prompt has 500"),
        (answer(receipt={"outcome": "cold_fallback"}), Expectation(), None, "says cold_fallback with 300"),
        (answer(receipt={"donors": []}), Expectation(), None, "names no donor"),
        (answer(receipt={"reused_tokens": None}), Expectation(), None, "does not say how many"),
        (answer(), Expectation(must_be_cold=True), None, "reused where no donor was primed"),
        (answer(reused=0), Expectation(must_be_cold=True), None, "16 tokens cached right after the cache was emptied"),
        (answer(), Expectation(donor_tokens=200), None, "300 tokens reused of donors that hold 200"),
        (answer(), Expectation(shared=0.1), None, "donors share 10% of the text"),
        (answer(reused=0), Expectation(other_tenant=True, may_reuse=False), None, "16 tokens of another tenant"),
    ],
)
def test_a_contradiction_is_told(given_, expected, delta, told):
    lines = confirm(given_, expected, delta).contradictions
    assert any(told in line for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_a_receipt_for_a_caller_confirms_without_naming_donors():
    told = answer()
    shown = {name: value for name, value in told.receipt.items() if name != "donors"}
    found = confirm(replace(told, receipt=shown), Expectation(donor_tokens=400, shared=0.8), moved(300))
    assert found.backend_confirmed_tokens == 300
    assert found.contradictions == ()


def test_an_engine_that_fills_gaps_itself_may_count_them_as_cached():
    assert confirm(answer(cached=336), Expectation()).contradictions == ()


def test_what_flatters_least_counts():
    assert confirm(answer(), Expectation(), moved(0)).backend_confirmed_tokens == 0
    assert confirm(answer(cached=10), Expectation()).backend_confirmed_tokens == 10
    assert confirm(answer(), Expectation(may_reuse=False), moved(0)).backend_confirmed_tokens == 300
    assert confirm(answer(reused=0), Expectation(may_reuse=False), moved(50)).backend_confirmed_tokens == 50


@given(st.integers(0, 400), st.integers(0, 400))
def test_a_permitted_reuse_never_exceeds_any_witness(receipt, counters):
    found = confirm(answer(receipt, exact=0), Expectation(), moved(counters))
    assert found.backend_confirmed_tokens == min(receipt, counters)
    assert bool(found.contradictions) == (receipt != counters)


def test_silence_is_not_zero():
    found = confirm(ServerAnswer(prompt_tokens=500, ttft_ms=1.0), Expectation())
    assert found.backend_confirmed_tokens is None
    assert found.confirmation_sources == ()
    assert confirm(ServerAnswer(prompt_tokens=500, cached_tokens=0), Expectation()).backend_confirmed_tokens == 0
    # a plain prefix cache says how much it had, and nothing about semantic reuse
    plain = confirm(ServerAnswer(prompt_tokens=500, cached_tokens=480), Expectation())
    assert (plain.backend_confirmed_tokens, plain.exact_tokens, plain.confirmation_sources) == (None, 480, ("usage",))


def test_time_confirms_nothing():
    fast = confirm(ServerAnswer(prompt_tokens=500, cached_tokens=0, ttft_ms=0.1), Expectation())
    assert fast.backend_confirmed_tokens == 0


def test_counters_that_others_moved_too_are_no_witness():
    found = confirm(answer(), Expectation(), moved(900, requests=3))
    assert found.confirmation_sources == ("receipt", "usage")
    assert found.contradictions == ()
    assert "prometheus" not in confirm(answer(), Expectation(alone=False), moved(300)).confirmation_sources


def test_a_connectors_hits_are_read_where_the_engine_has_no_receipt():
    names = "vllm:external_prefix_cache_hits_total {}\nvllm:request_success_total {}\n"
    delta = CounterDelta(parse_samples(names.format(10, 1)), parse_samples(names.format(138, 2)))
    found = confirm(ServerAnswer(prompt_tokens=500, cached_tokens=128), Expectation(), delta)
    assert (found.backend_confirmed_tokens, found.external_confirmed_tokens, found.confirmation_sources) == (
        128,
        128,
        ("usage", "prometheus"),
    )


def test_what_texts_share_is_an_upper_bound_of_reuse():
    shared = "the quick brown fox jumps over the lazy dog and runs away "
    assert measure_shared_text(shared, [shared]) == 1.0
    assert measure_shared_text("x" * 58 + shared, ["y" * 9 + shared]) == pytest.approx(0.5, abs=0.01)
    assert measure_shared_text(shared, ["something else entirely, of about the same length as it is"]) == 0.0
    assert measure_shared_text(shared, []) == 0.0


# -- counters ------------------------------------------------------------------------------------------------------


def test_a_restarted_server_is_noticed():
    delta = CounterDelta(parse_samples("a_total 5"), parse_samples("a_total 1"))
    assert delta.reset_detected
    assert delta.compute_rise("a") is None
    assert confirm(answer(), Expectation(), CounterDelta(moved(0).after, moved(0).before)).confirmation_sources == (
        "receipt",
        "usage",
    )


def test_a_counter_that_appears_starts_from_zero_and_an_absent_one_is_unknown():
    delta = CounterDelta(parse_samples(""), parse_samples('a_total{k="x"} 3'))
    assert delta.compute_rise(("a_total", ("k", "x"))) == 3
    assert delta.compute_rise(("a_total", ("k", "y"))) == 0
    assert delta.compute_rise("b") is None


def test_metrics_with_odd_labels_are_read():
    found = parse_samples('# HELP x\nx{a="q\\"1,}",b="two\\nlines"} 1e3 1700000000\ny NaN\n')
    assert found["x", (("a", 'q"1,}'), ("b", "two\nlines"))] == 1000.0
    assert parse_samples("# TYPE a_total counter\na_total +Inf")["a_total", ()] == math.inf
    assert isinstance(parse_samples("a_total 3")["a_total", ()], float)


@pytest.mark.parametrize(
    "text", ["<html>", "x one", "x", "{} 1", 'x{a="b" 1', "x{a=b} 1", "# TYPE", "x 1_000", "\x00", "a 1\nnot a sample"]
)
def test_what_is_not_prometheus_text_is_an_error_with_a_hint(text):
    with pytest.raises(InputError, match="the metrics are not Prometheus text") as refusal:
        parse_samples(text)
    assert "\n" not in refusal.value.message
    assert refusal.value.hint


@given(st.text(alphabet='ax_{}"=,\\# 1.\n', max_size=40) | st.text(max_size=40))
def test_no_text_of_a_server_breaks_the_reader_of_metrics(text):
    with contextlib.suppress(InputError):
        assert all(isinstance(value, float) for value in parse_samples(text).values())


def test_endpoints_add_up_and_those_that_failed_are_counted():
    one, two = (
        parse_samples("vllm:external_prefix_cache_hits_total 1"),
        parse_samples("vllm:external_prefix_cache_hits_total 4"),
    )
    pairs = pair_snapshots([one, None, one], [two, two, two])
    assert merge_deltas(pairs).compute_rise("vllm:external_prefix_cache_hits") == 6
    found = summarize_deltas(pairs, failed=1)
    assert (found["external_prefix_cache_hits_delta"], found["endpoints_paired"], found["endpoints_failed"]) == (
        6,
        2,
        1,
    )
    assert found["external_prefix_cache_queries_delta"] is None


# -- the audit stream ----------------------------------------------------------------------------------------------

RECORD = RequestRecord(
    item_id="i", dataset="d", transform="t", negative_control=False, prompt_tokens=512, total_blocks=32,
    engine_request_id="chatcmpl-r1", reused_tokens=300, backend_confirmed_tokens=300, confirmation_sources=("receipt",),
)  # fmt: skip


def audit(tmp_path, *events, end="\n"):
    path = tmp_path / "audit.jsonl"
    path.write_text("\n".join(json.dumps(event) for event in events) + end)
    return AuditLog.read([str(path)])


def test_our_events_join_by_request_and_agree(tmp_path):
    receipt = {"reused_tokens": 300}
    log = audit(tmp_path, {"event": "lookup", "request_id": "chatcmpl-r1"},
                {"event": "reuse_confirmed", "request_id": "chatcmpl-r1", "receipt": receipt})  # fmt: skip
    found = join_audit(RECORD, log, 16)
    assert (found.audit_joined, found.audit_materialized) == (True, True)
    assert found.confirmation_sources == ("receipt", "audit")
    assert found.contradictions == ()


def test_an_audit_stream_that_denies_the_receipt_is_a_contradiction_and_counts(tmp_path):
    log = audit(tmp_path, {"event": "fallback", "request_id": "r1", "receipt": {"reused_tokens": 0}})
    found = join_audit(RECORD, log, 16)
    assert "the audit stream says 0 reused tokens, the receipt 300" in found.contradictions
    assert (found.backend_confirmed_tokens, found.backend_confirmed_blocks) == (0, 0)
    assert join_audit(replace(RECORD, negative_control=True), log, 16).backend_confirmed_tokens == 300


def test_a_connectors_own_dialect_is_read(tmp_path):
    events = [
        {"event": "semantic_span_load_advertised", "request_id": "r1-0", "boundary": 64, "target_start": 64,
         "token_count": 256},
        {"event": "load_allocated", "request_id": "r1-0", "tokens": 256},
        {"event": "runtime_materialized", "request_id": "r1-0", "tokens": 256},
    ]  # fmt: skip
    silent = replace(RECORD, reused_tokens=None, backend_confirmed_tokens=None, confirmation_sources=())
    found = join_audit(silent, audit(tmp_path, *events), 16)
    assert (found.backend_confirmed_tokens, found.backend_confirmed_blocks) == (256, 16)
    assert (found.audit_advertised_tokens, found.audit_boundary_at_span_start, found.audit_load_allocated) == (
        256,
        True,
        True,
    )
    assert found.external_confirmed_tokens_source == "connector_audit"


def test_what_was_advertised_and_not_materialized_is_not_reuse(tmp_path):
    events = [
        {"event": "semantic_span_load_advertised", "request_id": "r1", "token_count": 256},
        {"event": "runtime_materialization_declined", "request_id": "r1", "declined_reason": "stale"},
    ]
    silent = replace(RECORD, reused_tokens=None, backend_confirmed_tokens=None)
    found = join_audit(silent, audit(tmp_path, *events), 16)
    assert (found.backend_confirmed_tokens, found.audit_materialized) == (0, False)
    assert found.audit_declined_reasons == ("stale",)


def test_a_load_that_two_ranks_tell_counts_once(tmp_path):
    load = {"event": "runtime_materialized", "request_id": "r1", "donor_id": "d1", "tokens": 40}
    silent = replace(RECORD, reused_tokens=None, backend_confirmed_tokens=None)
    events = [load | {"rank": 0}, load | {"rank": 1}, load | {"donor_id": "d2"}]
    found = join_audit(silent, audit(tmp_path, *events), 16)
    assert (found.backend_confirmed_tokens, found.backend_confirmed_blocks) == (80, 5)


def test_a_request_without_events_is_not_joined(tmp_path):
    found = join_audit(RECORD, audit(tmp_path, {"event": "lookup", "request_id": "other"}), 16)
    assert found.audit_joined is False
    assert found.backend_confirmed_tokens == 300


def test_an_audit_file_that_is_being_written_is_read_and_a_broken_one_refused(tmp_path):
    assert audit(tmp_path, {"event": "lookup", "request_id": "r1"}, end='\n{"event": "loo').lines == 1
    (tmp_path / "bad.jsonl").write_text("oops\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        AuditLog.read([str(tmp_path / "bad.jsonl")])


def test_ids_are_compared_without_what_engines_put_around_them():
    assert strip_id("chatcmpl-abc-0") == strip_id("cmpl-abc") == strip_id("abc") == "abc"
