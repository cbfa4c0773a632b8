"""Plans that are likely to be in vain are not begun: their kind, its record, and how a kind recovers."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.materialize.gate import gate
from semblend.materialize.gate.gate import RETRY_BUDGET, Gate, OutcomeMemory, count_skips
from semblend.materialize.gate.thresholds import DialTable, PassageOrder, PlanShape, Thresholds
from semblend.plan.reuse_plan import DeclineReason, ReusePlan
from semblend.plan.times import Forecast
from semblend.prompt import Namespace
from semblend.span import Span

ACME, BOLT = Namespace(tenant="acme"), Namespace(tenant="bolt")
REJECTED = DeclineReason.QUALITY_RISK


def plan_of(*pieces, tokens=0, exact=0):
    """Pieces are (donor, start in it, length), one behind the other, 10 tokens apart."""
    spans, at = [], exact + 10
    for donor, start, length in pieces:
        spans.append(Span(donor, start, at, length))
        at += length + 10
    return ReusePlan(tuple(spans), max(at, tokens), exact)


ROWS = Forecast(reuse=200.0, cold=1000.0, timed=False)
"""Nothing was timed: what a plan of 1,000 tokens costs is counted in rows."""
MS = Forecast(reuse=40.0, cold=70.0, timed=True)


def predict_loss(memory, plan, namespace):
    return memory.judge(plan, namespace, ROWS).decline


def learn(memory, plan, namespace, *, work, reason=None):
    memory.learn(plan, namespace, ROWS, took=work * ROWS.cold, reason=reason)


SHORT = plan_of(("d", 0, 190))
LONG = plan_of(("d", 50, 4000), tokens=4200)


def order_of(*pieces):
    return PlanShape.of(plan_of(*pieces)).order


def test_the_order_of_passages_is_told_from_the_spans():
    assert order_of(("a", 50, 300), ("a", 400, 300)) is PassageOrder.IN_ORDER
    assert order_of(("a", 400, 300), ("a", 50, 300)) is PassageOrder.REORDERED
    assert order_of(("a", 50, 300), ("b", 50, 300)) is PassageOrder.SEVERAL


def test_a_small_piece_in_another_place_or_of_another_donor_makes_no_kind_of_its_own():
    assert order_of(("a", 50, 900), ("b", 0, 40)) is PassageOrder.IN_ORDER
    assert order_of(("a", 50, 900), ("a", 0, 40)) is PassageOrder.IN_ORDER
    assert order_of(("a", 1000, 40), ("a", 0, 900)) is PassageOrder.REORDERED  # the 900 stand behind what follows them


def test_a_donor_of_which_passages_were_left_out_is_there_in_part():
    assert not PlanShape.of(plan_of(("a", 50, 300), ("a", 370, 300))).in_part  # an edit
    assert PlanShape.of(plan_of(("a", 50, 300), ("a", 450, 300))).in_part
    assert not PlanShape.of(plan_of(("a", 450, 300), ("a", 50, 300))).in_part  # reordered, which is another kind
    new = ReusePlan((Span("a", 0, 0, 300), Span("a", 300, 400, 300)), 720)
    assert PlanShape.of(new).in_part


def test_prompts_of_a_kind_are_alike_in_length_and_number_of_spans():
    kind = PlanShape.of(plan_of(("a", 0, 1000), tokens=1100)).kind
    assert PlanShape.of(plan_of(("b", 77, 1900), tokens=2000)).kind == kind
    assert PlanShape.of(plan_of(("b", 77, 2100), tokens=2200)).kind != kind
    assert PlanShape.of(plan_of(("a", 0, 500), ("a", 600, 500), tokens=1100)).kind != kind


def test_what_the_exact_cache_holds_is_not_part_of_the_length():
    assert PlanShape.of(plan_of(("a", 0, 200), exact=1000)).tokens == 220


def test_the_first_of_a_kind_is_begun_and_the_second_is_not_where_the_gate_refused_the_first():
    memory = OutcomeMemory()
    assert predict_loss(memory, SHORT, ACME) is None
    learn(memory, SHORT, ACME, work=1.7, reason=REJECTED)
    declined = predict_loss(memory, SHORT, ACME)
    assert declined.reason is REJECTED
    assert "1.70 of a prefill" in declined.detail
    assert predict_loss(memory, LONG, ACME) is None  # another kind


def test_a_kind_that_is_served_and_saves_work_is_always_begun():
    memory = OutcomeMemory()
    for _ in range(100):
        assert predict_loss(memory, LONG, ACME) is None
        learn(memory, LONG, ACME, work=0.2)


def test_one_refusal_among_many_that_were_served_changes_nothing():
    memory = OutcomeMemory()
    for number in range(100):
        assert predict_loss(memory, LONG, ACME) is None
        learn(memory, LONG, ACME, work=1.1 if number % 5 == 4 else 0.2, reason=REJECTED if number % 5 == 4 else None)


def test_a_kind_that_is_served_and_saves_nothing_is_below_break_even():
    memory = OutcomeMemory()
    learn(memory, SHORT, ACME, work=1.2)
    assert predict_loss(memory, SHORT, ACME).reason is DeclineReason.BELOW_BREAK_EVEN


@pytest.mark.parametrize("reason", [reason for reason in DeclineReason if reason is not REJECTED])
def test_a_lost_donor_or_a_failure_says_nothing_about_the_kind(reason):
    memory = OutcomeMemory()
    learn(memory, SHORT, ACME, work=0.0, reason=reason)
    learn(memory, SHORT, ACME, work=1.7, reason=reason)
    assert predict_loss(memory, SHORT, ACME) is None


def test_a_kind_that_is_tried_again_and_served_recovers_at_once():
    memory = OutcomeMemory()
    learn(memory, LONG, ACME, work=1.06, reason=REJECTED)
    skipped = 0
    while predict_loss(memory, LONG, ACME) is not None:
        skipped += 1
    assert skipped == count_skips(1.06)
    learn(memory, LONG, ACME, work=0.2)
    assert all(predict_loss(memory, LONG, ACME) is None for _ in range(100))


def test_a_retry_that_is_refused_is_followed_by_as_many_skips_again():
    memory = OutcomeMemory()
    learn(memory, SHORT, ACME, work=1.7, reason=REJECTED)
    begun = []
    for number in range(200):
        if predict_loss(memory, SHORT, ACME) is None:
            begun.append(number)
            learn(memory, SHORT, ACME, work=1.7, reason=REJECTED)
    assert begun == list(range(28, 200, 29))


@given(st.floats(1.0, 2.6), st.integers(20, 300))
def test_retries_never_cost_more_than_their_budget(cost, prompts):
    memory, spent = OutcomeMemory(), 0.0
    learn(memory, SHORT, ACME, work=cost, reason=REJECTED)
    for _ in range(prompts):
        if predict_loss(memory, SHORT, ACME) is None:
            spent += cost - 1
            learn(memory, SHORT, ACME, work=cost, reason=REJECTED)
    assert spent <= RETRY_BUDGET * prompts


outcomes = st.lists(st.tuples(st.sampled_from([SHORT, LONG]), st.sampled_from([None, REJECTED]), st.floats(0, 2)))


@given(outcomes)
def test_the_same_outcomes_give_the_same_decisions(seen):
    memories = OutcomeMemory(), OutcomeMemory()
    for plan, declined, work in seen:
        one, other = (predict_loss(memory, plan, ACME) for memory in memories)
        assert one == other
        if one is None:
            for memory in memories:
                learn(memory, plan, ACME, work=work, reason=declined)


@given(outcomes)
def test_nothing_that_others_send_changes_a_tenants_decisions(seen):
    memory, alone = OutcomeMemory(), OutcomeMemory()
    for plan, declined, work in seen:
        learn(memory, plan, BOLT, work=work, reason=declined)
        learn(memory, plan, Namespace(tenant="acme", salt="x"), work=work, reason=declined)
        predict_loss(memory, plan, BOLT)
        assert predict_loss(memory, plan, ACME) == predict_loss(alone, plan, ACME)


def test_a_tenant_that_invents_namespaces_pushes_out_its_own_records_only(monkeypatch):
    monkeypatch.setattr(gate, "MAX_RECORDS", 50)
    memory = OutcomeMemory()
    learn(memory, SHORT, ACME, work=1.7, reason=REJECTED)
    for number in range(500):
        learn(memory, SHORT, Namespace(tenant="bolt", salt=str(number)), work=1.7, reason=REJECTED)
    assert memory.count_records() == 51
    assert predict_loss(memory, SHORT, ACME) is not None
    assert predict_loss(memory, SHORT, Namespace(tenant="bolt", salt="0")) is None


def test_many_tenants_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(gate, "MAX_TENANTS", 20)
    memory = OutcomeMemory()
    for number in range(100):
        predict_loss(memory, SHORT, Namespace(tenant=str(number)))
    assert memory.count_records() == 20


def test_threads_do_not_lose_outcomes():
    memory = OutcomeMemory()

    def work():
        for _ in range(300):
            learn(memory, LONG, ACME, work=0.5)
            predict_loss(memory, LONG, ACME)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert predict_loss(memory, LONG, ACME) is None
    assert memory.count_records() == 1


def test_a_plan_that_takes_as_long_as_a_prefill_by_the_engines_times_is_not_begun_and_both_times_are_said():
    declined = OutcomeMemory().judge(LONG, ACME, Forecast(68.0, 70.0, timed=True)).decline
    assert declined.reason is DeclineReason.BELOW_BREAK_EVEN
    assert declined.detail.startswith("reuse is expected to take 68.0 ms, a prefill 70.0 ms")


def test_one_slow_request_does_not_end_the_reuse_of_a_kind_and_many_do_and_it_is_tried_again():
    memory = OutcomeMemory()
    memory.learn(LONG, ACME, MS, took=500.0)
    assert memory.judge(LONG, ACME, MS).decline is None
    for _ in range(12):
        memory.learn(LONG, ACME, MS, took=90.0)
    verdict = memory.judge(LONG, ACME, MS)
    assert (verdict.is_by_cost, verdict.decline.reason) == (True, DeclineReason.BELOW_BREAK_EVEN)
    begun = [memory.judge(LONG, ACME, MS).decline is None for _ in range(60)]
    assert 0 < sum(begun) < 8
    for _ in range(12):
        memory.learn(LONG, ACME, MS, took=40.0)
    assert memory.judge(LONG, ACME, MS).decline is None


def test_what_fast_takes_says_nothing_about_balanced():
    memory = OutcomeMemory()
    for _ in range(12):
        memory.learn(LONG, ACME, MS, "fast", took=90.0)
    assert memory.judge(LONG, ACME, MS, "fast").decline is not None
    assert memory.judge(LONG, ACME, MS).decline is None


def repair(memory, times, *, needs_more, plan=LONG, namespace=ACME):
    """Plans of a kind that need a second repair where they begin with the smallest; what each began with."""
    began = []
    for _ in range(times):
        percent = memory.choose_repair(plan, namespace)
        began.append(percent)
        raised = needs_more and percent < 20
        memory.learn(replace(plan, repair=percent), namespace, MS, took=40.0, escalations=int(raised))
    return began


def test_a_kind_that_always_needs_a_second_repair_begins_with_it_and_now_and_then_tries_less():
    memory = OutcomeMemory()
    began = repair(memory, 60, needs_more=True)
    assert began[:4] == [0, 0, 0, 0]
    assert set(began[4:20]) == {20}
    assert 1 <= began[20:].count(0) <= 4
    assert memory.choose_repair(LONG, BOLT) == 0, "another namespace learns for itself"
    assert memory.choose_repair(SHORT, ACME) == 0, "and so does another kind"
    assert memory.choose_repair(LONG, ACME, "fast") == 0


def test_a_kind_that_needs_less_again_begins_with_less_again():
    memory = OutcomeMemory()
    repair(memory, 10, needs_more=True)
    began = repair(memory, 200, needs_more=False)
    assert began[0] == 20
    assert began[-20:] == [0] * 20
    assert repair(OutcomeMemory(), 30, needs_more=False) == [0] * 30


def test_what_a_plan_asks_for_is_the_least_that_the_gate_begins_with():
    dial = DialTable({PassageOrder.IN_ORDER: {0: 0.0, 10: 0.01, 20: 0.001}}, {10: (0.0,) * 5})
    table = Thresholds(0.01, 0.01, 0.01, dial=dial)
    assert Gate.of(table, LONG, 0.02).begin().percent == 10
    assert Gate.of(table, replace(LONG, repair=20), 0.02).begin().percent == 20
    assert Gate.of(table, replace(LONG, repair=10), 0.005).begin().percent == 20
    assert Gate.of(table, replace(LONG, repair=20), 0.05).begin().percent == 0, "what needs no repair gets none"
    nowhere = DialTable({PassageOrder.IN_ORDER: {10: 0.5}}, {10: (0.0,) * 5})
    assert Gate.of(replace(table, dial=nowhere), replace(LONG, repair=20), 0.02).begin().percent is None
