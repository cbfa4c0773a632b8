"""How long passes take is measured once, when an engine starts."""

from __future__ import annotations

import pytest
import torch
from naive_engine import NaiveEngine

from semblend.materialize.blend.passes import FEW_ROWS, run_rare_passes, time_passes


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


def test_what_an_edited_history_and_a_long_repair_need_is_met_before_any_request():
    """The looks stop in layer 1; the last pass is over rows all over a prompt."""
    met = []

    class Watched(NaiveEngine):
        def forward(self, rows, observer=None):
            met.append((len(rows), observer is not None and observer.stops_early, rows.runs[:2]))
            return super().forward(rows, observer)

    run_rare_passes(Watched(**vars(NaiveEngine.make(slots=256))), torch.arange(128))
    assert [(rows, is_look) for rows, is_look, _ in met] == [(FEW_ROWS, True), (128, True), (64, False)]
    assert met[-1][2] == ((0, 1), (2, 3))
