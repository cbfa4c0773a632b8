"""How many threads the CPU compute uses: fewer while other programs keep cores busy, looked at while it works.

A matrix product is cut to equal parts and ends with the slowest. Where another program keeps a core busy, the part on
that core waits for its turn on it, milliseconds each time, and the other threads wait with it: a decode step of two
threads on one free core takes longer than one of one thread. So the engine looks, a few times a second, how long its
threads were ready to run and did not (`/proc/self/task/*/schedstat`), takes fewer threads where that is much, and tries
all of them again every few seconds. Where the kernel does not tell, the number stays.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

WINDOW_S = 0.25
"""So often the number is looked at."""
HOLD_S = 2.0
"""So long fewer threads are kept before all are tried again: a try that fails costs one window."""
MUCH_WAITING = 0.4
"""In cores. A program of our priority on one core makes our threads wait for half a core or more, one that runs with
less (``nice 5``) for a quarter: beside that one all threads together are still faster."""


def choose_threads(now: int, waiting: float) -> int:
    """Threads that do not wait: ``waiting`` is how many cores our threads were ready for and did not get.

    >>> choose_threads(2, 0.6), choose_threads(8, 3.1), choose_threads(8, 0.2)
    (1, 5, 8)
    """
    return max(1, now - max(1, round(waiting))) if waiting > MUCH_WAITING else now


class ProcWaiting:
    """Tells for how many cores our threads have waited since it was last asked; None where the system does not tell.

    Linux does.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._sample()

    def read(self) -> float | None:
        before, self._last = self._last, self._sample()
        if before is None or self._last is None:
            return None
        return max(0.0, self._last[1] - before[1]) / max(1e-9, self._last[0] - before[0])

    def _sample(self) -> tuple[float, float] | None:
        """The time, and the seconds that the threads of this process have waited for a core."""
        total = 0
        try:
            for task in (self._proc / "self" / "task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                    total += int((task / "schedstat").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):  # no /proc, or one that says less
            return None
        return time.monotonic(), total / 1e9


class ThreadGovernor:
    """Sets torch's threads by how long they wait; called by the engine's thread, between steps."""

    def __init__(
        self,
        most: int,
        waiting: ProcWaiting | None = None,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self.threads = self.most = max(1, most)
        self._waiting = waiting or ProcWaiting()
        self._set_threads = set_threads
        self._looked = self._lowered = time.monotonic()

    def look(self) -> None:
        """When a window is over: take fewer threads where they wait, all of them again when that was long ago."""
        now = time.monotonic()
        if self.most == 1 or now - self._looked < WINDOW_S:
            return
        self._looked = now
        waiting = self._waiting.read()
        if waiting is None:
            return
        if waiting > MUCH_WAITING:
            self._lowered = now
            self._take(choose_threads(self.threads, waiting))
        elif now - self._lowered >= HOLD_S:
            self._take(self.most)

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
