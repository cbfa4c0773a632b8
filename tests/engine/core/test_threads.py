"""The engine takes fewer threads where other programs use the cores, and takes them back when they are free."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from semblend.engine.core import threads as threads_module
from semblend.engine.core.threads import (
    HOLD_S,
    WINDOW_S,
    ProcWaiting,
    ThreadGovernor,
    choose_threads,
    limit_threads,
)


class PlayedWaiting:
    """Tells what it was given, one after another."""

    def __init__(self, *seen: float | None) -> None:
        self._seen = list(seen)

    def read(self) -> float | None:
        return self._seen.pop(0)


BUSY_CORE, NICE_NEIGHBOUR, ALONE = 0.6, 0.25, 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in its only element; a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(threads_module.time, "monotonic", lambda: now[0])
    return now


def play(clock: list[float], most: int, *seen: float | None, every: float = WINDOW_S) -> list[int]:
    """The threads after each window."""
    governor = ThreadGovernor(most, PlayedWaiting(*seen), set_threads=lambda count: None)
    found = []
    for _ in seen:
        clock[0] += every
        governor.look()
        found.append(governor.threads)
    return found


def test_a_busy_core_takes_a_thread_until_it_is_tried_again(clock: list[float]) -> None:
    assert play(clock, 2, BUSY_CORE, ALONE, ALONE) == [1, 1, 1]
    assert play(clock, 2, BUSY_CORE, ALONE, BUSY_CORE, ALONE, every=HOLD_S) == [1, 2, 1, 2]


def test_a_program_of_less_priority_takes_no_thread(clock: list[float]) -> None:
    assert play(clock, 2, NICE_NEIGHBOUR, NICE_NEIGHBOUR) == [2, 2]


def test_three_busy_cores_of_eight_take_three_threads(clock: list[float]) -> None:
    assert play(clock, 8, 3.0) == [5]


def test_the_number_stays_where_the_system_does_not_tell(clock: list[float]) -> None:
    assert play(clock, 4, None, None) == [4, 4]


def test_nothing_is_read_before_a_window_is_over_and_for_one_thread(clock: list[float]) -> None:
    assert play(clock, 2, BUSY_CORE, every=WINDOW_S / 2) == [2]
    assert play(clock, 1, BUSY_CORE) == [1]


def test_the_number_is_set_when_it_changes_and_given_back_at_the_end(clock: list[float]) -> None:
    told: list[int] = []
    governor = ThreadGovernor(2, PlayedWaiting(ALONE, BUSY_CORE, ALONE), set_threads=told.append)
    for _ in range(3):
        clock[0] += WINDOW_S
        governor.look()
    governor.close()
    assert told == [1, 2]


@given(st.integers(1, 64), st.floats(0, 100))
def test_there_is_always_a_thread_and_waiting_never_adds_one(now: int, waiting: float) -> None:
    assert 1 <= choose_threads(now, waiting) <= now


def write_schedstat(folder: Path, *waited_s: float) -> None:
    for number, seconds in enumerate(waited_s):
        task = folder / "self" / "task" / str(number)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"123 {int(seconds * 1e9)} 7\n", encoding="ascii")


def test_waiting_is_what_the_kernel_counted_for_all_threads_since_the_last_reading(
    tmp_path: Path, clock: list[float]
) -> None:
    write_schedstat(tmp_path, 5.0, 1.0)
    waiting = ProcWaiting(tmp_path)
    write_schedstat(tmp_path, 6.0, 1.5)
    clock[0] += 2.0
    assert waiting.read() == pytest.approx(0.75)


def test_a_system_that_tells_less_is_no_failure(tmp_path: Path) -> None:
    assert ProcWaiting(tmp_path).read() is None
    write_schedstat(tmp_path, 1.0)
    (tmp_path / "self" / "task" / "0" / "schedstat").write_text("0\n", encoding="ascii")
    assert ProcWaiting(tmp_path).read() is None


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        ({}, 8),
    ],
)
def test_a_containers_quota_limits_the_threads(tmp_path: Path, files: dict[str, str], threads: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert limit_threads(8, tmp_path) == threads
