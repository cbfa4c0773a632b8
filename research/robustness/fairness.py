"""Claim: a tenant that asks a hundred times as often as its neighbour slows itself, not the neighbour.

    semblend models pull smollm2-135m
    git clone . ../before && git -C ../before checkout 4a51d2f
    PYTHONPATH=src:bench python bench/fairness.py --before ../before          # continues where it was stopped
    PYTHONPATH=src:bench python bench/fairness.py --quick

Two tenants of a real `semblend serve` send prompts of one length that share nothing. The quiet one sends one at a time,
with a random pause, and asks for one token: its time to first token is measured, alone and beside the loud one. The
loud one sends a hundred times as often, whatever it is answered, from a process of its own. A request that is turned
away counts as turned away; it is not sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _hostile_server import ATTACKER, VICTIM, Server, ask
from _report import REPO, Report, percentile, progress

FILES = 4096
TIMES_AS_OFTEN = 100
LOUD_TOKENS = 8
WORDS = (
    "harbour", "ferry", "ledger", "copper", "winter", "signal", "garden", "engine", "letter", "valley", "river",
    "museum", "captain", "orchard", "bridge", "window", "market", "station", "teacher", "mountain", "paper",
)  # fmt: skip
Row = dict[str, Any]


def write_prompt(seed: object, words: int) -> str:
    chance = random.Random(str(seed))
    return " ".join(chance.choice(WORDS) for _ in range(words))


async def ask_once(port: int, key: str, seed: object, words: int, answer: int, *, stream: bool) -> Row:
    """One request; when it was sent, its status, seconds to the first token and to the end."""
    body = {"prompt": write_prompt(seed, words), "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    sent = time.time()
    heard = await ask(port, "/v1/completions", json.dumps(body | {"stream": stream}).encode(), key, patience_s=300)
    broken = heard.status == 200 and '"error"' in heard.text[-400:]
    return {"sent": sent, "status": 0 if broken else heard.status, "first_s": heard.first_s, "total_s": heard.total_s}


async def be_quiet(
    port: int, chance: random.Random, words: int, count: int, seconds: float, pause_s: float
) -> list[Row]:
    """Ask one at a time until there are enough answers or the time is over."""
    rows: list[Row] = []
    until = time.monotonic() + seconds
    while len(rows) < count and time.monotonic() < until:
        rows.append(await ask_once(port, VICTIM, chance.random(), words, 1, stream=True))
        await asyncio.sleep(chance.uniform(0, 2 * pause_s))
    return rows


async def be_loud(port: int, rate: float, words: int, seconds: float) -> list[Row]:
    """Send so many requests a second, whatever becomes of them; at the end those that are under way are dropped."""
    tasks: list[asyncio.Task[Row]] = []
    started, chance = time.monotonic(), random.Random()
    while (at := time.monotonic() - started) < seconds:
        while len(tasks) < at * rate:
            one = ask_once(port, ATTACKER, chance.random(), words, LOUD_TOKENS, stream=False)
            tasks.append(asyncio.create_task(one))
        await asyncio.sleep(0.005)
    rows = [task.result() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rows


class Loud:
    """The loud tenant in a process of its own, for the length of a block."""

    def __init__(self, port: int, rate: float, words: int, seconds: float) -> None:
        job = json.dumps({"port": port, "rate": rate, "words": words, "seconds": seconds})
        self._process = subprocess.Popen([sys.executable, __file__, "--loud", job], stdout=subprocess.PIPE, text=True)

    def read(self) -> list[Row]:
        rows: list[Row] = json.loads(self._process.communicate()[0] or "[]")
        return rows


def measure(checkout: Path, phase: str, args: argparse.Namespace, missing: int, seed: str) -> Row:
    """One server, one phase: ``alone``, ``loud`` (nobody else), ``beside`` (both) or ``chunk`` (a prompt of a step)."""
    chance = random.Random(seed)
    flags = ("--step-tokens", args.step_tokens, "--max-running", args.places, "--max-waiting", 8 * args.places)
    with Server(checkout, args.model, FILES, *map(str, flags), threads=1) as server:
        asyncio.run(be_quiet(server.port, random.Random(0), args.words, 3, 60, 0))  # the first ones warm it up
        if phase == "chunk":
            return {"quiet": asyncio.run(be_quiet(server.port, chance, args.step_tokens, missing, 120, 0))}
        if phase == "alone":
            return {
                "quiet": asyncio.run(be_quiet(server.port, chance, args.words, missing, args.seconds, args.pause_s))
            }
        seconds = args.seconds if phase == "beside" else min(60.0, args.seconds)
        loud = Loud(server.port, args.rate, args.words, seconds + args.lead_s)
        time.sleep(args.lead_s)  # its line is full when the first quiet one comes
        began = time.time()
        quiet: list[Row] = []
        if phase == "beside":
            quiet = asyncio.run(be_quiet(server.port, chance, args.words, missing, seconds - 5, args.pause_s))
        rows = loud.read()
        return {"quiet": quiet, "loud": rows, "began": began, "ended": began + seconds}


# -- rows on disk: what was measured is not measured again -------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def collect(args: argparse.Namespace, checkouts: dict[str, Path], path: Path) -> list[Row]:
    """All measurements, those of earlier runs first; runs what is missing, one server at a time."""
    rows, began = read_rows(path), time.monotonic()
    wanted = {"chunk": args.chunks, "alone": args.count, "beside": args.count, "loud": 1}
    for arm, checkout in checkouts.items():
        for phase, count in wanted.items():
            while True:
                done = [row for row in rows if (row["arm"], row["phase"]) == (arm, phase)]
                missing = count - sum(len(row["quiet"]) for row in done) if phase != "loud" else count - len(done)
                # A server that makes everybody wait is not waited for: what it did in its rounds is the result.
                if missing <= 0 or len(done) >= args.rounds:
                    break
                progress(f"{arm}: {phase}, {missing} to go")
                rows.append(
                    {"arm": arm, "phase": phase} | measure(checkout, phase, args, missing, f"{arm}{phase}{len(done)}")
                )
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                if args.stop_after_s and time.monotonic() - began > args.stop_after_s:
                    raise SystemExit(0)
    return rows


# -- what they say -----------------------------------------------------------------------------------------------------


def bootstrap(samples: Sequence[float], percent: float, seed: int) -> tuple[float, float]:
    """A 95 % interval of a percentile, by drawing the samples again."""
    chance, n = random.Random(seed), len(samples)
    drawn = sorted(percentile(sorted(chance.choices(samples, k=n)), percent) for _ in range(2000))
    return percentile(drawn, 2.5), percentile(drawn, 97.5)


def read_first_s(rows: Sequence[Row], arm: str, phase: str) -> tuple[list[float], int, int]:
    """Seconds to the first token, how many were turned away, and how many were asked."""
    asked = [one for row in rows if (row["arm"], row["phase"]) == (arm, phase) for one in row["quiet"]]
    served = [one["first_s"] for one in asked if one["status"] == 200]
    return served, sum(one["status"] == 429 for one in asked), len(asked)


def tell_quiet(report: Report, rows: Sequence[Row], arms: Sequence[str], seed: int) -> None:
    table = []
    for arm in arms:
        chunks = sorted(read_first_s(rows, arm, "chunk")[0])
        chunk = percentile(chunks, 50) if chunks else None
        bound = None
        for phase in ("alone", "beside"):
            served, refused, asked = read_first_s(rows, arm, phase)
            if not served:
                table.append([arm, phase, asked, refused, None, None, "", None])
                continue
            low, high = bootstrap(served, 99, seed)
            p99 = percentile(sorted(served), 99)
            bound = 2 * p99 + chunk if phase == "alone" and chunk else bound
            ms = [round(1e3 * percentile(sorted(served), 50)), round(1e3 * p99)]
            shown = round(1e3 * bound) if bound and phase == "beside" else None
            table.append([arm, phase, asked, refused, *ms, f"{1e3 * low:.0f} to {1e3 * high:.0f}", shown])
        if chunk:
            report.note(
                f"{arm}: one prefill chunk takes {1e3 * chunk:.0f} ms (median TTFT of a prompt of one step, alone)"
            )
    columns = ["server", "quiet tenant", "n", "turned away", "median TTFT ms", "p99 ms", "95 % interval", "goal ms"]
    report.table("The quiet tenant", columns, table)


def tell_loud(report: Report, rows: Sequence[Row], arms: Sequence[str], prompt_tokens: int) -> None:
    table = []
    for arm in arms:
        for phase in ("loud", "beside"):
            runs = [row for row in rows if (row["arm"], row["phase"]) == (arm, phase)]
            if not runs:
                continue
            loud = [one for row in runs for one in row["loud"]]
            seconds = sum(row["ended"] - row["began"] for row in runs)
            ends = [(one, row) for row in runs for one in row["loud"] if one["status"] == 200]
            counted = sum(row["began"] <= one["sent"] + one["total_s"] <= row["ended"] for one, row in ends)
            quiet = sum(one["status"] == 200 for row in runs for one in row["quiet"])
            tokens = counted * (prompt_tokens + LOUD_TOKENS) + quiet * (prompt_tokens + 1)
            refused = sum(one["status"] == 429 for one in loud)
            total = sorted(one["total_s"] for one, _ in ends)
            middle = round(percentile(total, 50), 1) if total else None
            sent = {"loud": len(loud), "quiet": sum(len(row["quiet"]) for row in runs)}
            ratio = round(sent["loud"] / sent["quiet"]) if sent["quiet"] else None
            table.append(
                [arm, phase == "beside", sent["loud"], ratio, refused, counted, middle, round(tokens / seconds, 1)]
            )
    columns = [
        "server",
        "quiet one too",
        "sent",
        "times as many",
        "turned away",
        "answered",
        "median s",
        "tokens/s of both",
    ]
    report.table("The loud tenant", columns, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "fairness")
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model, a folder or a GGUF file")
    parser.add_argument("--before", type=Path, default=None, help="another checkout to measure as well")
    parser.add_argument("--count", type=int, default=200, help="requests of the quiet tenant in each phase")
    parser.add_argument("--chunks", type=int, default=20, help="prompts of one step's length")
    parser.add_argument("--seconds", type=float, default=200.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=4, help="most rounds of a phase")
    parser.add_argument("--stop-after-s", type=float, default=0.0, help="begin no round later; run again to go on")
    parser.add_argument("--words", type=int, default=64, help="words of a prompt")
    parser.add_argument("--step-tokens", type=int, default=128, help="tokens of a step of the server")
    parser.add_argument("--places", type=int, default=8, help="requests that run at once; eight times as many wait")
    parser.add_argument("--pause-s", type=float, default=0.1, help="mean pause of the quiet tenant")
    parser.add_argument("--lead-s", type=float, default=8.0, help="seconds that the loud tenant is there before")
    parser.add_argument("--print-only", action="store_true", help="measure nothing: print the rows of earlier runs")
    parser.add_argument("--first", action="store_true", help="before other programs on this machine: nice -20 (root)")
    parser.add_argument("--note", action="append", default=[], help="a sentence about the circumstances")
    parser.add_argument("--loud", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loud:
        print(json.dumps(asyncio.run(be_loud(**json.loads(args.loud)))))
        return
    if args.first:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    if args.quick:
        args.count, args.chunks, args.seconds, args.rounds = 4, 2, 25.0, 1
    args.rate = TIMES_AS_OFTEN / (args.pause_s + 1.0)
    checkouts = ({"before": args.before} if args.before else {}) | {"after": REPO}
    raw = Path(args.out or "fairness.json").with_suffix(".rows.jsonl")
    if args.quick:
        raw = raw.with_name("fairness_quick.rows.jsonl")
        raw.unlink(missing_ok=True)
    report = Report("fairness", args)
    rows = read_rows(raw) if args.print_only else collect(args, checkouts, raw)
    tell_quiet(report, rows, list(checkouts), args.seed)
    tell_loud(report, rows, list(checkouts), args.words)
    for note in args.note:
        report.note(note)
    report.note("goal: 2 × p99 alone and one prefill chunk; a request that was turned away has no TTFT")
    if not args.quick:
        report.write(args.out)


if __name__ == "__main__":
    main()
