"""Where requests go in a real Dynamo: our router and our pin against Dynamo's own KV router and random placement.

    .ci/engines/dynamo python bench/dynamo_placement.py        # 15 minutes for 3 seeds

Four mocker workers of Dynamo stand behind its frontend, started anew for every arm, stream and seed. Eight clients ask,
each its next question as soon as it has its answer. Documents and questions are real; a token is a byte, so a document
of 3,000 bytes is a prompt of 3k tokens. On the stream of equal beginnings every prompt begins with the same instruction
and its document. On the shifted stream one of twelve instructions stands in front.

A mocker reuses equal beginnings only. So cached tokens (as the mockers report them) say what placement saves on stock
engines, and arrivals (a known document reaches a worker that has computed it) what it offers to engines with SemBlend.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

import _report  # first: it holds the numeric libraries to one thread
from _documents import leval, qmsum
from _dynamo_deployment import SEMANTIC, STOCK, DynamoDeployment

WORKERS = 4
CLIENTS = 8
DOCUMENTS = 40
DOCUMENT_BYTES = 3000
BLOCKS = 1500
"""Of a worker's cache: 24k tokens, eight documents. All four together hold 32 of the 40."""
RULE = "You answer questions about a document. Answer in one sentence, and only with what the document says."
ROLES = ("legal", "medical", "financial", "technical", "historical", "scientific", "editorial", "regulatory",
         "commercial", "diplomatic", "journalistic", "educational")  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One way to place requests."""

    name: str
    model: str = STOCK
    frontend_mode: str = "kv"
    through_pin: bool = False


ARMS = (
    Arm("random", frontend_mode="random"),
    Arm("Dynamo's KV router"),
    Arm("our pin over HTTP", through_pin=True),
    Arm("our router on Dynamo's", model=SEMANTIC),
)


@dataclass(frozen=True)
class Outcome:
    """What one arm did with one stream. Shares are in [0, 1]; ``copies`` are workers that computed a document."""

    requests: int
    errors: int
    cached_share: float
    arrived_share: float
    copies: float
    busiest_over_mean: float
    prefill_tokens: int
    reasons: dict[str, int]


def make_asks(data: Path, seed: int, count: int, *, is_shifted: bool) -> list[tuple[int, list[tuple[str, str]]]]:
    """Questions about documents, popular ones more often: the number of the document, and the messages."""
    chance = random.Random(seed)
    known = [one for one in [*qmsum(data), *leval(data)] if len(one.questions) >= 3 and len(one.text) > 6000]
    chosen = chance.sample(known, DOCUMENTS)
    weights = [rank**-0.8 for rank in range(1, DOCUMENTS + 1)]
    asks = []
    for number in chance.choices(range(DOCUMENTS), weights, k=count):
        one = chosen[number]
        role = chance.choice(ROLES)
        shifted = f"You are the {role} assistant. Use {role} language, and name the passage that you rest on. {RULE}"
        text = f"{one.text[:DOCUMENT_BYTES]}\n\nQuestion: {chance.choice(one.questions)}"
        asks.append((number, [("system", shifted if is_shifted else RULE), ("user", text)]))
    return asks


def run_arm(arm: Arm, asks: list[tuple[int, list[tuple[str, str]]]], folder: Path) -> Outcome:
    """Send a stream through one arm of a new deployment."""
    homes: defaultdict[int, set[int]] = defaultdict(set)
    served: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    lock = Lock()
    deployment = DynamoDeployment(
        folder, workers=WORKERS, router=arm.model == SEMANTIC, pin=arm.through_pin, frontend_mode=arm.frontend_mode,
        mocker_flags=("--speedup-ratio", "4"), blocks=BLOCKS,
    )  # fmt: skip
    with deployment:

        def ask(item: tuple[int, list[tuple[str, str]]]) -> None:
            number, messages = item
            with lock:
                before = set(homes[number])  # what was computed before this question was asked
            answer = deployment.ask(messages, arm.model, through_pin=arm.through_pin, answer_tokens=16)
            with lock:
                if answer.worker is None:
                    totals["errors"] += 1
                    return
                totals["prompt"] += answer.prompt_tokens
                totals["cached"] += answer.cached_tokens
                totals["known"] += bool(before)
                totals["arrived"] += answer.worker in before
                homes[number].add(answer.worker)
                served[answer.worker] += 1
                reasons[answer.reason or "dynamo"] += 1

        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(ask, asks))
    return Outcome(
        requests=len(asks),
        errors=totals["errors"],
        cached_share=totals["cached"] / totals["prompt"],
        arrived_share=totals["arrived"] / max(1, totals["known"]),
        copies=statistics.fmean(map(len, (found for found in homes.values() if found))),
        busiest_over_mean=max(served.values()) * WORKERS / sum(served.values()),
        prefill_tokens=totals["prompt"] - totals["cached"],
        reasons=dict(reasons),
    )


def time_decisions(folder: Path) -> list[dict[str, float]]:
    """What a decision takes, in a process that joins a real deployment."""
    with DynamoDeployment(folder, workers=WORKERS, router=False) as deployment:
        script = Path(__file__).with_name("_dynamo_decisions.py")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(script)],
            env=deployment.make_environment(), capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "dynamo_placement")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--only", default="", help="only arms whose name has this in it")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.requests = 1, 40
    data = _report.data_dir(args)
    arms = [arm for arm in ARMS if args.only in arm.name]
    report = _report.Report("dynamo_placement", args)
    rows, kept = [], []
    for stream, is_shifted in (("equal beginnings", False), ("shifted", True)):
        found: defaultdict[str, list[Outcome]] = defaultdict(list)
        for seed in range(args.seed, args.seed + args.seeds):
            asks = make_asks(data, seed, args.requests, is_shifted=is_shifted)
            for arm in arms:
                with tempfile.TemporaryDirectory() as folder:
                    outcome = run_arm(arm, asks, Path(folder))
                found[arm.name].append(outcome)
                kept.append({"stream": stream, "seed": seed, "arm": arm.name, **asdict(outcome)})
                _report.progress(f"{stream}, seed {seed}, {arm.name}: {outcome}")
        rows += [[stream, arm.name, *summarize(found[arm.name])] for arm in arms]
    columns = ["stream", "placed by", "arrived at a home", "copies", "cached", "busiest / mean", "errors"]
    report.table(
        f"Placement in a real Dynamo, {WORKERS} mockers, {args.requests} requests, {CLIENTS} clients", columns, rows
    )
    with tempfile.TemporaryDirectory() as folder:
        times = time_decisions(Path(folder))
    names = ("prompt tokens", "workers", "Dynamo's loads and prefixes, ms", "our evidence, ms", "p95 of ours, ms")
    report.table("Time of a decision, median of 200", names, [[row[name] for name in names] for row in times])
    report.note(
        "cells are means over seeds, smallest to largest behind; cached: tokens that the mockers report as cached"
    )
    report.note("arrived: of requests whose document somebody had computed, those that reached such a worker")
    report.note("mockers compute nothing and reuse equal beginnings only; machine shared with other work")
    report.add("runs", kept)
    report.write(args.out)


def summarize(outcomes: list[Outcome]) -> list[str]:
    """Means and ranges for the table."""

    def show(values: list[float], form: str) -> str:
        return f"{statistics.fmean(values):{form}} ({min(values):{form}}–{max(values):{form}})"

    return [
        show([one.arrived_share for one in outcomes], ".2f"),
        show([one.copies for one in outcomes], ".2f"),
        show([one.cached_share for one in outcomes], ".2f"),
        show([one.busiest_over_mean for one in outcomes], ".2f"),
        str(sum(one.errors for one in outcomes)),
    ]


if __name__ == "__main__":
    main()
