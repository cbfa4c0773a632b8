"""How much of a plan is kept where passes of ours compute what lies between its spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.plan.cost import GAP_PRICE, keep_paying_spans
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.span import Span


def make_plan(*pieces, exact=0):
    """``pieces``: (gap in front, tokens that a donor holds), one after the other."""
    at, spans = exact, []
    for gap, length in pieces:
        spans.append(Span("d", at + gap, at + gap, length))
        at += gap + length
    return ReusePlan(tuple(spans), at + 100, exact)


def count_gain(plan, kept, pass_rows):
    """Rows that the first ``kept`` spans save, by brute force over the tokens of the prompt."""
    spans = plan.spans[:kept]
    held = {position for span in spans for position in range(span.target_start, span.target_end)}
    gaps = set(range(plan.exact_tokens, spans[-1].target_end)) - held if spans else set()
    return len(held) - GAP_PRICE * len(gaps) - pass_rows if spans else 0.0


PIECES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), min_size=1, max_size=6)


@given(pieces=PIECES, exact=st.integers(0, 50), pass_rows=st.sampled_from([0, 60]))
def test_no_other_number_of_spans_saves_more(pieces, exact, pass_rows):
    plan = make_plan(*pieces, exact=exact)
    gains = [count_gain(plan, kept, pass_rows) for kept in range(1, len(pieces) + 1)]
    found = keep_paying_spans(plan, pass_rows)
    if isinstance(found, Decline):
        assert max(gains) <= 1e-9
        assert found.reason is DeclineReason.BELOW_BREAK_EVEN
    else:
        assert found.spans == plan.spans[: len(found.spans)]
        assert gains[len(found.spans) - 1] == pytest.approx(max(gains))
        assert (found.prompt_tokens, found.exact_tokens) == (plan.prompt_tokens, plan.exact_tokens)


def test_a_plan_without_gaps_is_left_alone():
    plan = make_plan((10, 4000), (5, 3000))
    assert keep_paying_spans(plan) is plan


def test_an_exact_prefix_in_front_is_no_gap():
    plan = make_plan((0, 500), exact=9000)
    assert keep_paying_spans(plan) is plan


def test_a_few_tokens_are_not_worth_a_pass():
    declined = keep_paying_spans(make_plan((10, 500)), pass_rows=600)
    assert "a pass costs 600 rows more" in declined.detail
