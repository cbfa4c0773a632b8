"""Plans, costs, layers, selections: plain values and their rules."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from semblend import Decline, DeclineReason, ReusePlan, Span
from semblend.plan.cost import CostModel
from semblend.plan.selection import count_leading_layers, list_reused_positions, select_largest, select_seams


def test_a_plan_adds_up():
    plan = ReusePlan((Span("a", 0, 10, 40), Span("b", 5, 50, 30), Span("a", 90, 80, 10)), prompt_tokens=100)
    assert plan.reused_tokens == 80
    assert plan.prefill_tokens == 20
    assert plan.reuse_ratio == 0.8
    assert plan.donor_ids == ("a", "b")
    assert plan.spans[0].target_end == plan.spans[1].target_start


def test_a_decline_can_be_taken_apart():
    match Decline(DeclineReason.STALE, "gone"):
        case Decline(reason, detail):
            assert (reason, detail) == ("stale", "gone")


@given(st.integers(1, 5000), st.integers(0, 200), st.floats(100, 1e6), st.floats(100, 1e7))
def test_a_longer_span_never_saves_less_when_loading_is_faster_than_prefill(length, seam, prefill, load):
    cost = CostModel(prefill, prefill + load, seam_tokens=seam)
    short, long = (cost.estimate_span_saving_ms(n) for n in (length + seam, length + seam + 100))
    assert long >= short - 1e-5


def test_spans_that_do_not_pay_are_left_out():
    cost = CostModel(10_000, 20_000, seam_tokens=16)
    spans = (Span("a", 0, 0, 20), Span("a", 0, 50, 400))
    assert cost.keep_worthwhile(spans) == spans[1:]


@given(st.integers(1, 80), st.floats(0, 1))
def test_a_larger_share_of_layers_never_leads_less_deep(layers, share):
    found = count_leading_layers(layers, share)
    assert 0 <= found <= round(share * layers)
    assert found <= count_leading_layers(layers, min(1.0, share + 0.1))
    assert count_leading_layers(layers, 1.0) == layers


def test_a_span_that_goes_on_where_the_last_ended_has_no_seam():
    spans = [Span("a", 0, 0, 50), Span("a", 50, 50, 50), Span("a", 150, 100, 50)]
    assert select_seams(spans, 2).tolist() == [0, 1, 100, 101]
    assert select_seams([], 2).tolist() == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(0, 1))
def test_the_highest_scores_are_chosen(scores, share):
    positions = np.arange(100, 100 + len(scores))
    chosen = select_largest(positions, np.array(scores), round(share * len(scores)))
    assert len(chosen) == round(share * len(scores))
    left = np.setdiff1d(positions, chosen)
    if len(chosen) and len(left):
        assert np.array(scores)[chosen - 100].min() >= np.array(scores)[left - 100].max()


def test_reused_positions_are_those_of_the_spans():
    assert list_reused_positions([Span("a", 0, 3, 2), Span("a", 0, 9, 1)]).tolist() == [3, 4, 9]
