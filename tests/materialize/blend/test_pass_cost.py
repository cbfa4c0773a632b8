"""What a pass costs beside its rows is measured once, in rows."""

from __future__ import annotations

import pytest
import torch
from naive_engine import NaiveEngine

from semblend.materialize.blend.passes import MAX_PASS_ROWS, first_rows, measure_pass_rows, two_passes_cost_more
from semblend.materialize.blend.quality import QualitySettings
from semblend.span import Span


class Slow(NaiveEngine):
    """An engine whose passes take as long as they are told."""

    now, fixed, each = 0.0, 0.0, 0.0

    def forward(self, rows, observer=None):
        self.now += self.fixed + self.each * len(rows)
        return super().forward(rows, observer)


def slow(fixed, each):
    engine = Slow(**vars(NaiveEngine.make(slots=256)))
    engine.fixed, engine.each = fixed, each
    return engine


MOST = MAX_PASS_ROWS["cpu"]


@pytest.mark.parametrize(
    ("fixed", "each", "found"), [(29.0, 1.0, 29), (0.0, 1.0, 0), (5.0, 0.0, MOST), (9e9, 1.0, MOST)]
)
def test_the_fixed_part_of_a_pass_is_told_in_rows(fixed, each, found):
    engine = slow(fixed, each)
    assert measure_pass_rows(engine, torch.arange(128), clock=lambda: engine.now) == found


def test_a_short_prompt_cannot_win_where_passes_have_a_price_of_their_own():
    spans = (Span("d", 40, 10, 180),)
    for pass_rows, worth_it in ((0, True), (29, False)):
        settings = QualitySettings(pass_rows=pass_rows)
        why = two_passes_cost_more(first_rows(215, 0, spans, settings), spans, 215, settings)
        assert (why is None) == worth_it
    assert "cost 29 rows more each" in why


def test_a_long_prompt_is_begun_whatever_a_pass_costs_beside_its_rows():
    spans, settings = (Span("d", 40, 10, 4000),), QualitySettings(pass_rows=588)
    assert two_passes_cost_more(first_rows(4040, 0, spans, settings), spans, 4040, settings) is None
