"""Edits in a row: when a history is computed once, exactly, so that the next edits have less to compute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.times import Forecast
from semblend.prompt import as_token_array
from semblend.session.edit_debts import FOLLOWING, EditDebts, EditedHistory
from semblend.span import Span

MESSAGES = tuple(range(1000, 1000 + 2 * FOLLOWING))


def history(donor_id: str = "d", behind: tuple[int, ...] = MESSAGES, start: int = 10) -> EditedHistory | None:
    """A prompt that holds 80 tokens of a donor from ``start`` on, then ``behind``."""
    tokens = as_token_array([*range(start), *range(500, 580), *behind])
    return EditedHistory.of(ReusePlan((Span(donor_id, 0, start, 80),), len(tokens)), tokens)


HISTORY = history()
assert HISTORY is not None


def forecast(reuse: float, cold: float = 100.0) -> Forecast:
    return Forecast(reuse, cold, timed=True)


def run(growth: float, edits: int, first: float = 20.0, cold: float = 100.0) -> tuple[float, list[int]]:
    """What so many edits in a row cost where each has ``growth`` more to compute; and which of them were computed."""
    debts, since, spent, healed = EditDebts(), 0, 0.0, []
    for number in range(edits):
        expected = forecast(first + growth * since, cold)
        if expected.reuse >= cold or debts.settle(HISTORY, expected):
            spent, since = spent + cold, 0
            healed.append(number)
        else:
            debts.note(HISTORY, expected)
            spent, since = spent + expected.reuse, since + 1
    return spent, healed


def test_edits_that_cost_more_each_time_are_ended_by_one_that_is_computed():
    _, healed = run(growth=5.0, edits=30)
    assert 2 <= len(healed) <= 6
    assert healed[0] > 2


def test_edits_that_always_cost_the_same_are_never_computed():
    assert run(growth=0.0, edits=1000)[1] == []


@given(st.floats(0.1, 60.0), st.integers(1, 40), st.floats(1.0, 90.0))
def test_whatever_comes_it_costs_at_most_twice_as_much_as_knowing_it_beforehand(growth, edits, first):
    best = [0.0]  # the least that so many edits cost
    for count in range(1, edits + 1):
        never = sum(min(100.0, first + growth * since) for since in range(count))
        ways = [
            best[count - last] + 100.0 + sum(min(100.0, first + growth * since) for since in range(last - 1))
            for last in range(1, count + 1)
        ]
        best.append(min(never, *ways))
    assert run(growth, edits, first)[0] <= 2 * best[edits] + 1e-6


def test_histories_are_told_apart_and_the_least_recently_edited_is_forgotten():
    debts = EditDebts(most=2)
    for name in "abc":
        debts.note(history(name), forecast(1.0))
    assert len(debts) == 2
    assert debts.settle(history("a"), forecast(99.0)) is None
    assert debts.settle(history("c"), forecast(99.0)) is not None
    assert len(debts) == 1


def test_a_history_is_known_again_when_it_has_grown_and_its_beginning_was_cut():
    assert history() == history(behind=(*MESSAGES, 1, 2, 3)) == history(start=7)


def test_another_question_about_the_same_document_is_no_edit_of_the_same_history():
    assert history() != history(behind=tuple(reversed(MESSAGES)))
    assert history(behind=(1, 2)) is None
