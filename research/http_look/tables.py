"""Tables of `http_look.py`: what each arm takes over HTTP, where a hit's time goes, and what stalls a miss.

python research/http_look/tables.py ROWS.jsonl TRACE-OURS.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (2048, 8192, 24576)


def read_lines(path: str) -> list[Any]:
    lines = (gzip.open(path, "rt") if path.endswith(".gz") else Path(path).open()).readlines()
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # two threads wrote at once
            continue
    return found


def show_arms(rows: list[dict[str, Any]]) -> None:
    arms = [row for row in rows if row["phase"] == "arms"]
    for length in LENGTHS:
        some = [row for row in arms if row["length"] == length]
        print(f"\n{length} tokens, n = {len(some)}: p50 / mean / p90 / max in ms")
        for arm in some[0]["arms"]:
            times = np.array([row["arms"][arm]["ttft_ms"] for row in some])
            print(
                f"  {arm:22} {np.median(times):6.1f} {times.mean():6.1f} {np.percentile(times, 90):6.1f} {times.max():6.1f}"
            )


class Trace:
    def __init__(self, lines: list[Any]) -> None:
        self.lines = sorted((line for line in lines if line[0] != "profile"), key=lambda line: line[1])
        self.starts = [line[1] for line in self.lines]

    def within(self, begin: float, end: float) -> list[Any]:
        return self.lines[bisect_left(self.starts, begin) : bisect_right(self.starts, end)]


def first(lines: list[Any], name: str) -> Any | None:
    return next((line for line in lines if line[0] == name), None)


def show_steps(rows: list[dict[str, Any]], trace: Trace, arm: str, length: int) -> None:
    found: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds * 1e3)

    for row in rows:
        if row["phase"] != "arms" or row["length"] != length:
            continue
        one = row["arms"][arm]
        begin, end = one["began"], one["began"] + one["ttft_ms"] / 1e3
        lines = trace.within(begin, end)
        asked, added = first(lines, "AsyncLLM.generate"), first(lines, "EngineCore.add_request")
        scheduled = next((line for line in lines if line[0] == "Scheduler.schedule" and line[3]), None)
        if asked is None or added is None or scheduled is None:
            continue
        add("1 request read by the API server", asked[1] - begin)
        add("2 to the engine's process", added[1] - asked[1])
        load = max((line for line in lines if line[0] == "WorkerHalf.load"), key=lambda line: line[2] - line[1])
        if load[2] - load[1] > 2e-3:
            add("3 lookup and claim, in a scheduler step", load[1] - added[1])
            add("4 the load: copy, pass, canary, verdict", load[2] - load[1])
            add("5 verdict to the scheduler, two empty steps", scheduled[1] - load[2])
            for name in (
                "splice",
                "PassRunner._measure_canary",
                "WorkerHalf._have_weights_changed",
                "SchedulerHalf.count_matched",
            ):
                if (part := first(lines, name)) is not None:
                    add(f"   of these: {name} (CPU)", part[2] - part[1])
        else:
            add("3 waits for its first step", scheduled[1] - added[1])
        add("6 the step that answers, to the API server", asked[2] - scheduled[1])
        add(
            "   of these: OutputProcessor.process_outputs",
            sum(x[2] - x[1] for x in lines if x[0].startswith("OutputProc")),
        )
        add("7 answer to the client", end - asked[2])
        add("sum", end - begin)
    print(f"\n{arm} at {length} tokens, n = {len(found['sum'])}: median ms")
    for name in sorted(found, key=lambda name: (name == "sum", name.startswith("   "), name)):
        print(f"  {name:48} {np.median(found[name]):6.2f}")


def show_stalls(rows: list[dict[str, Any]], trace: Trace) -> None:
    print("\ncaptures that allocated memory beside the arena, against those that did not")
    for length in LENGTHS:
        times = {True: [], False: []}
        for row in rows:
            if row["phase"] == "arms" and row["length"] == length:
                one = row["arms"]["ours:miss"]
                lines = trace.within(one["began"], one["began"] + one["ttft_ms"] / 1e3)
                made = max((x[2] - x[1] for x in lines if x[0] == "DonorMemory._allocate"), default=0.0)
                times[made > 5e-3].append((one["ttft_ms"], made * 1e3))
        for stalled, some in times.items():
            if some:
                ttft, made = np.array(some).T
                print(f"  {length:6} {'allocated' if stalled else 'in the arena':13} n = {len(some):3}  TTFT p50 {np.median(ttft):6.1f}"
                      f"  allocation p50 {np.median(made):6.1f} max {made.max():6.1f} ms")  # fmt: skip


def main(rows_path: str, trace_path: str) -> None:
    rows, trace = read_lines(rows_path), Trace(read_lines(trace_path))
    show_arms(rows)
    for arm in ("ours:exact_question", "ours:fast", "ours:balanced"):
        show_steps(rows, trace, arm, 8192)
    show_steps(rows, trace, "ours:fast", 24576)
    show_stalls(rows, trace)


if __name__ == "__main__":
    main(*sys.argv[1:])
