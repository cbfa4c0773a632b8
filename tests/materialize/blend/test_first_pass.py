"""Which rows a first pass computes, and from when on two passes are not worth their work."""

from __future__ import annotations

import pytest

from semblend.config import SemBlendConfig
from semblend.materialize.blend.passes import first_rows, two_passes_cost_more
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.thresholds import DEFAULT
from semblend.span import Span


def cost_more(spans, settings):
    return two_passes_cost_more(first_rows(1000, 0, spans, settings), spans, 1000, settings)


HALF = (Span("d", 0, 200, 600),)  # of a thousand tokens, two hundred before it and two hundred behind


def test_gaps_heads_of_spans_and_the_end_are_computed():
    spans = (Span("d", 0, 10, 20), Span("d", 60, 40, 30))
    rows = first_rows(80, 4, spans, QualitySettings(first_seam_tokens=3, seam_tokens=2, question_tokens=5))
    assert rows.tolist() == [*range(4, 13), *range(30, 42), *range(70, 80)]


def test_an_end_that_a_donor_holds_is_computed_all_the_same():
    assert first_rows(50, 0, (Span("d", 0, 0, 50),), QualitySettings(question_tokens=4))[-4:].tolist() == [
        46,
        47,
        48,
        49,
    ]


@pytest.mark.parametrize(("most_work", "declined"), [(0.7, True), (0.75, False), (1.0, False), (7.0, False)])
def test_the_bound_is_the_share_of_a_prefill_that_repairs_may_take(most_work, declined):
    why = cost_more(HALF, QualitySettings(most_work=most_work))
    assert (why is not None) == declined
    assert why is None or why == "two passes compute 723 rows, over 70% of a prefill's 1000"


def test_more_is_never_worth_it_than_a_prefill():
    many = tuple(Span("d", 0, 100 * i, 40) for i in range(10))
    assert cost_more(many, QualitySettings(most_work=7.0)) is not None


def test_wider_heads_of_spans_cost_more():
    many = tuple(Span("d", 0, 100 * i, 90) for i in range(10))
    assert cost_more(many, QualitySettings(seam_tokens=4)) is None
    assert cost_more(many, QualitySettings(seam_tokens=40)) is not None


MOVED = (Span("d", 600, 100, 80), Span("d", 0, 180, 500))  # a passage that followed the others stands before them now


def test_a_passage_that_moved_ahead_is_computed_and_the_first_head_is_that_of_the_next():
    settings = QualitySettings(first_seam_tokens=3, seam_tokens=2, question_tokens=1)
    assert first_rows(700, 100, MOVED, settings).tolist() == [*range(100, 183), *range(680, 700)]
    reused = first_rows(700, 100, MOVED, QualitySettings(first_seam_tokens=3, seam_tokens=2, moved_ahead_share=0))
    assert reused[:5].tolist() == [100, 101, 102, 180, 181]


def test_a_passage_that_moved_ahead_is_computed_once_whatever_is_repaired():
    settings = QualitySettings(first_seam_tokens=0, seam_tokens=0, question_tokens=1, most_work=0.1)
    why = two_passes_cost_more(first_rows(700, 100, MOVED, settings), MOVED, 600, settings)
    assert why == "two passes compute 178 rows, over 10% of a prefill's 600"  # 80 + 20, the last 20 again, 58 repaired


def test_what_the_librarys_settings_say_reaches_the_passes_and_the_engines_own_stands_beside_it():
    config = SemBlendConfig(quality="fast", seam_tokens=5, layer_share=0.25, deep_tolerance=0.5)
    made = QualitySettings.of_config(config, DEFAULT, pass_rows=7)
    assert (made.mode, made.seam_tokens, made.layer_share, made.deep_tolerance, made.pass_rows) == (
        "fast",
        5,
        0.25,
        0.5,
        7,
    )
