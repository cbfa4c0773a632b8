"""The ways in which prompts repeat, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import assert_token_equal, covered, in_shared_runs, join, spans_of, tokens

from semblend import Prompt, SemBlend, SemBlendConfig

DOCUMENT = tokens(1, 4000)


def plan_of(sb: SemBlend, target: np.ndarray):
    decision = sb.lookup(Prompt(target))
    assert_token_equal(sb, Prompt(target), decision)
    return decision


def test_the_same_document_under_another_instruction_is_one_span(sb):
    sb.register(Prompt(join(tokens(2, 60), DOCUMENT, tokens(3, 20))), donor_id="d")
    plan = plan_of(sb, join(tokens(4, 25), DOCUMENT, tokens(5, 40)))
    assert [(s.donor_start, s.target_start, s.length) for s in plan.spans] == [(60, 25, 4000)]
    assert plan.spans[0].shift == -35


def test_a_passage_inside_a_long_donor_is_found(sb):
    sb.register(Prompt(tokens(6, 100_000)), donor_id="book")
    plan = plan_of(sb, tokens(6, 100_000)[70_001:71_501])
    assert [(s.donor_start, s.length) for s in plan.spans] == [(70_001, 1500)]


def test_a_donor_inside_a_long_prompt_is_found(sb):
    sb.register(Prompt(tokens(7, 64)), donor_id="small")
    plan = plan_of(sb, join(tokens(8, 120_000), tokens(7, 64), tokens(9, 70_000)))
    assert [(s.target_start, s.length) for s in plan.spans] == [(120_000, 64)]


def test_reordered_passages_are_all_found(sb):
    passages = [tokens(seed, 300) for seed in range(10, 18)]
    sb.register(Prompt(join(*passages)), donor_id="d")
    plan = plan_of(sb, join(*reversed(passages)))
    assert plan.reused_tokens == 2400
    assert len(plan.spans) == 8


def test_passages_of_several_donors_are_put_together(sb):
    for seed in range(20, 24):
        sb.register(Prompt(join(tokens(seed + 100, 500), tokens(seed, 400))), donor_id=f"d{seed}")
    plan = plan_of(sb, join(*(tokens(seed, 400) for seed in range(20, 24))))
    assert plan.donor_ids == ("d20", "d21", "d22", "d23")
    assert plan.reused_tokens == 1600


def test_the_same_passage_used_twice_is_reused_twice(sb):
    sb.register(Prompt(DOCUMENT), donor_id="d")
    plan = plan_of(sb, join(DOCUMENT[:500], tokens(30, 5), DOCUMENT[:500]))
    assert [(s.donor_start, s.length) for s in plan.spans] == [(0, 500), (0, 500)]


@pytest.mark.parametrize("every", [40, 60, 120, 1000])
@pytest.mark.parametrize("kind", ["substitute", "insert", "delete"])
def test_edits_of_any_kind_and_density_leave_the_runs_between_them(sb, every, kind):
    sb.register(Prompt(DOCUMENT), donor_id="d")
    parts = []
    for at in range(0, len(DOCUMENT), every):
        piece = DOCUMENT[at : at + every]
        parts += [piece[:-1] if kind != "insert" else piece, [] if kind == "delete" else [60_000 + at]]
    target = join(*parts)
    plan = plan_of(sb, target)
    shared = in_shared_runs(target, [DOCUMENT], 32)
    assert (covered(plan, len(target)) & shared).sum() >= 0.999 * shared.sum()


def test_denser_edits_are_bridged_when_short_spans_are_asked_for():
    sb = SemBlend(SemBlendConfig(embedder="none", min_span_tokens=8))
    sb.register(Prompt(DOCUMENT), donor_id="d")
    target = DOCUMENT.copy()
    target[200::20] = 60_000  # 19 equal tokens between two substitutions: below what seeds guarantee
    plan = plan_of(sb, target)
    assert plan.reused_tokens >= 0.94 * len(target)
    default = SemBlend(SemBlendConfig(embedder="none"))
    default.register(Prompt(DOCUMENT), donor_id="d")
    assert [s.length for s in default.lookup(Prompt(target)).spans] == [200]


def test_a_swapped_number_is_recomputed_not_reused(sb):
    sb.register(Prompt(DOCUMENT), donor_id="d")
    target = DOCUMENT.copy()
    target[2000] = 59_999
    plan = plan_of(sb, target)
    assert not covered(plan, len(target))[2000]
    assert plan.prefill_tokens == 1


def test_a_longer_span_wins_over_a_more_recent_donor(sb):
    sb.register(Prompt(DOCUMENT), donor_id="whole")
    sb.register(Prompt(DOCUMENT[1000:1100]), donor_id="part")
    assert plan_of(sb, DOCUMENT).donor_ids == ("whole",)


def test_of_equal_passages_the_donor_with_the_same_left_context_is_taken(sb):
    passage, system = tokens(40, 300), tokens(41, 20)
    sb.register(Prompt(join(system, passage)), donor_id="same context")
    sb.register(Prompt(join(tokens(42, 20), passage)), donor_id="other context")
    plan = plan_of(sb, join(system, passage, tokens(43, 10)))
    assert plan.donor_ids == ("same context",)
    assert plan.reused_tokens == 320


def test_after_an_edit_the_donor_used_before_goes_on(sb):
    sb.register(Prompt(DOCUMENT), donor_id="first")
    sb.register(Prompt(DOCUMENT[2000:]), donor_id="second")
    target = DOCUMENT.copy()
    target[1999] = 59_999
    assert plan_of(sb, target).donor_ids == ("first",)


def test_few_long_spans_are_preferred_where_matches_overlap(sb):
    sb.register(Prompt(DOCUMENT[:2000]), donor_id="a")
    sb.register(Prompt(DOCUMENT[1000:3000]), donor_id="b")
    sb.register(Prompt(DOCUMENT[1500:4000]), donor_id="c")
    plan = plan_of(sb, DOCUMENT)
    assert plan.reused_tokens == 4000
    assert [(s.donor_id, s.target_start, s.target_end) for s in plan.spans] == [("a", 0, 2000), ("c", 2000, 4000)]


def test_the_answer_is_the_same_every_time(sb):
    for i in range(20):
        sb.register(Prompt(join(tokens(50, 200), tokens(60 + i, 50))), donor_id=str(i))
    target = join(tokens(50, 200), tokens(99, 50), tokens(50, 200))
    first = spans_of(sb.lookup(Prompt(target)))
    assert all(spans_of(sb.lookup(Prompt(target))) == first for _ in range(5))


def test_tokens_the_engine_already_holds_are_left_out(sb):
    sb.register(Prompt(DOCUMENT), donor_id="d")
    plan = sb.lookup(Prompt(DOCUMENT), exact_tokens=1024)
    assert [(s.donor_start, s.target_start, s.length) for s in plan.spans] == [(1024, 1024, 2976)]
    assert plan.prefill_tokens == 0


def test_a_paragraph_repeated_five_hundred_times_costs_no_more_than_its_length(sb):
    paragraph = tokens(70, 97)
    repeated = np.tile(paragraph, 500)
    sb.register(Prompt(repeated), donor_id="d")
    assert sb.stats().postings <= 8 * 97
    edited = repeated.copy()
    edited[25_000] = 59_999
    for target in (repeated, join(tokens(71, 11), repeated), edited, np.tile(paragraph, 700)):
        explanation = sb.explain(Prompt(target))
        assert explanation.decision.reused_tokens >= len(target) - 100
        assert explanation.stages[2].facts["runs_examined"] <= 64


def test_all_equal_tokens_are_one_span(sb):
    sb.register(Prompt(np.full(100_000, 7)), donor_id="d")
    assert sb.stats().postings <= 8
    plan = plan_of(sb, np.full(90_000, 7))
    assert [s.length for s in plan.spans] == [90_000]
    assert plan_of(sb, np.full(200_000, 7)).reused_tokens == 200_000


def test_boilerplate_of_every_donor_neither_floods_nor_hides_the_right_one(sb):
    boilerplate = tokens(80, 500)
    for i in range(400):
        sb.register(Prompt(join(boilerplate, tokens(1000 + i, 200))), donor_id=str(i))
    explanation = sb.explain(Prompt(join(boilerplate, tokens(1123, 200))))
    assert explanation.decision.donor_ids == ("123",)
    assert [s.length for s in explanation.decision.spans] == [700]
    assert explanation.stages[2].facts["runs_examined"] <= 64


@pytest.mark.parametrize("length", [1, 8, 31])
def test_a_prompt_below_the_shortest_span_is_declined_as_too_short(sb, length):
    sb.register(Prompt(DOCUMENT), donor_id="d")
    assert sb.lookup(Prompt(DOCUMENT[:length])).reason == "too_short"


@pytest.mark.parametrize("length", [32, 64, 200_000])
def test_prompts_from_32_to_200000_tokens_work(sb, length):
    sb.register(Prompt(tokens(90, length)), donor_id="d")
    assert plan_of(sb, tokens(90, length)).reused_tokens == length
