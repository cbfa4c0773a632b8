"""The library as one object: switches, books, events, and that its own faults stay its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from worlds import tokens

from semblend import Decline, Namespace, Outcome, Prompt, Receipt, ReceiptError, ReusePlan, SemBlend, SemBlendConfig
from semblend.confirm.sinks import MemorySink

DOCUMENT = tokens(1, 2000)


def make(sink: MemorySink | None = None, **settings: object) -> SemBlend:
    config = SemBlendConfig(embedder="none", metrics=False, **settings)  # type: ignore[arg-type]
    sb = SemBlend(config, sinks=[sink] if sink else [])
    sb.register(Prompt(DOCUMENT), donor_id="d")
    return sb


def receipt(request_id: str, plan: ReusePlan, **changes: object) -> Receipt:
    values: dict[str, object] = {
        "request_id": request_id,
        "engine": "test",
        "engine_version": "1",
        "namespace": Namespace().digest,
        "outcome": Outcome.BACKEND_MATERIALIZED_REUSE,
        "mode": "fast",
        "prompt_tokens": plan.prompt_tokens,
        "exact_tokens": 0,
        "reused_tokens": plan.reused_tokens,
        "recomputed_tokens": 0,
        "prefill_tokens": plan.prefill_tokens,
        "spans": plan.spans,
    }
    return Receipt(**{**values, **changes})  # type: ignore[arg-type]


def test_the_switch_the_file_the_option_and_the_canary_decline_as_disabled(tmp_path):
    stop = tmp_path / "stop"
    sb = make(kill_file=str(stop))
    prompt = Prompt(DOCUMENT)
    assert isinstance(sb.lookup(prompt), ReusePlan)
    assert sb.lookup(prompt, opt_out=True).reason == "disabled"
    stop.touch()
    assert sb.lookup(prompt).reason == "disabled"
    stop.unlink()
    sb.disable()
    assert sb.lookup(prompt).reason == "disabled"
    sb.enable()
    assert isinstance(sb.lookup(prompt), ReusePlan)
    assert make(enabled=False).lookup(prompt).reason == "disabled"
    assert make(canary_percent=0.0).lookup(prompt).reason == "disabled"


def test_the_canary_takes_its_share_and_always_the_same_requests():
    sb = make(canary_percent=25.0)
    taken = {n for n in range(1000) if isinstance(sb.lookup(Prompt(DOCUMENT), request_id=str(n)), ReusePlan)}
    assert 180 < len(taken) < 320
    again = {n for n in range(1000) if isinstance(sb.lookup(Prompt(DOCUMENT), request_id=str(n)), ReusePlan)}
    assert taken == again


def test_discovery_only_reports_what_it_would_reuse_and_hands_out_nothing():
    sink = MemorySink()
    decision = make(sink, discovery_only=True).lookup(Prompt(DOCUMENT))
    assert isinstance(decision, Decline)
    assert "2000 tokens" in decision.detail
    (looked,) = (event for event in sink.events if event.kind == "lookup")
    assert looked.fields["reusable_tokens"] == 2000


def test_quality_mode_exact_hands_out_nothing():
    assert isinstance(make(quality="exact").lookup(Prompt(DOCUMENT)), Decline)


def test_a_request_from_lookup_to_receipt_is_booked_once():
    sink = MemorySink()
    sb = make(sink)
    plan = sb.lookup(Prompt(DOCUMENT), request_id="r")
    assert sb.totals().tokens.get("reused", 0) == 0, "a plan is no reuse"
    assert sb.claim(plan, "r") is plan
    assert sb.donors()[0].pinned
    sb.confirm(receipt("r", plan))
    assert not sb.donors()[0].pinned
    assert sb.totals().tokens["reused"] == 2000
    with pytest.raises(ReceiptError):
        sb.confirm(receipt("r", plan))
    kinds = [str(event.kind) for event in sink.events]
    assert kinds == ["donor_registered", "lookup", "reuse_planned", "reuse_confirmed"]
    assert all(json.loads(event.to_json_line())["schema_version"] == 1 for event in sink.events)


def test_a_receipt_that_claims_more_than_was_planned_is_refused():
    sb = make()
    plan = sb.lookup(Prompt(np.concatenate([DOCUMENT[:500], tokens(9, 500)])), request_id="r")
    greedy = receipt("r", plan, spans=(plan.spans[0].__class__("d", 0, 0, 900, plan.spans[0].generation),),
                     reused_tokens=900, prefill_tokens=100)  # fmt: skip
    with pytest.raises(ReceiptError):
        sb.confirm(greedy)


def test_a_fault_inside_a_lookup_costs_the_reuse_and_not_the_request(monkeypatch, caplog):
    sink = MemorySink()
    sb = make(sink)
    monkeypatch.setattr(sb._pipeline, "run", lambda *_: 1 / 0)
    decision = sb.lookup(Prompt(DOCUMENT), request_id="r")
    assert decision.reason == "error"
    assert "ZeroDivisionError" in decision.detail
    assert [e.fields["where"] for e in sink.events if e.kind == "error"] == ["lookup"]
    assert "runs cold" in caplog.text


def test_a_span_that_is_not_token_equal_never_leaves_even_if_the_search_is_wrong():
    """The store's tokens are changed behind the index's back: the guard is the last to look."""
    sb = make()
    sb._store.log.view(0)[1000] = 77_777
    decision = sb.lookup(Prompt(DOCUMENT))
    assert isinstance(decision, ReusePlan)
    held = np.zeros(2000, bool)
    for span in decision.spans:
        held[span.target_start : span.target_end] = True
    assert not held[1000]


def test_the_guard_itself_refuses_wrong_pieces():
    from semblend.align import aligner, kernels

    sb = make()
    store = sb._store
    held = store.log.tokens, store.slots.rows
    good = np.array([[0, 100, 0, 0]])
    aligner.check_pieces(DOCUMENT, good, store, 0, store.read_clock())
    for wrong in ([[0, 3000, 0, 0]], [[0, 100, 0, 1950]], [[50, 100, 0, 50], [80, 120, 0, 80]], [[5, 5, 0, 5]]):
        with pytest.raises(aligner.GuardError):
            aligner.check_pieces(np.concatenate([DOCUMENT, DOCUMENT]), np.array(wrong), store, 0, store.read_clock())
    with pytest.raises(aligner.GuardError):
        aligner.check_pieces(DOCUMENT, good, store, 7, store.read_clock())
    assert kernels.find_first_unequal(DOCUMENT, good, *held) == -1
    assert kernels.find_first_unequal(DOCUMENT, np.array([[0, 100, 0, 0], [100, 200, 0, 101]]), *held) == 1


def test_break_even_declines_when_loading_costs_more_than_prefill():
    slow = make(prefill_tokens_per_s=10_000.0, load_tokens_per_s=5_000.0)
    assert slow.lookup(Prompt(DOCUMENT)).reason == "below_break_even"
    fast = make(prefill_tokens_per_s=10_000.0, load_tokens_per_s=1_000_000.0)
    assert fast.lookup(Prompt(DOCUMENT)).saving_ms == pytest.approx(196.4)
    fixed = make(prefill_tokens_per_s=10_000.0, load_tokens_per_s=1_000_000.0, reuse_overhead_ms=200.0)
    assert fixed.lookup(Prompt(DOCUMENT)).reason == "below_break_even"


def test_a_low_share_is_declined_when_a_ratio_is_asked_for():
    sb = make(min_reuse_ratio=0.5)
    mixed = Prompt(np.concatenate([DOCUMENT[:400], tokens(5, 600)]))
    assert sb.lookup(mixed).reason == "low_reuse_ratio"
    assert make(min_reuse_ratio=0.4).lookup(mixed).reuse_ratio == 0.4


def test_a_time_budget_ends_the_search_and_plans_with_what_was_found(monkeypatch):
    long = tokens(6, 100_000)
    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False, lookup_budget_ms=1e-6))
    sb.register(Prompt(long), donor_id="d")
    shuffled = np.concatenate([long[i : i + 500] for i in range(0, 100_000, 1000)] * 2)
    plan = sb.lookup(Prompt(shuffled))
    assert isinstance(plan, ReusePlan)
    assert 0 < plan.reused_tokens < 50_000
    assert not sb.explain(Prompt(shuffled)).stages[2].facts["complete"]
    nothing = sb.lookup(Prompt(np.concatenate([tokens(7, 90_000), long[:5000]])))
    assert nothing.reason == "over_budget"


def test_an_explanation_is_data_and_text_and_emits_nothing():
    sink = MemorySink()
    sb = make(sink)
    before = len(sink.events)
    explanation = sb.explain(Prompt(np.concatenate([tokens(8, 30), DOCUMENT])))
    assert len(sink.events) == before
    assert [stage.name for stage in explanation.stages] == ["fingerprint", "discover", "align", "plan"]
    assert "reuse 2000 of 2030 tokens" in str(explanation)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["decision"]["spans"][0]["length"] == 2000
    assert "decline: too_short" in str(sb.explain(Prompt([1, 2, 3])))


def test_fuzzy_evidence_is_attached_to_a_decline_and_authorizes_nothing():
    sb = SemBlend(SemBlendConfig(embedder="lexical", fuzzy_chunks=True, metrics=False))
    sb.register(Prompt(DOCUMENT), donor_id="d")
    assert sb.flush(10)
    paraphrase = DOCUMENT.copy()
    paraphrase[::12] = tokens(10, len(paraphrase[::12]))
    decision = sb.lookup(Prompt(paraphrase))
    assert isinstance(decision, Decline)
    assert [likeness.donor_id for likeness in decision.evidence][:1] == ["d"]
    assert sb.similar(Prompt(paraphrase))[0].donor_id == "d"
    assert sb.similar(Prompt(paraphrase, namespace=Namespace(tenant="x"))) == ()
    sb.close()


def test_after_warming_up_a_request_compiles_nothing():
    from semblend.align import kernels as align_kernels
    from semblend.discover import kernels as discover_kernels

    def compiled() -> int:
        modules = (align_kernels, discover_kernels)
        return sum(len(getattr(f, "signatures", ())) for module in modules for f in vars(module).values())

    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False))
    sb.warm_up()
    before = compiled()
    sb.register(Prompt(DOCUMENT), donor_id="d")
    sb.register(Prompt(DOCUMENT), donor_id="d")
    sb.lookup(Prompt(DOCUMENT))
    sb.lookup(Prompt(tokens(11, 2000)))
    assert compiled() == before > 0
