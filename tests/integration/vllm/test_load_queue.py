"""Loads of a step: how long they may take, and how long a piece of them is."""

from __future__ import annotations

import pytest

from semblend.integration.vllm.orders import Load
from semblend.integration.vllm.worker.worker_connector import LoadQueue
from semblend.materialize.blend.quality import Pace
from semblend.plan.reuse_plan import Decline, DeclineReason

DONE = Decline(DeclineReason.ERROR, "a result like any other")


def make_load(name, tenant="", tokens=3):
    return Load(name, range(tokens), (0,), 0, tokens, (), "fast", tenant)


class Loads:
    """A queue over a clock of its own; every load takes ``ms`` of work, in pieces as long as the pace says."""

    def __init__(self, count, ms, piece_ms=40.0):
        self.now, self.paces, self.pace = 0.0, [], Pace(piece_ms)
        self.queue = LoadQueue(self._begin, self.pace, clock=lambda: self.now)
        self._ms = ms
        for number in range(count):
            self.queue.add(make_load(f"r{number}"))

    def _begin(self, load):
        left = self._ms
        while left > 0:
            self.paces.append(self.pace.piece_ms)
            work = min(left, self.pace.piece_ms or left)
            self.now += work / 1e3
            left -= work
            if left > 0:
                yield
        return DONE

    def work(self, budget_ms):
        return [load.request_id for load, _ in self.queue.work(budget_ms)]


def test_a_piece_is_as_long_as_what_is_left_of_the_steps_time():
    loads = Loads(2, ms=15)
    assert loads.work(40) == ["r0", "r1"]
    assert loads.paces == pytest.approx([40, 25])


def test_with_half_of_the_time_gone_the_next_piece_waits_for_the_next_step():
    loads = Loads(3, ms=21)
    assert [loads.work(40) for _ in range(3)] == [["r0"], ["r1"], ["r2"]]
    assert loads.paces == [40, 40, 40]


def test_a_long_load_takes_a_steps_share_of_several_steps():
    loads = Loads(1, ms=90)
    assert [loads.work(40) for _ in range(3)] == [[], [], ["r0"]]


def test_where_nobody_else_has_work_a_load_is_one_piece_and_told_before_the_next_begins():
    loads = Loads(2, ms=90)
    assert loads.work(None) == ["r0"]
    assert loads.paces == [0]
    assert loads.work(None) == ["r1"]
    assert len(loads.queue) == 0


def test_a_load_goes_on_at_once_when_the_others_have_ended():
    loads = Loads(1, ms=200)
    assert loads.work(40) == []
    assert loads.work(None) == ["r0"]
    assert loads.paces == [40, 0]


def test_a_queue_without_a_pace_does_a_load_in_one_piece_whatever_the_budget():
    loads = Loads(1, ms=90, piece_ms=0.0)
    assert loads.work(40) == ["r0"]


def test_tenants_take_turns_however_many_loads_one_of_them_has():
    loads = Loads(0, ms=10)
    for number in range(4):
        loads.queue.add(make_load(f"a{number}", "acme"))
    loads.queue.add(make_load("b0", "bolt"))
    loads.queue.add(make_load("b1", "bolt"))
    assert [loads.work(None)[0] for _ in range(6)] == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_turns_are_counted_in_tokens():
    loads = Loads(0, ms=10)
    loads.queue.add(make_load("long", "acme", tokens=3000))
    loads.queue.add(make_load("longer", "acme", tokens=3000))
    for number in range(3):
        loads.queue.add(make_load(f"b{number}", "bolt", tokens=1000))
    assert [loads.work(None)[0] for _ in range(5)] == ["long", "b0", "b1", "b2", "longer"]


def test_a_load_that_has_begun_is_finished_before_another_tenants_turn():
    loads = Loads(0, ms=90)
    loads.queue.add(make_load("a0", "acme"))
    assert loads.work(40) == []
    loads.queue.add(make_load("b0", "bolt"))
    assert [loads.work(40) for _ in range(4)] == [[], ["a0"], [], ["b0"]]


def test_a_load_can_be_cancelled_before_and_after_it_has_begun():
    loads = Loads(0, ms=90)
    for name, tenant in (("a0", "acme"), ("b0", "bolt"), ("a1", "acme")):
        loads.queue.add(make_load(name, tenant))
    assert loads.work(40) == []  # a0 has begun
    assert [loads.queue.cancel(name) for name in ("a1", "a0", "a0")] == [True, True, False]
    assert loads.work(None) == ["b0"]


def test_what_had_ended_when_the_ranks_lost_each_other_is_abandoned_with_the_rest():
    loads = Loads(3, ms=10)
    loads.queue._agree = lambda ms: (_ for _ in ()).throw(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        loads.work(40)
    assert [load.request_id for load in loads.queue.abandon()] == ["r0", "r1", "r2"]
    assert len(loads.queue) == 0
