"""The engine takes fewer threads where other programs use the cores, and takes them back when they are free."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from semblend.engine.core import threads as threads_module
from semblend.engine.core.threads import (
    CpuPressure,
    ProcPressure,
    ThreadGovernor,
    choose_threads,
    limit_threads,
)


class PlayedPressure:
    """Tells what it was given, one after another."""

    def __init__(self, *seen: CpuPressure | None) -> None:
        self._seen = list(seen)

    def read(self) -> CpuPressure | None:
        return self._seen.pop(0)


BUSY_CORE = CpuPressure(waiting=0.67, idle=0.0)
FREE_CORE = CpuPressure(waiting=0.0, idle=1.0)
HALF_USED = CpuPressure(waiting=0.1, idle=0.5)


def play(most: int, *seen: CpuPressure | None) -> list[int]:
    """The threads after each window."""
    governor = ThreadGovernor(most, PlayedPressure(*seen), set_threads=lambda count: None)
    found = []
    for _ in seen:
        governor.look()
        found.append(governor.threads)
    return found


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "WINDOW_S", 0.0)


def test_a_busy_core_takes_a_thread_and_a_free_one_gives_it_back() -> None:
    assert play(2, BUSY_CORE, HALF_USED, FREE_CORE, HALF_USED) == [1, 1, 2, 2]


def test_three_busy_cores_of_eight_take_three_threads() -> None:
    assert play(8, CpuPressure(waiting=3.0, idle=0.0)) == [5]


def test_the_number_stays_where_the_system_does_not_tell() -> None:
    assert play(4, None, None) == [4, 4]


def test_the_number_is_set_only_when_it_changes() -> None:
    told: list[int] = []
    governor = ThreadGovernor(2, PlayedPressure(HALF_USED, BUSY_CORE, HALF_USED, FREE_CORE), set_threads=told.append)
    for _ in range(4):
        governor.look()
    assert told == [1, 2]


def test_a_governor_that_is_closed_gives_back_the_number_it_found() -> None:
    told: list[int] = []
    governor = ThreadGovernor(2, PlayedPressure(BUSY_CORE), set_threads=told.append)
    governor.look()
    governor.close()
    assert told == [1, 2]


def test_one_thread_is_never_looked_at() -> None:
    assert play(1, BUSY_CORE) == [1]  # and nothing is read: a look would cost for nothing


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 100), st.floats(0, 100))
def test_there_is_always_a_thread_and_never_more_than_allowed(now: int, most: int, waiting: float, idle: float) -> None:
    assert 1 <= choose_threads(min(now, most), most, CpuPressure(waiting, idle)) <= most


def write_proc(folder: Path, waited_s: float, idle_s: float) -> None:
    import os

    task = folder / "self" / "task" / "1"
    task.mkdir(parents=True, exist_ok=True)
    for place in (task, folder / "self"):
        (place / "schedstat").write_text(f"123 {int(waited_s * 1e9)} 7\n", encoding="ascii")
    core = min(os.sched_getaffinity(0))
    ticks = int(idle_s * os.sysconf("SC_CLK_TCK"))
    other = f"cpu{core + 1000} 0 0 0 {7 * ticks} 0 0 0 0"  # a core that is not ours
    text = f"cpu 9 9 9 {8 * ticks} 9 9 9 9\ncpu{core} 1 1 1 {ticks} 0 0 0 0\n{other}\nintr 5\n"
    (folder / "stat").write_text(text, encoding="ascii")


@pytest.mark.skipif(not hasattr(__import__("os"), "sched_getaffinity"), reason="Linux tells which cores are ours")
def test_pressure_is_what_the_kernel_counted_since_the_last_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(threads_module.time, "monotonic", lambda: next(clock))
    write_proc(tmp_path, waited_s=5.0, idle_s=10.0)
    pressure = ProcPressure(tmp_path)
    write_proc(tmp_path, waited_s=6.0, idle_s=11.5)
    assert pressure.read() == CpuPressure(waiting=0.5, idle=0.75)


@pytest.mark.parametrize("stat", [None, "", "cpu0 1 2\n"])
def test_a_system_that_tells_less_is_no_failure(tmp_path: Path, stat: str | None) -> None:
    if stat is not None:
        (tmp_path / "stat").write_text(stat, encoding="ascii")
    assert ProcPressure(tmp_path).read() is None


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
