"""How many threads the CPU compute uses: as many as there are free cores, looked at while the engine works.

A matrix product is cut to equal parts and ends with the slowest. Where another program keeps a core busy, the part on
that core waits for its turn on it, milliseconds each time, and the other threads wait with it: two threads on one free
core are several times slower than one. So the engine looks, a few times a second, how long its threads were ready to
run and did not (`/proc/self/task/*/schedstat`), and how long its cores had nothing to do (`/proc/stat`).
Where the kernel does not tell, the number stays.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

WINDOW_S = 0.25
"""So often the number is looked at."""
MUCH_WAITING = 0.3
MUCH_IDLE = 0.7
"""In cores, over a window. Between the two nothing changes: a program that uses half a core takes no thread."""


@dataclass(frozen=True, slots=True)
class CpuPressure:
    """Cores over a stretch of time: those that our threads were ready for and did not get, and those nobody used."""

    waiting: float
    idle: float


def choose_threads(now: int, most: int, seen: CpuPressure) -> int:
    """Threads for the next window.

    >>> choose_threads(2, 2, CpuPressure(waiting=0.7, idle=0.0)), choose_threads(1, 2, CpuPressure(0.0, idle=1.0))
    (1, 2)
    """
    if seen.waiting > MUCH_WAITING:
        return max(1, now - max(1, round(seen.waiting)))
    if seen.idle > MUCH_IDLE:
        return min(most, now + round(seen.idle))
    return now


class ReadsPressure(Protocol):
    """Tells the pressure since it was last asked; None where the system does not tell."""

    def read(self) -> CpuPressure | None: ...


class ProcPressure:
    """`ReadsPressure` of Linux, for this process and the cores it may use."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._sample()

    def read(self) -> CpuPressure | None:
        before, self._last = self._last, self._sample()
        if before is None or self._last is None:
            return None
        seconds = max(1e-9, self._last[0] - before[0])
        waiting, idle = (max(0.0, new - old) / seconds for old, new in zip(before[1:], self._last[1:], strict=True))
        return CpuPressure(waiting, idle)

    def _sample(self) -> tuple[float, float, float] | None:
        """The time, seconds that our threads have waited for a core, seconds that our cores had nothing to do."""
        try:
            return time.monotonic(), self._read_waiting(), self._read_idle()
        except (OSError, ValueError, IndexError, AttributeError):  # no /proc, or one that says less
            return None

    def _read_waiting(self) -> float:
        total = 0
        for task in (self._proc / "self" / "task").iterdir():
            try:
                total += int((task / "schedstat").read_text(encoding="ascii").split()[1])
            except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                if not (self._proc / "self" / "schedstat").exists():
                    raise
        return total / 1e9

    def _read_idle(self) -> float:
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = (line.split() for line in (self._proc / "stat").read_text(encoding="ascii").splitlines())
        ticks = sum(int(words[4]) + int(words[5]) for words in lines if words and words[0] in ours)
        return ticks / os.sysconf("SC_CLK_TCK")


class ThreadGovernor:
    """Sets torch's threads by the pressure; called by the engine's thread, between steps."""

    def __init__(
        self,
        most: int,
        pressure: ReadsPressure | None = None,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self.threads = self.most = max(1, most)
        self._pressure = pressure or ProcPressure()
        self._set_threads = set_threads
        self._looked = time.monotonic()

    def look(self) -> None:
        """Look at the pressure when a window is over, and take more or fewer threads."""
        if self.most == 1 or time.monotonic() - self._looked < WINDOW_S:
            return
        seen = self._pressure.read()
        self._looked = time.monotonic()
        self._take(self.threads if seen is None else choose_threads(self.threads, self.most, seen))

    def close(self) -> None:
        """Give torch back the number it had: it is one number for the whole process."""
        self._take(self.most)

    def _take(self, wanted: int) -> None:
        if wanted != self.threads:
            self.threads = wanted
            self._set_threads(wanted)


def prepare_cpu(threads: int = 0) -> None:
    """Set torch's threads: those asked for, else its own choice, within the container's quota.

    Products go to the BLAS, which keeps to that number. oneDNN's library for ARM takes every core whatever it is told,
    and is no faster (69.7 against 71.4 GFLOP/s at 512 rows, two Neoverse-N1 cores); on x86 torch does not ask it for
    float32 products.
    """
    torch.set_num_threads(limit_threads(threads or torch.get_num_threads()))
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def limit_threads(threads: int, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """At most ``threads``, and no more than a container's quota of CPU time: torch looks at the affinity alone."""
    quota = _read_quota(cgroup)
    return threads if quota is None else max(1, min(threads, math.ceil(quota)))


def _read_quota(cgroup: Path) -> float | None:
    """Cores' worth of CPU time that the control group may use; None for any number."""
    try:
        if (cgroup / "cpu.max").is_file():
            most, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        else:
            most = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return int(most) / int(period) if int(most) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # no control groups, or "max"
        return None
