"""Which rows passes compute, and how many are expected before they run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semblend.config import SemBlendConfig
from semblend.materialize.blend.passes import first_rows
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.thresholds import DEFAULT
from semblend.plan.reuse_plan import ReusePlan
from semblend.session.sessions import count_work
from semblend.span import Span


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


MOVED = (Span("d", 600, 100, 80), Span("d", 0, 180, 500))  # a passage that followed the others stands before them now


def test_a_passage_that_moved_ahead_is_computed_and_the_first_head_is_that_of_the_next():
    settings = QualitySettings(first_seam_tokens=3, seam_tokens=2, question_tokens=1)
    assert first_rows(700, 100, MOVED, settings).tolist() == [*range(100, 183), *range(680, 700)]
    reused = first_rows(700, 100, MOVED, QualitySettings(first_seam_tokens=3, seam_tokens=2, moved_ahead_share=0))
    assert reused[:5].tolist() == [100, 101, 102, 180, 181]


def test_a_passage_that_moved_ahead_is_computed_once_whatever_is_repaired():
    settings = QualitySettings(first_seam_tokens=0, seam_tokens=0, question_tokens=1)
    assert count_work(ReusePlan(MOVED, 700, 100), settings, 0.1).rows == 100 + 20 + 50  # 80 + 20, the last 20 again


spans_of_a_prompt = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=5)


@given(spans_of_a_prompt, st.integers(0, 30), st.integers(1, 50), st.integers(0, 20), st.integers(0, 20))
def test_the_rows_that_are_expected_are_those_that_the_first_pass_computes(pieces, exact, tail, first, seam):
    at, spans = exact, []
    for gap, length in pieces:
        spans.append(Span("d", at + gap, at + gap, length))
        at += gap + length
    settings = QualitySettings(first_seam_tokens=first, seam_tokens=seam, question_tokens=16)
    rows = first_rows(at + tail, exact, spans, settings)
    work = count_work(ReusePlan(tuple(spans), at + tail, exact), settings)
    assert (work.rows, work.keys) == (len(rows), int((rows + 1).sum()))
    assert work.moved == sum(span.length for span in spans)


def test_what_the_librarys_settings_say_reaches_the_passes_and_the_engines_own_stands_beside_it():
    config = SemBlendConfig(quality="fast", seam_tokens=5, layer_share=0.25, deep_tolerance=0.5)
    made = QualitySettings.of_config(config, DEFAULT, piece_rows=7)
    assert (made.mode, made.seam_tokens, made.layer_share, made.deep_tolerance, made.piece_rows) == (
        "fast",
        5,
        0.25,
        0.5,
        7,
    )
