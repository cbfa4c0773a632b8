"""Each rule of the contract can fail: an engine that breaks it is caught by the rule that is about it."""

from __future__ import annotations

from dataclasses import replace

import behaviours
import pytest
import torch
from behaviours import World

from semblend.materialize.contract import Observer, Rows, StopPass
from semblend.materialize.naive_engine import NaiveEngine

BLOCK = 16


class ScattersNextDoor:
    """A layout that writes into the next block, too."""

    def __init__(self, layout):
        self._layout = layout

    def __getattr__(self, name):
        return getattr(self._layout, name)

    def scatter(self, layer, slots, k, v):
        self._layout.scatter(layer, slots, k, v)
        self._layout.scatter(layer, ((slots.max() // BLOCK + 1) * BLOCK).reshape(1), k[:1] + 1, v[:1])


class SeesOneAhead(NaiveEngine):
    def _attend(self, layer, q, rows):
        ahead = (rows.positions + 1).clamp_max(len(rows.context) - 1)
        return super()._attend(layer, q, Rows(rows.tokens, ahead, rows.slots, rows.context))


class ForgetsItsContext(NaiveEngine):
    """Attends to the rows of this pass alone, as an engine would that takes every pass for a new prompt."""

    def _attend(self, layer, q, rows):
        return super()._attend(layer, q, Rows.of(rows.tokens, torch.arange(len(rows)), rows.slots))


class TakesRowsForOneRun(NaiveEngine):
    """Takes scattered rows for a stretch without holes that ends at the last."""

    def forward(self, rows, observer=None):
        first = rows.reach - len(rows)
        run = Rows(rows.tokens, torch.arange(first, rows.reach), rows.slots, rows.context)
        return super().forward(run, observer)


class WritesWholeBlocks(NaiveEngine):
    """Rewrites the token before a pass, too."""

    def forward(self, rows, observer=None):
        hidden = super().forward(rows, observer)
        before = rows.context[max(0, int(rows.host_positions[0]) - 1)].reshape(1)
        for layer in range(self.layout.layers):
            k, v = (part.clone() for part in self.layout.gather(layer, before))
            self.layout.scatter(layer, before, k + 1, v)
        return hidden


class ShowsTooLate(NaiveEngine):
    """Calls ``before_write`` when the cache has been written."""

    def forward(self, rows, observer=None):
        class Late(Observer):
            def __init__(self):
                self.kept = []

            def before_write(self, layer, k, v, rows, layout):
                self.kept = [layer, k, v]

            def on_layer(self, layer, q, rows, layout):
                if observer is not None:
                    observer.before_write(*self.kept, rows, layout)
                    observer.on_layer(layer, q, rows, layout)

        return super().forward(rows, Late())


class ShowsNothing(NaiveEngine):
    def forward(self, rows, observer=None):
        return super().forward(rows)


class WritesDespiteStop(NaiveEngine):
    def forward(self, rows, observer=None):
        try:
            return super().forward(rows, observer)
        except StopPass:
            super().forward(rows)
            raise


class ComputesOtherwiseWhenWatched(NaiveEngine):
    def forward(self, rows, observer=None):
        table, self.table = self.table, self.table * (1.1 if observer is not None else 1.0)
        try:
            return super().forward(rows, observer)
        finally:
            self.table = table


class TurnsTheWrongWay(NaiveEngine):
    """Says another rotation than it computes with: relocated keys then stand at wrong positions."""

    def forward(self, rows, observer=None):
        said, self.rope = self.rope, replace(self.rope, inv_freq=tuple(2 * f for f in self.rope.inv_freq))
        try:
            return super().forward(rows, observer)
        finally:
            self.rope = said


MUTATIONS = {
    "test_what_is_scattered_is_gathered_and_nothing_else_changes": "layout",
    "test_a_row_sees_what_lies_before_it_and_nothing_behind": SeesOneAhead,
    "test_a_prefill_in_chunks_is_a_prefill": ForgetsItsContext,
    "test_scattered_rows_equal_a_plain_pass": TakesRowsForOneRun,
    "test_a_pass_writes_its_rows_and_no_others": WritesWholeBlocks,
    "test_an_observer_sees_every_layer_before_and_after_it_is_written": ShowsTooLate,
    "test_an_observer_that_stops_at_the_first_layer_leaves_the_cache_as_it_was": WritesDespiteStop,
    "test_an_observer_does_not_change_the_pass": ComputesOtherwiseWhenWatched,
    "test_relocation_is_exact_at_layer_0_and_approximate_above": TurnsTheWrongWay,
    "test_a_donor_with_the_same_left_context_gives_what_cold_gives": TakesRowsForOneRun,
    "test_a_gate_that_trusts_nothing_gives_what_cold_gives": ForgetsItsContext,
    "test_a_gate_that_accepts_repairs_what_it_chose_and_says_so": TurnsTheWrongWay,
    "test_wrong_donor_kv_is_refused": ShowsNothing,
    "test_in_pieces_or_at_once_is_the_same_result": "unstable",
    "test_a_prompt_that_the_engine_prefills_itself_is_rejected_with_what_it_cost": TakesRowsForOneRun,
}


def make_world(kind):
    if kind == "layout":
        engine = NaiveEngine.make(slots=64 * BLOCK, vocabulary=97)
        engine.layout = ScattersNextDoor(engine.layout)
        return World(engine, BLOCK, 97)
    if kind == "unstable":
        engine = NaiveEngine.make(slots=64 * BLOCK, vocabulary=97)
        forward = engine.forward

        def drift(rows, observer=None):
            engine.table = engine.table + 0.01
            return forward(rows, observer)

        engine.forward = drift
        return World(engine, BLOCK, 97)
    return World(kind.make(slots=64 * BLOCK, vocabulary=97), BLOCK, 97)


@pytest.mark.parametrize("rule", MUTATIONS)
def test_an_engine_that_breaks_a_rule_is_caught_by_it(rule):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(behaviours, rule)(make_world(MUTATIONS[rule]))


BLENDER_MUTATIONS = {  # rules about the blender itself: what it would be without one of its lines
    "test_a_prompt_that_is_given_up_frees_its_donors": ("donors.tiers.DonorKv.release", lambda self, tensors: None),
    "test_a_donor_that_is_gone_is_declined_before_anything_is_written": (
        "blend.blender.Blender._find_moves",
        lambda self, state, held: [],
    ),
}


@pytest.mark.parametrize("rule", BLENDER_MUTATIONS)
def test_a_blender_that_breaks_a_rule_is_caught_by_it(rule, monkeypatch):
    path, broken = BLENDER_MUTATIONS[rule]
    monkeypatch.setattr(f"semblend.materialize.{path}", broken)
    with pytest.raises(AssertionError):
        getattr(behaviours, rule)(make_world(NaiveEngine))


def test_a_failure_that_keeps_its_donors_is_caught(monkeypatch):
    monkeypatch.setattr("semblend.materialize.donors.tiers.DonorKv.release", lambda self, tensors: None)
    with pytest.raises(AssertionError):
        behaviours.test_a_failure_leaves_the_request_computable(make_world(NaiveEngine), monkeypatch)


def test_every_rule_has_a_mutation():
    rules = {name for name in vars(behaviours) if name.startswith("test_")}
    assert rules - MUTATIONS.keys() - BLENDER_MUTATIONS.keys() == {"test_a_failure_leaves_the_request_computable"}
