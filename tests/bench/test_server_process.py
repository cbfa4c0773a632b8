"""Servers of benchmarks: they come up or say why not, their CPU time is read, and nothing of them is left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from lib.server_process import PORTS, ServerProcess, find_port, list_group  # noqa: E402

SPIN = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'while True: pass']); p.wait()"


def ask_nobody() -> None:
    raise OSError("nobody listens")


def test_a_server_that_ends_instead_of_answering_is_an_error_with_its_log(tmp_path: Path) -> None:
    server = ServerProcess(
        [sys.executable, "-c", "print('no weights here'); raise SystemExit(3)"], tmp_path / "log.txt"
    )
    with pytest.raises(RuntimeError, match="no weights here"):
        server.wait_until(ask_nobody, 300)
    server.stop()


def test_its_children_are_counted_and_ended_with_it(tmp_path: Path) -> None:
    server = ServerProcess([sys.executable, "-c", SPIN], tmp_path / "log.txt")
    end = time.monotonic() + 300
    while server.read_cpu_ms() < 300 and time.monotonic() < end:
        time.sleep(0.05)
    assert server.read_cpu_ms() >= 300, "the child's time counts"
    assert len(server.list_processes()) == 2
    server.kill()
    while list_group(server.process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert list_group(server.process.pid) == []
    server.stop()


def test_a_benchmark_that_is_terminated_takes_its_server_with_it(tmp_path: Path) -> None:
    code = f"""
import sys, time, pathlib
sys.path.insert(0, {str(BENCH)!r})
from lib.server_process import ServerProcess
log = pathlib.Path({str(tmp_path)!r}) / "log.txt"
server = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], log)
try:
    print(server.process.pid, flush=True)
    while True:
        time.sleep(0.1)  # a signal that comes right before one long sleep would be heard behind it
finally:
    server.kill()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        group = int(bench.stdout.readline())
        bench.terminate()
    assert bench.returncode == 128 + 15
    assert list_group(group) == []


def test_a_port_is_not_one_that_the_kernel_hands_out() -> None:
    assert find_port() in PORTS
