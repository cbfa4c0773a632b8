"""The dial: the cheapest way that is expected to stay below a number, or a prefill."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.errors import ConfigError
from semblend.materialize.calibrate import (
    RIDGE,
    CalibrationPrompt,
    Moved,
    PromptMeasure,
    WayMeasure,
    fit_dial,
    fit_log_weights,
    reorder_passages,
    replay,
    replay_unseen,
    solve_not_negative,
)
from semblend.materialize.gate.gate import Gate, OutcomeMemory, prefill_at_once
from semblend.materialize.gate.thresholds import (
    MAX_UNPROBED,
    NUMBERS,
    RECOMPUTE_LEVELS,
    STEPS,
    DialTable,
    PassageOrder,
    PlanShape,
    RiskFeatures,
    Thresholds,
    choose_level,
)
from semblend.plan.reuse_plan import DeclineReason, ReusePlan
from semblend.plan.selection import leave_out_repetitions
from semblend.plan.times import EDITED, Forecast
from semblend.prompt import Namespace
from semblend.span import Span

IN_ORDER, REORDERED, SEVERAL = PassageOrder
ROWS = Forecast(reuse=200.0, cold=1000.0, timed=False)
PLAIN = ReusePlan((Span("d", 0, 10, 190),), 215)
TURNED = ReusePlan((Span("d", 200, 0, 100), Span("d", 0, 100, 100)), 220)
nats = st.floats(0, 1e3, exclude_min=True)
expectations = st.dictionaries(st.sampled_from(RECOMPUTE_LEVELS), st.floats(0, 10) | st.just(math.nan), min_size=1)


def cost(percent: int | None) -> float:
    return math.inf if percent is None else percent


def make_measure(hardness: float, order: PassageOrder = IN_ORDER) -> PromptMeasure:
    """A prompt whose divergence falls with every way, and whose signs tell it."""
    ways = tuple(
        WayMeasure(
            percent,
            Moved(hardness / (1 + percent), hardness > 0.5),
            hardness,
            0.05 + percent / 100,
            features=RiskFeatures(hardness, hardness, math.sqrt(hardness), 1.0) if percent else None,
        )
        for percent in RECOMPUTE_LEVELS
    )
    return PromptMeasure(order, ways)


MEASURES = [make_measure(0.003 * 1.2**number, (IN_ORDER, REORDERED)[number % 2]) for number in range(40)]
TABLE = fit_dial(MEASURES)


@given(expectations, nats, nats)
def test_a_larger_number_never_costs_more_and_no_way_is_above_its_number(expected, one, other):
    small, large = sorted((one, other))
    cheap, dear = choose_level(expected, large), choose_level(expected, small)
    assert cost(cheap.percent) <= cost(dear.percent)
    for choice, number in ((cheap, large), (dear, small)):
        if choice.percent is not None:
            assert choice.expected == expected[choice.percent] <= number


def test_up_to_balanced_nothing_is_served_that_no_repair_has_probed():
    expected = dict.fromkeys(RECOMPUTE_LEVELS, 0.0)
    assert choose_level(expected, MAX_UNPROBED).percent == 10
    assert choose_level(expected, math.nextafter(MAX_UNPROBED, 1)).percent == 0


def test_passages_that_moved_are_never_served_unprobed():
    means = dict.fromkeys(PassageOrder, dict.fromkeys(RECOMPUTE_LEVELS, 0.001))
    dial = DialTable(means, TABLE.repair)
    assert [dial.begin(order, 0.3).percent for order in PassageOrder] == [0, 10, 10]


def test_what_is_not_a_number_is_never_expected_to_be_close():
    assert choose_level({10: math.nan, 20: math.inf}, 1e3).percent is None
    gate = Gate(nats=0.1, dial=TABLE, order=IN_ORDER)
    for unknown in (RiskFeatures(0.0, 0.0, math.nan, 0.0), RiskFeatures(0.0, 0.0, 0.0, math.nan)):
        assert not gate.accepts(10, gate.expect(10, unknown))


def test_a_dial_needs_no_pass_before_the_repair():
    seen, alone = RiskFeatures(0.3, 0.2, 0.1, 1.0), RiskFeatures(math.nan, math.nan, 0.1, 1.0)
    gate = Gate(nats=0.1, dial=TABLE, order=IN_ORDER)
    assert gate.expect(10, alone) == gate.expect(10, seen) > 0
    assert gate.sees_at_once
    assert not Gate(nats=0.1, dial=TABLE, order=REORDERED).sees_at_once
    assert not Gate(nats=0.1).sees_at_once


CLEARED = ReusePlan((Span("d", 100, 68, 400), Span("d", 700, 488, 300)), 808, 48)
WHOLE = ReusePlan((Span("d", 100, 60, 700),), 780, 40)


def test_an_edited_history_goes_by_the_dial_that_was_measured_on_such_and_takes_one_pass_at_first_sight():
    edits = DialTable({IN_ORDER: {10: 0.015, 20: 0.01}}, {10: (1.0, 0.0, 0.0, 0.0, -1.0)})
    thresholds = Thresholds(0.01, 0.01, 0.01, dial=TABLE, edit_dial=edits)
    memory = OutcomeMemory(thresholds)
    assert Gate.of(thresholds, CLEARED, 0.02).dial is edits
    assert Gate.of(thresholds, WHOLE, 0.02).dial is TABLE
    assert memory.foresee_path(CLEARED) == EDITED
    assert memory.foresee_path(WHOLE) == "balanced"  # nobody has asked about its donor yet
    assert PlanShape.of(CLEARED).kind != PlanShape.of(WHOLE).kind
    assert Thresholds.from_json(thresholds.to_json()) == thresholds


def test_an_edited_history_begins_as_its_donor_does():
    thresholds = Thresholds(0.01, 0.01, 0.01, dial=TABLE, edit_dial=TABLE)
    dropped = ReusePlan((Span("d", 1000, 90, 700),), 800, 64)  # half of the history, behind the system prompt
    passages = ReusePlan((Span("d", 100, 60, 400), Span("d", 700, 480, 300)), 800)  # some of the donor's passages
    assert Gate.of(thresholds, dropped, 0.02).is_edited
    assert Gate.of(thresholds, passages, 0.02).dial is None


def test_a_passage_that_moved_to_the_end_and_is_computed_makes_the_others_a_part_of_their_donor():
    first, others = Span("d", 0, 700, 100), Span("d", 100, 0, 700)
    plan = leave_out_repetitions(ReusePlan((others, first), 810))
    assert plan.spans == (others,)
    assert PlanShape.of(plan).in_part
    assert Gate.of(Thresholds(0.01, 0.01, 0.01, dial=TABLE), plan, 0.02).dial is None


def test_where_edits_were_not_measured_a_part_of_a_donor_keeps_the_strict_thresholds():
    thresholds = Thresholds(0.01, 0.01, 0.01, dial=TABLE)
    gate = Gate.of(thresholds, CLEARED, 0.02)
    assert (gate.dial, gate.is_edited) == (None, False)
    assert OutcomeMemory(thresholds).foresee_path(CLEARED) == "balanced"


@given(st.sampled_from(MEASURES), nats, nats)
def test_through_a_fitted_table_a_larger_number_begins_with_no_dearer_way(measure, one, other):
    small, large = (Gate(nats=number, dial=TABLE, order=measure.order) for number in sorted((one, other)))
    assert cost(large.begin().percent) <= cost(small.begin().percent)


def test_the_fit_keeps_its_word_on_the_prompts_it_was_made_of():
    for number in NUMBERS:
        served = [done for one in MEASURES if (done := replay(TABLE, one, number)).percent is not None]
        assert all(done.expected <= number for done in served)
        if served:
            assert sum(done.nats for done in served) / len(served) <= number
    rows = replay_unseen(MEASURES)
    assert {row.number for row in rows} == set(NUMBERS)
    works = [row.work for row in rows if row.kind == "all"]
    assert works[-1] < works[0] <= 1.5  # at .003 it prefills, at .3 it reuses


def test_the_fit_expects_as_much_on_average_as_was_measured():
    nats = [0.001 * 100 ** (number % 10 / 9) for number in range(200)]  # the features tell nothing: all is noise
    weights = fit_log_weights([(0.0, 0.0, 0.0, 1.0)] * len(nats), nats, deviation_at=0)
    assert math.exp(weights[-1]) == pytest.approx(sum(nats) / len(nats), rel=0.01)


def test_too_few_prompts_make_no_dial_and_an_order_that_was_not_measured_is_not_known():
    assert not fit_dial(MEASURES[:8]).knows(IN_ORDER)
    assert TABLE.knows(REORDERED)
    assert not TABLE.knows(SEVERAL)
    assert Gate.of(Thresholds(0.01, 0.01, 0.01, dial=TABLE), PLAIN, 0.1).dial is not None
    assert Gate.of(Thresholds(0.01, 0.01, 0.01), PLAIN, 0.1).dial is None


def test_thresholds_scale_with_the_number_and_stand_as_they_are_at_balanced():
    table = Thresholds(0.01, 0.02, 0.03)
    still, wide = Gate(table), Gate(table, 0.08)
    assert still.accepts(10, 0.01)
    assert not still.accepts(10, 0.011)
    assert wide.accepts(10, 0.04)
    assert not wide.accepts(10, 0.041)
    assert still.begin().percent == wide.begin().percent == 10  # nothing was measured: the smallest repair will tell


def test_a_plan_that_cannot_stay_below_a_number_is_a_prefill_at_once():
    means = {IN_ORDER: {0: 0.01, 10: 0.002}, REORDERED: {0: 0.3, 10: 0.2, 20: 0.1, 40: 0.06}}
    thresholds = Thresholds(0.01, 0.01, 0.01, dial=DialTable(means, TABLE.repair))
    assert prefill_at_once(thresholds, PLAIN, 0.05) is None
    assert prefill_at_once(thresholds, TURNED, 0.1) is None
    choice = prefill_at_once(thresholds, TURNED, 0.05)
    assert choice.reason == "at best 0.06 nats are expected, 0.05 are allowed"
    memory = OutcomeMemory(thresholds)
    declined = memory.judge(TURNED, Namespace(), ROWS, "0.05").decline
    assert (declined.reason, declined.detail) == (DeclineReason.QUALITY_RISK, choice.reason)
    assert memory.judge(TURNED, Namespace(), ROWS, "0.1").decline is None


def test_what_one_number_learns_says_nothing_about_another():
    memory = OutcomeMemory()
    memory.learn(PLAIN, Namespace(), ROWS, "0.003", took=1.7 * ROWS.cold, reason=DeclineReason.QUALITY_RISK)
    assert memory.judge(PLAIN, Namespace(), ROWS, "0.003").decline is not None
    assert memory.judge(PLAIN, Namespace(), ROWS, "0.1").decline is None
    assert memory.judge(PLAIN, Namespace(), ROWS).decline is None


def test_a_tenant_that_invents_numbers_does_not_fill_the_memory():
    memory = OutcomeMemory()
    for number in range(1000):
        memory.learn(PLAIN, Namespace(), ROWS, f"{0.003 + number / 1000:g}", took=0.2 * ROWS.cold)
    assert memory.count_records() <= len(NUMBERS) + 1


def test_a_dial_survives_its_file_and_a_wrong_one_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(Thresholds(0.01, 0.02, 0.03, dial=TABLE).to_json())
    assert Thresholds.read(path).dial == TABLE
    for wrong in ({"repair": {"10": [1.0]}}, {"means": {"sideways": {}}}, {"repair": {"10": [math.nan] * 5}}, [1]):
        text = path.read_text().replace('"dial": {', f'"dial": {_dump(wrong)}, "was": {{')
        with pytest.raises(ConfigError) as refused:
            Thresholds.from_json(text)
        assert refused.value.hint


def _dump(value: object) -> str:
    import json

    return json.dumps(value)


def test_order_noise_is_measured_only_where_passages_have_moved():
    tokens = tuple(range(220))
    assert reorder_passages(CalibrationPrompt(tokens, (), PLAIN.spans)) is None
    moved = reorder_passages(CalibrationPrompt(tokens, (), TURNED.spans))
    assert moved != tokens
    assert sorted(moved) == sorted(tokens)
    assert moved[200:] == tokens[200:]  # the question stays where it is


def measure_alike(deviation: float, moved: float, entropy: float, divergence: float) -> PromptMeasure:
    features = RiskFeatures(moved, moved, deviation, entropy)
    ways = tuple(
        WayMeasure(percent, Moved(divergence, False), divergence, 0.1, features if percent else None)
        for percent in RECOMPUTE_LEVELS
    )
    return PromptMeasure(IN_ORDER, ways)


signs = st.tuples(st.floats(1e-3, 1.0), st.floats(1e-4, 1.0), st.floats(0.0, 6.0), st.floats(0.0, 1.0))


@settings(max_examples=25)
@given(st.lists(signs, min_size=24, max_size=40), st.floats(1e-5, 1.0), st.floats(1.0, 100.0))
def test_whatever_was_measured_kv_that_deviates_more_is_expected_to_be_further_from_cold(measured, deviation, times):
    table = fit_dial([measure_alike(*one) for one in measured])
    for percent in STEPS:
        near, far = (
            table.expect_by_repair(IN_ORDER, percent, RiskFeatures(0.01, 0.01, one, 1.0))
            for one in (deviation, deviation * times)
        )
        assert far >= near


@given(st.lists(signs, min_size=6, max_size=40))
def test_weights_are_the_best_of_those_that_are_not_negative(measured):
    """By the conditions of a bounded minimum: flat along a weight above its bound, rising from one at its bound."""
    seen = np.array([(math.log(moved), math.log(far), entropy, 1.0) for far, moved, entropy, _ in measured])
    target = np.array([divergence for *_, divergence in measured])
    weights = solve_not_negative(seen, target)
    slope = seen.T @ (seen @ weights - target) + RIDGE * weights
    assert (weights[:-1] >= 0).all()
    assert (np.abs(slope[weights != 0]) < 1e-6).all()
    assert (slope > -1e-6).all()
