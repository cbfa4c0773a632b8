"""Claim: kill -9 and SIGTERM under load leave nothing half-served and nothing on disk, and the next start works.

    semblend models pull smollm2-135m
    PYTHONPATH=src:bench python bench/kills.py                # 25 of each
    PYTHONPATH=src:bench python bench/kills.py --rounds 3

Each round is a real `semblend serve` with four clients, most of them streaming, and a signal at a random moment; all
rounds share one store of donors and one folder for donor KV.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread
from _kill_rounds import Round, run_round
from _report import Report, progress

WAYS = ("SIGTERM", "kill -9")


def run_rounds(folder: Path, count: int, *, model: str, seed: int) -> list[Round]:
    """``count`` rounds of each way, in a random order, one after the other in one folder."""
    chance = random.Random(seed)
    order = [way for way in WAYS for _ in range(count)]
    chance.shuffle(order)
    rounds: list[Round] = []
    least = 0
    for number, way in enumerate(order, 1):
        done = run_round(folder, number, way, model=model, seed=chance.randrange(1 << 30), least_donors=least)
        least = done.donors_at_start + done.ends["whole"]  # each answer left its prompt as a donor
        progress(f"round {number} of {len(order)}, {way}: {dict(done.ends)} {'; '.join(done.problems) or 'right'}")
        rounds.append(done)
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="of each way (default: 25)")
    parser.add_argument("--model", default="smollm2-135m")
    _report.add_common_arguments(parser, "kills")
    args = parser.parse_args()
    report = Report("kills", args)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        rounds = run_rounds(Path(folder), 2 if args.quick else args.rounds, model=args.model, seed=args.seed)
    rows = []
    for way in WAYS:
        ours = [one for one in rounds if one.how == way]
        ends: Counter[str] = sum((one.ends for one in ours), Counter())
        rows.append(
            [
                way,
                len(ours),
                *(ends[end] for end in ("whole", "told", "cut", "nothing", "wrong")),
                max(one.ended_s for one in ours),
                sum(bool(one.left_on_disk) for one in ours),
                sum(bool(one.problems) for one in ours),
            ]
        )
    columns = ["signal", "rounds", "whole", "error told", "cut", "no byte", "looks whole and is not"]
    report.table(
        "Requests by how they ended", [*columns, "longest end (s)", "left on disk", "rounds with a problem"], rows
    )
    report.note("whole: all 24 tokens and a proper end; error told: an error status, or an error event and [DONE]")
    report.note("cut: the connection broke, and the client can see it; no byte: it was not accepted any more")
    report.note("left on disk after kill -9: donor KV and the store's log, removed or used by the next start")
    report.note(f"donors in the store at the last start: {rounds[-1].donors_at_start}")
    report.add("problems", {str(one.number): one.problems for one in rounds if one.problems})
    report.write(args.out)
    return 1 if any(one.problems for one in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
