"""Plans that are likely to be in vain are not begun: their kind, its record, and how a kind recovers."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import ConfigError
from semblend.materialize.gate import gate
from semblend.materialize.gate.gate import RETRY_BUDGET, OutcomeMemory, count_skips
from semblend.materialize.gate.thresholds import PassageOrder, PlanShape, Thresholds, find_known
from semblend.plan.reuse_plan import DeclineReason, ReusePlan
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
    assert memory.predict_loss(SHORT, ACME) is None
    memory.learn(SHORT, ACME, work=1.7, reason=REJECTED)
    declined = memory.predict_loss(SHORT, ACME)
    assert declined.reason is REJECTED
    assert "1.70 of a prefill" in declined.detail
    assert memory.predict_loss(LONG, ACME) is None  # another kind


def test_a_kind_that_is_served_and_saves_work_is_always_begun():
    memory = OutcomeMemory()
    for _ in range(100):
        assert memory.predict_loss(LONG, ACME) is None
        memory.learn(LONG, ACME, work=0.2)


def test_one_refusal_among_many_that_were_served_changes_nothing():
    memory = OutcomeMemory()
    for number in range(100):
        assert memory.predict_loss(LONG, ACME) is None
        memory.learn(LONG, ACME, work=1.1 if number % 5 == 4 else 0.2, reason=REJECTED if number % 5 == 4 else None)


def test_a_kind_that_is_served_and_saves_nothing_is_below_break_even():
    memory = OutcomeMemory()
    memory.learn(SHORT, ACME, work=1.2)
    assert memory.predict_loss(SHORT, ACME).reason is DeclineReason.BELOW_BREAK_EVEN


@pytest.mark.parametrize("reason", [reason for reason in DeclineReason if reason is not REJECTED])
def test_a_lost_donor_or_a_failure_says_nothing_about_the_kind(reason):
    memory = OutcomeMemory()
    memory.learn(SHORT, ACME, work=0.0, reason=reason)
    memory.learn(SHORT, ACME, work=1.7, reason=reason)
    assert memory.predict_loss(SHORT, ACME) is None


def test_a_kind_that_is_tried_again_and_served_recovers_at_once():
    memory = OutcomeMemory()
    memory.learn(LONG, ACME, work=1.06, reason=REJECTED)
    skipped = 0
    while memory.predict_loss(LONG, ACME) is not None:
        skipped += 1
    assert skipped == count_skips(1.06)
    memory.learn(LONG, ACME, work=0.2)
    assert all(memory.predict_loss(LONG, ACME) is None for _ in range(100))


def test_a_retry_that_is_refused_is_followed_by_as_many_skips_again():
    memory = OutcomeMemory()
    memory.learn(SHORT, ACME, work=1.7, reason=REJECTED)
    begun = []
    for number in range(200):
        if memory.predict_loss(SHORT, ACME) is None:
            begun.append(number)
            memory.learn(SHORT, ACME, work=1.7, reason=REJECTED)
    assert begun == list(range(28, 200, 29))


@given(st.floats(1.0, 2.6), st.integers(20, 300))
def test_retries_never_cost_more_than_their_budget(cost, prompts):
    memory, spent = OutcomeMemory(), 0.0
    memory.learn(SHORT, ACME, work=cost, reason=REJECTED)
    for _ in range(prompts):
        if memory.predict_loss(SHORT, ACME) is None:
            spent += cost - 1
            memory.learn(SHORT, ACME, work=cost, reason=REJECTED)
    assert spent <= RETRY_BUDGET * prompts


outcomes = st.lists(st.tuples(st.sampled_from([SHORT, LONG]), st.sampled_from([None, REJECTED]), st.floats(0, 2)))


@given(outcomes)
def test_the_same_outcomes_give_the_same_decisions(seen):
    memories = OutcomeMemory(), OutcomeMemory()
    for plan, declined, work in seen:
        one, other = (memory.predict_loss(plan, ACME) for memory in memories)
        assert one == other
        if one is None:
            for memory in memories:
                memory.learn(plan, ACME, work=work, reason=declined)


@given(outcomes)
def test_nothing_that_others_send_changes_a_tenants_decisions(seen):
    memory, alone = OutcomeMemory(), OutcomeMemory()
    for plan, declined, work in seen:
        memory.learn(plan, BOLT, work=work, reason=declined)
        memory.learn(plan, Namespace(tenant="acme", salt="x"), work=work, reason=declined)
        memory.predict_loss(plan, BOLT)
        assert memory.predict_loss(plan, ACME) == alone.predict_loss(plan, ACME)


def test_a_tenant_that_invents_namespaces_pushes_out_its_own_records_only(monkeypatch):
    monkeypatch.setattr(gate, "MAX_RECORDS", 50)
    memory = OutcomeMemory()
    memory.learn(SHORT, ACME, work=1.7, reason=REJECTED)
    for number in range(500):
        memory.learn(SHORT, Namespace(tenant="bolt", salt=str(number)), work=1.7, reason=REJECTED)
    assert memory.count_records() == 51
    assert memory.predict_loss(SHORT, ACME) is not None
    assert memory.predict_loss(SHORT, Namespace(tenant="bolt", salt="0")) is None


def test_many_tenants_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(gate, "MAX_TENANTS", 20)
    memory = OutcomeMemory()
    for number in range(100):
        memory.predict_loss(SHORT, Namespace(tenant=str(number)))
    assert memory.count_records() == 20


def test_what_was_measured_with_the_thresholds_counts_until_the_kind_has_a_record():
    kind = PlanShape.of(LONG).kind
    memory = OutcomeMemory({kind: 1.05})
    assert "when thresholds were measured" in memory.predict_loss(LONG, ACME).detail
    memory.learn(LONG, ACME, work=0.2)  # the one that was tried all the same
    assert memory.predict_loss(LONG, ACME) is None
    assert OutcomeMemory({kind: 0.4}).predict_loss(LONG, ACME) is None


def test_a_kind_that_is_hopeless_by_its_shape_is_tried_now_and_then():
    memory = OutcomeMemory({PlanShape.of(LONG).kind: 1.05})
    begun = [number for number in range(30) if memory.predict_loss(LONG, ACME) is None]
    assert begun == [8, 17, 26]


def test_threads_do_not_lose_outcomes():
    memory = OutcomeMemory()

    def work():
        for _ in range(300):
            memory.learn(LONG, ACME, work=0.5)
            memory.predict_loss(LONG, ACME)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert memory.predict_loss(LONG, ACME) is None
    assert memory.count_records() == 1


def test_expected_costs_are_kept_in_the_thresholds_file_and_checked():
    table = Thresholds(0.1, 0.1, 0.1, expected_costs={"several donors, 4096+ tokens, 8+ spans": 1.05})
    assert Thresholds.from_json(table.to_json()) == table
    with pytest.raises(ConfigError, match="expected cost"):
        Thresholds(0.1, 0.1, 0.1, expected_costs={"x": float("nan")})
    with pytest.raises(ConfigError, match="cannot be read"):
        Thresholds.from_json(table.to_json().replace("1.05", '"much"'))


def test_kinds_in_the_known_tables_are_kinds_that_plans_can_have():
    pieces = [("a", 6000 - 600 * i, 590) for i in range(10)]
    reordered, several = plan_of(*pieces), plan_of(*((f"d{i % 3}", s, n) for i, (_, s, n) in enumerate(pieces)))
    expected = find_known("qwen2.5-coder-1.5b")[1].expected_costs
    assert set(expected) == {PlanShape.of(plan).kind for plan in (reordered, several)}
