"""Claim: an honest run of `semblend serve` passes the default gates of sembench.

    PYTHONPATH=src:bench python bench/sembench_embedded.py [--items 20] [--keep FILE] [--quick]

The commands of docs/guides/benchmark.md, one after the other, on a server in a process of its own with its default
settings: the fixture, a paired run (cold, warm and rerun of every case in random order, and a second tenant), the
server's own event log, the default gates. Reuse counts where answer, counters and log state it (three channels).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _report import Report, fail, progress  # first: it holds the numeric libraries to one thread
from _server_process import ServerProcess, find_port

from sembench.result import Result, read_result
from sembench.scoring.aggregate import pair_records
from sembench.scoring.statistics import compute_mean

MODEL = "smollm2-135m"
TRANSFORMS = (
    "instruction_variant",
    "leading_evidence_new_task",
    "near_duplicate",
    "swapped_numbers",
    "negative_control",
)
"""The document moved, moved behind a case number, edited, with another number in it, and no donor at all."""


@contextlib.contextmanager
def serving(folder: Path, threads: int) -> Iterator[str]:
    """Run `semblend serve` as a stranger would, with an event log, and give its address."""
    port = find_port()
    command = [sys.executable, "-m", "semblend.cli.main", "serve", "--model", MODEL, "--device", "cpu"]
    server = ServerProcess(
        [*command, "--threads", str(threads), "--port", str(port)],
        folder / "serve.log",
        SEMBLEND_EVENTS=str(folder / "events.jsonl"),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        server.wait_until(lambda: urllib.request.urlopen(f"{url}/health", timeout=5).read())
        yield url
    finally:
        server.stop()


def sembench(*words: object, allowed: tuple[int, ...] = (0,)) -> str:
    """Run a command of sembench and return its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "sembench", *map(str, words)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in allowed:
        fail(f"sembench {words[0]} ended with {done.returncode}", hint="its message is above")
    return done.stdout


def measure(folder: Path, args: argparse.Namespace) -> tuple[Result, dict[str, Any], dict[str, Any]]:
    """Return the result, what the gates said and the summary of the server's events."""
    manifest, output, events = (folder / name for name in ("fixture.jsonl", "result.json", "events.json"))
    transforms = ("--transforms", *args.transforms) if args.transforms else ()
    sembench("build", "--profile", "fixture", "--output", manifest, "--quiet", *transforms)
    with serving(folder, args.threads) as url:
        sembench(
            "run-live-gateway", "--paired", "--manifest", manifest, "--output", output, "--gateway-url", f"{url}/v1",
            "--model", MODEL, "--max-items", args.items, "--recipient-max-tokens", args.max_tokens,
            "--tenant-pairs", 1, "--tenant-salt", "--seed", args.seed, "--quiet",
        )  # fmt: skip
        sembench("summarize-engine-events", "--engine", "semblend", "--input", folder / "events.jsonl",
                 "--output", events)  # fmt: skip
    said = sembench("assert-result-gates", "--result", output, "--engine-summary", events, "--manifest", manifest,
                    "--min-witnesses", 3, allowed=(0, 1))  # fmt: skip
    if args.keep:
        shutil.copyfile(output, args.keep)
    return read_result(output), json.loads(said), json.loads(events.read_text())


def tabulate_transforms(report: Report, result: Result) -> None:
    """A row for each transform: tokens reused, times and answers beside cold and beside cold asked again."""
    rows = []
    pairs = [pair for pair in pair_records(result.requests) if not pair.errored]
    for transform in sorted({pair.cold.transform for pair in pairs}):
        own = [pair for pair in pairs if pair.cold.transform == transform]
        prompt = sum(pair.warm.prompt_tokens or 0 for pair in own)
        exact, reused = (
            sum(value or 0 for value in values)
            for values in ((p.warm.exact_tokens for p in own), (p.warm.backend_confirmed_tokens for p in own))
        )
        speed = [pair.cold.ttft_ms / pair.warm.ttft_ms for pair in own if pair.cold.ttft_ms and pair.warm.ttft_ms]
        f1 = [value for pair in own if (value := pair.warm.cold_f1) is not None]
        rows.append([transform, len(own), prompt, exact, reused, (exact + reused) / prompt if prompt else None,
                     compute_mean(speed), compute_mean(f1)])  # fmt: skip
    columns = ["transform", "cases", "prompt tokens", "exact", "reused", "share", "cold TTFT / warm, mean",
               "F1 against cold"]  # fmt: skip
    report.table(f"Paired run of the fixture on semblend serve, {MODEL}, mode balanced", columns, rows)


def tabulate_gates(report: Report, result: Result, verdict: dict[str, Any], events: dict[str, Any]) -> None:
    observed, aggregate = verdict["observed"], result.aggregate
    others = [record for record in result.requests if record.cross_tenant]
    rows = [
        ["default gates passed", str(verdict["passed"]).lower()],
        ["doubts", ", ".join(map(str, verdict["doubts"])) or "none"],
        ["requests with answers, errors", f"{len(result.requests)}, {aggregate['error_count']}"],
        ["cases with reuse that three channels state", sum(bool(r.backend_confirmed_tokens) for r in result.requests)],
        ["tokens reused by the answers", aggregate["backend_confirmed_tokens"]],
        ["tokens materialized by the server's log", events["materialized_tokens"]],
        ["contradictions between channels", aggregate["contradiction_count"]],
        ["negatives, tokens reused there",
         f"{aggregate['negative_control_count']}, {aggregate['negative_control_backend_confirmed_tokens']}"],
        ["asked as another tenant, tokens leaked",
         f"{len(others)}, {sum(r.backend_confirmed_tokens or 0 for r in others)}"],
        ["TTFT of cold / warm, median, all", observed.get("blended_ttft_speedup_median")],
        ["the same, hits alone", observed.get("hit_only_ttft_speedup_median")],
        ["F1 of reused answers against cold", observed.get("confirmed_cold_f1_mean")],
    ]  # fmt: skip
    report.table("The gates, with three witnesses", ["what", "value"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20, metavar="N", help="cases, every transform in turn")
    parser.add_argument("--transforms", nargs="*", default=TRANSFORMS, help="of the fixture; none named: all fifteen")
    parser.add_argument("--max-tokens", type=int, default=8, metavar="N", help="of an answer (default: 8)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the server (default: 1)")
    parser.add_argument("--keep", default="", metavar="FILE", help="keep the result of sembench here")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="order of arms")
    parser.add_argument("--quick", action="store_true", help="ten cases")
    parser.add_argument("--out", default="bench/results/sembench_embedded.json", help="JSON file; '' writes none")
    args = parser.parse_args()
    args.items = 10 if args.quick else args.items
    report = Report("sembench_embedded", args)
    with tempfile.TemporaryDirectory() as folder:
        result, verdict, events = measure(Path(folder), args)
    progress("default gates: " + ("passed" if verdict["passed"] else "FAILED"))
    tabulate_gates(report, result, verdict, events)
    tabulate_transforms(report, result)
    report.note("times are wall times of a machine that did other work; arms of a case come in random order")
    report.add("gates", verdict)
    report.write(args.out)
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
