"""What the vLLM benchmarks share: their flags, rows that survive a crash, and one process for each engine.

vLLM keeps one engine a process. So a script starts itself again with ``--engine KIND`` for each kind that it compares;
that process appends rows to ``--rows``, and skips those that are there already. The first process makes the tables.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lib.reporting as reporting

QUICK = {"shape": "tiny", "dtype": "float32", "eager": True, "memory": 0.06, "donor_bytes": 4e8, "step_tokens": 512}
"""An engine for two cores: it shows that a script works, and measures nothing."""


class Rows:
    """The rows of one file, in the order in which they were measured."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        lines = reporting.read_lines(self.path)
        self.rows: list[dict[str, Any]] = [row for line in lines if (row := _read_line(line)) is not None]

    def find(self, **fields: Any) -> list[dict[str, Any]]:
        """Those with these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in fields.items())]

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; it is on disk when this returns."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size and (file.seek(size - 1), file.read(1))[1] != b"\n":  # a killed run has left half a line
                file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")


def _read_line(line: str) -> dict[str, Any] | None:
    """The row of a line; None for one that a killed run has left unfinished."""
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found


def add_engine_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The flags of every script that runs vLLM."""
    reporting.add_common_arguments(parser, name)
    parser.add_argument("--rows", default=f"bench/results/{name}.rows.jsonl", help="a second run goes on from them")
    parser.add_argument("--finished-only", action="store_true", help="measure nothing, print the rows")
    parser.add_argument("--measured-on", default="", help="the machine, where tables are printed on another")
    parser.add_argument("--measured-at", default="", help="the day of the rows, where tables are printed later")
    parser.add_argument("--note", action="append", default=[], help="what a reader must know about these rows")
    parser.add_argument("--budget-s", type=float, default=0.0, help="an engine begins nothing after this; 0: no limit")
    parser.add_argument("--engine", default="", help="run this engine only, in this process")
    parser.add_argument("--shape", default="qwen2.5-7b", help="an architecture, with random weights")
    parser.add_argument("--model", default="", help="a Hugging Face folder, in place of a shape")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--memory", type=float, default=0.55, help="share of the device's memory that vLLM takes")
    parser.add_argument("--kv-bytes", type=float, default=0, help="of vLLM's KV cache; several can start at once then")
    parser.add_argument("--turn", default="", help="a file: engines start side by side, and measure one by one")
    parser.add_argument("--donor-bytes", type=float, default=3e10)
    parser.add_argument("--step-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / f"semblend-{name}"))


def read_arguments(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """The arguments; with ``--quick`` a small engine, and ``quick`` over the script's own defaults."""
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK | quick)
    return parser.parse_args()


def make_task(args: argparse.Namespace, longest: int, **more: Any) -> dict[str, Any]:
    """What `_vllm_engine.Engine` is made from; ``longest`` is the longest prompt in tokens."""
    names = ("shape", "model", "dtype", "eager", "memory", "donor_bytes", "step_tokens", "folder", "seed", "kv_bytes")
    return {name: getattr(args, name) for name in names} | {"lengths": [longest], **more}


def run_engines(kinds: list[str], turn: str = "") -> int:
    """Run this script once for each kind, one after the other or, with a ``turn``, at once; how many failed."""
    begun, failed = time.perf_counter(), 0
    running = {}
    for kind in kinds:
        running[kind] = subprocess.Popen([sys.executable, *sys.argv, "--engine", kind])
        if not turn:
            running[kind].wait()
    for kind, process in running.items():
        code = process.wait()
        reporting.progress(f"{kind}: exit {code} after {time.perf_counter() - begun:.0f} s")
        failed += code != 0
    return failed


@contextmanager
def take_turn(turn: str) -> Iterator[None]:
    """Alone among those that name this file. ``TURN.PID.ready`` says that an engine has started and waits."""
    if not turn:
        yield
        return
    Path(f"{turn}.{os.getpid()}.ready").touch()
    with Path(turn).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Budget:
    """Says when an engine begins nothing more."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds if seconds else float("inf")

    @property
    def is_used_up(self) -> bool:
        return time.perf_counter() > self._end


def write_report(report: reporting.Report, args: argparse.Namespace, *notes: str) -> None:
    """Notes of the script and of the caller, then the file."""
    for note in (*notes, *args.note):
        report.note(note)
    report.write(args.out)
