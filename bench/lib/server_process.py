"""A server in processes of its own: started, waited for, measured and ended. Its engine's module asks it things."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PORTS = range(16_000, 32_000)
"""Below those that the kernel hands out: an engine binds its port only when its model is loaded, and until then the
kernel would give a port of its own range to anybody."""


class ServerProcess:
    """A process group of its own with everything that the server starts; ``log`` gets what it prints."""

    def __init__(self, command: Sequence[str], log: Path, **variables: str) -> None:
        _leave_in_order()
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("a") as out:
            self.process = subprocess.Popen(
                command, env=os.environ | variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until(self, ask: Callable[[], object], seconds: float = 600) -> None:
        """Until ``ask`` raises nothing; raises with the end of the log if the server ends, or takes too long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                ask()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise RuntimeError("the server did not come up: " + self.log.read_text(errors="replace")[-3000:])

    def list_processes(self) -> list[int]:
        """All living processes of the group."""
        return list_group(self.process.pid)

    def read_cpu_ms(self) -> float:
        """CPU time of all living processes of the group."""
        return read_cpu_ms(self.process.pid)

    def kill(self) -> None:
        """kill -9 of every process of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def stop(self, seconds: float = 30) -> None:
        """Ask it to end, and see that it does."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.kill()


def _leave_in_order() -> None:
    """Let SIGTERM end the benchmark as an exception does: its servers have groups of their own and would live on."""

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    alone = threading.current_thread() is threading.main_thread()
    if alone and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, leave)


def find_port() -> int:
    """A free port of `PORTS`."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def list_group(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
    return found


def read_cpu_ms(group: int) -> float:
    """CPU time of all living processes of a process group, in ms; the kernel counts in hundredths of a second."""
    ticks = 0
    for pid in list_group(group):
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * 1e3 / TICKS
