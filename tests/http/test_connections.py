"""The books of connections: who may be closed for room, and in which order; how descriptors limit them."""

from __future__ import annotations

import logging
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import ConfigError
from semblend.http import connections as edge
from semblend.http.connections import Connections, Phase, RareLines, plan_limit


class Wire:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_evicted = False

    def evict(self) -> None:
        self.is_evicted = True

    def shutdown(self) -> None:
        raise AssertionError("not asked for")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    time = [100.0]
    monkeypatch.setattr(edge.time, "monotonic", lambda: time[0])
    return time


def test_the_connection_that_kept_us_waiting_longest_goes_first(now):
    books, wires = Connections(limit=3), [Wire(name) for name in "abc"]
    for wire in wires:
        now[0] += 10
        books.enter(wire, Phase.HEADER)
    books.enter(wires[0], Phase.ANSWER)
    now[0] += 10
    books.enter(wires[0], Phase.IDLE)  # it was answered meanwhile: its wait is the youngest
    now[0] += 10
    books.make_room()
    assert [wire.is_evicted for wire in wires] == [False, True, False]
    assert books.evicted == 1


def test_one_that_sends_a_body_goes_after_those_that_send_nothing(now):
    books, uploader, silent = Connections(limit=2), Wire("uploader"), Wire("silent")
    books.enter(uploader, Phase.BODY)
    now[0] += 30
    books.enter(silent, Phase.HEADER)
    now[0] += 5
    books.make_room()
    assert silent.is_evicted
    assert not uploader.is_evicted


def test_a_newcomer_is_not_closed_for_the_next_newcomer_while_an_upload_drags_on(now):
    books, uploader, newcomer = Connections(limit=2), Wire("uploader"), Wire("newcomer")
    books.enter(uploader, Phase.BODY)
    now[0] += 30
    books.enter(newcomer, Phase.HEADER)
    books.make_room()
    assert uploader.is_evicted
    assert not newcomer.is_evicted


def test_a_connection_that_waits_for_us_is_never_closed_for_room():
    books, wires = Connections(limit=2), [Wire("a"), Wire("b")]
    for wire in wires:
        books.enter(wire, Phase.ANSWER)
    assert not books.can_take_one
    books.make_room()
    assert not any(wire.is_evicted for wire in wires)


def test_room_is_told_when_a_connection_goes_or_may_go():
    told: list[str] = []
    books, wire = Connections(limit=1), Wire("a")
    books.enter(wire, Phase.ANSWER)
    books.on_room = lambda: told.append("room")
    books.enter(wire, Phase.IDLE)
    books.enter(wire, Phase.ANSWER)
    assert told == ["room"]
    books.remove(wire)
    books.remove(wire)
    assert told == ["room", "room"]


STEPS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([*Phase, "lost", "accept"])), max_size=60)


@given(STEPS)
def test_whatever_comes_the_limit_holds_and_no_answer_is_cut(steps):
    books, wires, phases = Connections(limit=3), [Wire(str(n)) for n in range(6)], {}
    for number, step in steps:
        wire = wires[number]
        if step == "accept":
            if wire not in phases and books.can_take_one:
                books.make_room()
                books.enter(wire, Phase.HEADER)
                phases[wire] = Phase.HEADER
        elif wire in phases and step == "lost":
            books.remove(wire)
            del phases[wire]
            wires[number] = Wire(str(number))
        elif wire in phases and not wire.is_evicted:
            books.enter(wire, step)
            phases[wire] = step
        assert sum(not wire.is_evicted for wire in phases) <= 3
        assert len(books) == len(phases)
        assert all(phases[wire] is not Phase.ANSWER for wire in phases if wire.is_evicted)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed", "raised"),
    [
        (1024, 1024, 1024, 1024 - 96 - 20, 1024),  # no room to raise: fewer connections
        (1024, 4096, 1024, 1024, 1024 + 96 + 20),  # raised as far as needed, no further
        (1024, resource.RLIM_INFINITY, 2000, 2000, 2000 + 96 + 20),
        (65_536, 65_536, 1024, 1024, 65_536),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1024, 1024, resource.RLIM_INFINITY),
    ],
)
def test_connections_leave_descriptors_for_everything_else(monkeypatch, soft, hard, wanted, allowed, raised):
    limits = [soft, hard]
    monkeypatch.setattr(edge, "_count_open_files", lambda: 20)
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.__setitem__(0, pair[0]))
    assert plan_limit(wanted) == allowed
    assert limits[0] == raised


def test_too_few_descriptors_are_an_error_that_names_the_number_needed(monkeypatch):
    monkeypatch.setattr(edge, "_count_open_files", lambda: 20)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        plan_limit(1024)
    assert "ulimit -n 1140" in caught.value.hint


def test_a_line_that_repeats_is_written_once_a_minute_with_its_count():
    clock, lines = [0.0], []
    log = logging.Logger("test")
    log.addFilter(RareLines(every_s=60, clock=lambda: clock[0]))
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    for second in range(121):
        clock[0] = float(second)
        log.warning("nonsense from %s", second)
    log.warning("something else")
    assert lines == [
        "nonsense from 0",
        "nonsense from 60 (and 59 times more since the last such line)",
        "nonsense from 120 (and 59 times more since the last such line)",
        "something else",
    ]


def test_two_errors_that_come_from_two_places_are_both_written():
    lines = []
    log = logging.Logger("test")
    log.addFilter(RareLines())
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(str(record.exc_info[1]))  # type: ignore[method-assign]
    for fail in (lambda: int("x"), lambda: [][0]):
        for _ in range(3):
            try:
                fail()
            except (ValueError, IndexError):
                log.exception("it failed")
    assert len(lines) == 2
