"""Recorded looks without a GPU: what stands for a recording here does the same work again, into the same memory."""

from __future__ import annotations

import pytest
import torch
from naive_engine import NaiveEngine

from semblend.integration.vllm.worker.cuda_graphs import LOOK_SIZES, RecordedLooks
from semblend.materialize.contract import Rows
from semblend.materialize.gate.observers import measure_rows


def repeat(work):
    answer = work()

    def again():
        answer.copy_(work())
        return answer.clone()

    return again


def make_rows(engine, count, seed):
    """Rows of a prompt that is in the cache, but for one in seven, whose slots hold another row's KV."""
    generator = torch.Generator().manual_seed(seed)
    prompt, context = torch.randint(0, 900, (2500,), generator=generator), torch.randperm(2600, generator=generator)
    chosen = torch.randperm(2500, generator=generator)[:count].sort().values
    rows = Rows.of(prompt[chosen], chosen, context[:2500])
    engine.forward(rows)  # a look is at layer 0, whose KV is of a row's own token: the other rows would change nothing
    rows.slots[::7] = rows.slots[::7].roll(1)
    return rows


def test_a_recorded_look_finds_what_a_look_finds_whatever_was_looked_at_before():
    engine = NaiveEngine.make(slots=2600, vocabulary=1000)
    looks = RecordedLooks(lambda rows: measure_rows(engine, rows), engine.device, repeat)
    earlier = None
    for seed, count in enumerate((1, 128, 129, 40, 2048, 300)):
        rows = make_rows(engine, count, seed)
        expected, found = measure_rows(engine, rows), looks.run(rows)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert count < 14 or float(found.max()) > 0.1, "rows in the wrong slots are seen"
        if earlier is not None:
            torch.testing.assert_close(*earlier)  # an answer is not overwritten by the next look
        earlier = found, expected


def test_more_rows_than_were_recorded_are_left_to_the_model():
    engine = NaiveEngine.make(slots=2600, vocabulary=1000)
    looks = RecordedLooks(lambda rows: torch.zeros(len(rows)), engine.device, repeat)
    many = torch.arange(LOOK_SIZES[-1] + 1)
    assert looks.run(Rows.of(many, many, many)) is None


def test_a_recording_that_finds_something_else_is_not_used():
    engine = NaiveEngine.make(slots=64, vocabulary=1000)
    engine.forward(Rows.of([5], [0], torch.zeros(1, dtype=torch.long)))

    def remember(work):
        answer = work()
        return lambda: answer  # of the rows that it was recorded with

    with pytest.raises(RuntimeError, match="finds something else"):
        RecordedLooks(lambda rows: measure_rows(engine, rows), engine.device, remember)


@pytest.mark.parametrize("size", LOOK_SIZES)
def test_the_rows_of_a_recording_before_its_first_look_are_of_nobodys_slot(size):
    seen = []
    RecordedLooks(lambda rows: seen.append(rows) or torch.zeros(len(rows)), torch.device("cpu"), repeat)
    rows = next(rows for rows in seen if len(rows) == size)
    assert not rows.slots.any()
