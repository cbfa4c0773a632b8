"""What every adapter does: read the cases, register the donors, answer the queries, write spans and CPU times.

Each system runs in a process of its own, with the Python that it was installed for, on one thread. Both the donors
and the queries are handed over as lists of integers, because that is what a serving engine has. Only the call itself
is timed (CPU time of the process); turning an answer into spans is not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

RawSpan = tuple[str, int, int, int]
REPEATS = 3
SLOW_MS = 300.0


class LookupTimeoutError(BaseException):
    """Not an `Exception`: a system that swallows every exception must not swallow its own time limit."""


class System(Protocol):
    def register(self, donor_id: str, ids: list[int]) -> None: ...

    def lookup(self, ids: list[int]) -> Any:
        """The timed part: whatever the system answers."""

    def spans(self, answer: Any) -> list[RawSpan]:
        """The answer as (donor id, start in the donor, start in the query, length)."""


@dataclass
class Cases:
    """What the benchmark wrote: ids and tokens, and for each query the donors that it was made from.

    ``asking`` is the query at hand, for a stand-in that must know it; ``args`` are the adapter's own flags.
    """

    donors: list[tuple[str, list[int]]]
    queries: list[tuple[str, list[int]]]
    gold: dict[str, list[str]]
    args: argparse.Namespace
    asking: str = ""


def serve(make: Callable[[Cases], System], **extra_flags: Any) -> None:
    """The main of every adapter. A system that can't be loaded is an answer too: its reason is written down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--budget-s", type=float, default=300.0, help="CPU seconds for all lookups together")
    parser.add_argument("--limit-s", type=float, default=20.0, help="seconds of wall time for one lookup")
    for flag, default in extra_flags.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", default=default, type=type(default))
    args = parser.parse_args()
    cases = read_cases(Path(args.cases), args)
    try:
        system = make(cases)
    except (ImportError, AttributeError) as error:
        result: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
    else:
        signal.signal(signal.SIGALRM, raise_timeout)
        result = measure(system, cases, args.budget_s, args.limit_s)
    Path(args.out).write_text(json.dumps(result), encoding="utf-8")


def measure(system: System, cases: Cases, budget_s: float, limit_s: float) -> dict[str, Any]:
    before = resident_mib()
    register_ms = [timed(system.register, donor_id, ids)[0] for donor_id, ids in cases.donors]
    memory_mib = resident_mib() - before
    shortest = min((ids for _, ids in cases.queries), key=len)
    timed_within(limit_s, system.lookup, shortest)  # compiles and loads lazily: not a lookup's own cost
    answers = []
    started = time.process_time()
    for query_id, ids in cases.queries:
        if time.process_time() - started > budget_s:
            break
        cases.asking = query_id
        times, answer = [], None
        while len(times) < REPEATS and (not times or times[0] < SLOW_MS):
            cpu_ms, answer = timed_within(limit_s, system.lookup, ids)
            times.append(cpu_ms)
        median = sorted(times)[len(times) // 2]
        spans = [] if answer is TIMED_OUT else system.spans(answer)
        answers.append({"query_id": query_id, "cpu_ms": median, "spans": spans, "timed_out": answer is TIMED_OUT})
    return {"answers": answers, "register_ms": register_ms, "memory_mib": memory_mib}


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.process_time_ns()
    answer = call(*arguments)
    return (time.process_time_ns() - start) / 1e6, answer


def resident_mib() -> float:
    """Memory that this process holds now; what the donors add to it is what they cost."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


TIMED_OUT = object()


def timed_within(limit_s: float, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """As `timed`, but after ``limit_s`` seconds the call ends with `TIMED_OUT`.

    By wall time, because an armed timer of CPU time makes the kernel count that time in ticks of 4 ms.
    """
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    start = time.process_time_ns()
    try:
        answer = call(*arguments)
    except LookupTimeoutError:
        answer = TIMED_OUT
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return (time.process_time_ns() - start) / 1e6, answer


def raise_timeout(_signal: int, _frame: Any) -> None:
    raise LookupTimeoutError


def read_cases(path: Path, args: argparse.Namespace) -> Cases:
    arrays = np.load(path, allow_pickle=False)
    names = json.loads(str(arrays["names"]))
    ends = arrays["ends"].tolist()
    prompts = [arrays["tokens"][start:end].tolist() for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    count = len(names["donors"])
    return Cases(
        list(zip(names["donors"], prompts[:count], strict=True)),
        list(zip(names["queries"], prompts[count:], strict=True)),
        names["gold"],
        args,
    )


def runs(pairs: list[tuple[int, str, int]]) -> list[RawSpan]:
    """Single tokens (position in the query, donor, position in the donor) joined into spans."""
    found: list[list[Any]] = []
    for target, donor_id, donor in sorted(pairs):
        last = found[-1] if found else None
        if last and last[0] == donor_id and last[1] + last[3] == donor and last[2] + last[3] == target:
            last[3] += 1
        else:
            found.append([donor_id, donor, target, 1])
    return [(donor_id, donor, target, length) for donor_id, donor, target, length in found]
