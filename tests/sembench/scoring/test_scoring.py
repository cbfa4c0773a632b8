"""Scores: what they are on known answers, and what must hold of them on any."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sembench.scoring import answers as scoring
from sembench.scoring.statistics import bootstrap_mean, bootstrap_median

TEXT = st.text(alphabet="abc de.", max_size=40)


@pytest.mark.parametrize(
    ("said", "answers", "recall"),
    [
        ("The boat was registered in Bergen.", ["Bergen"], 1.0),
        ("It is Oslo", ["Bergen", "Oslo, Norway"], 0.5),
        ("Registering boats", ["registered boat"], 1.0),
        ("nothing", ["Bergen"], 0.0),
        ("anything", [], None),
        ("it is", ["it is"], 1.0),
        ("", ["Bergen"], 0.0),
    ],
)
def test_quality_is_the_best_recall_of_a_gold_answer(said, answers, recall):
    assert scoring.compute_answer_recall(said, answers) == recall


@given(TEXT, TEXT)
def test_scores_stay_between_zero_and_one_and_are_one_for_equals(left, right):
    for score in (
        scoring.compute_token_f1,
        scoring.compute_rouge_l,
        scoring.compute_exact_match,
        scoring.compute_edit_similarity,
    ):
        assert 0.0 <= score(left, right) <= 1.0
        assert score(left, left) == 1.0


@given(TEXT, TEXT)
def test_f1_rouge_and_edits_do_not_depend_on_the_order_of_the_two(left, right):
    for score in (scoring.compute_token_f1, scoring.compute_rouge_l, scoring.compute_edit_similarity):
        assert score(left, right) == pytest.approx(score(right, left))


@given(st.text(alphabet="ab", max_size=9), st.text(alphabet="ab", max_size=9))
def test_edit_distance_is_that_of_the_plain_table(left, right):
    row = list(range(len(right) + 1))
    for at, one in enumerate(left, start=1):
        row, above = [at], row
        for to, other in enumerate(right, start=1):
            row.append(min(above[to] + 1, row[-1] + 1, above[to - 1] + (one != other)))
    longest = max(len(left), len(right))
    assert scoring.compute_edit_similarity(left, right) == pytest.approx(1 - row[-1] / longest if longest else 1.0)


@given(st.lists(st.sampled_from("xyz"), max_size=9), st.lists(st.sampled_from("xyz"), max_size=9))
def test_rouge_counts_the_longest_common_subsequence(left, right):
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    total = len(left) + len(right)
    expected = 2 * table[-1][-1] / total if left and right else float(left == right)
    assert scoring.compute_rouge_l(" ".join(left), " ".join(right)) == pytest.approx(expected)


def test_text_without_spaces_is_compared_by_character():
    assert scoring.compute_token_f1("港口代码", "港口编号") == 0.5


def test_a_fact_is_found_as_words_and_not_inside_a_longer_one():
    assert scoring.says("It holds 47 boats.", "47")
    assert not scoring.says("It holds 470 boats.", "47")
    assert not scoring.says("anything", "")


def logarithms(shares):
    total = sum(shares.values())
    return {token: math.log(0.999 * share / total) for token, share in shares.items()}


DISTRIBUTION = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.001, 1.0), min_size=1).map(logarithms)


@given(DISTRIBUTION, DISTRIBUTION)
def test_divergence_is_never_negative_and_zero_against_itself(cold, warm):
    assert scoring.compute_kl_topk([cold], [warm]) >= 0.0
    assert scoring.compute_kl_topk([cold], [cold]) == pytest.approx(0.0, abs=1e-6)


def test_divergence_is_known_where_both_lists_are_whole():
    cold, warm = {"a": math.log(0.5), "b": math.log(0.5)}, {"a": math.log(0.9), "b": math.log(0.1)}
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert scoring.compute_kl_topk([cold], [warm]) == pytest.approx(expected, abs=1e-6)


def test_positions_behind_the_first_difference_are_not_compared():
    same, far = {"a": math.log(0.9)}, {"b": math.log(0.9)}
    assert scoring.compute_kl_topk([same, same], [same, far], same_until=0) == pytest.approx(0.0, abs=1e-6)
    assert scoring.compute_kl_topk([same, same], [same, far]) > 0.5
    assert scoring.compute_kl_topk([], [same]) is None


def test_a_ratio_of_perplexities_needs_tokens_in_common():
    assert scoring.compute_ppl_ratio([-1.0], [-1.0], same_until=0) is None
    assert scoring.compute_ppl_ratio([-1.0, -5.0], [-1.0, -9.0], same_until=1) == 1.0


@pytest.mark.parametrize("bootstrap", [bootstrap_mean, bootstrap_median])
def test_one_document_gives_no_interval_and_more_documents_a_wider_one_than_more_prompts(bootstrap):
    assert bootstrap(["a", "a"], [0.0, 1.0]) is None
    values = [at / 40 for at in range(40)]
    apart = bootstrap([str(at) for at in range(40)], values)
    together = bootstrap([str(at // 10) for at in range(40)], values)
    assert together[1] - together[0] > apart[1] - apart[0]


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.floats(-5, 5)), min_size=2, max_size=30))
def test_the_fast_median_of_a_draw_is_the_plain_one(rows):
    """The interval lies inside the values, and equal values give no width."""
    clusters, values = [name for name, _ in rows], [value for _, value in rows]
    found = bootstrap_median(clusters, values)
    if found is None:
        assert len(set(clusters)) < 2
    else:
        assert min(values) <= found[0] <= found[1] <= max(values)


def test_the_median_of_documents_drawn_whole_agrees_with_drawing_them_by_hand():
    rng = np.random.default_rng(1)
    clusters = [str(at % 12) for at in range(60)]
    values = (rng.normal(size=60) + np.arange(60) % 12).tolist()
    groups = [[value for value, name in zip(values, clusters, strict=True) if name == str(at)] for at in range(12)]
    draws = [np.median([v for at in rng.integers(0, 12, 12) for v in groups[at]]) for _ in range(4000)]
    low, high = np.percentile(draws, [2.5, 97.5])
    assert bootstrap_median(clusters, values) == pytest.approx([low, high], abs=0.5)
