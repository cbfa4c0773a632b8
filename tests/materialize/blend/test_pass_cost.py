"""How long passes take is measured once, when an engine starts."""

from __future__ import annotations

import pytest
import torch
from naive_engine import NaiveEngine

from semblend.materialize.blend.passes import FEW_ROWS, time_passes


class Slow(NaiveEngine):
    """An engine whose passes take as long as they are told."""

    now, fixed, each, busy = 0.0, 0.0, 0.0, 0.0

    def forward(self, rows, observer=None):
        self.now += self.fixed + self.each * len(rows) + self.busy
        self.busy = 0.0
        return super().forward(rows, observer)


def slow(fixed, each):
    engine = Slow(**vars(NaiveEngine.make(slots=256)))
    engine.fixed, engine.each = fixed, each
    return engine


def test_a_pass_over_few_rows_and_one_over_many_are_timed_and_a_busy_moment_does_not_count():
    engine = slow(fixed=0.029, each=0.001)
    engine.busy = 1.0  # the first pass of all
    few, many = time_passes(engine, torch.arange(128), clock=lambda: engine.now)
    assert (few.work.rows, many.work.rows) == (FEW_ROWS, 128)
    assert few.ms == pytest.approx(29 + FEW_ROWS)
    assert many.ms == pytest.approx(29 + 128)


def test_slots_for_few_rows_tell_nothing():
    assert time_passes(slow(1.0, 1.0), torch.arange(FEW_ROWS)) is None
