"""Claim: kill -9 of engines that share a donor directory never makes a neighbour read a wrong byte, and leaves no more
than one budget behind once the next engine has started.

    PYTHONPATH=src:bench python bench/directory_kills.py                # 25 rounds
    PYTHONPATH=src:bench python bench/directory_kills.py --rounds 3

Each round starts two processes that publish donors without pause, two ranks each, and kills both at a random moment
while a third reads everything that it finds and compares it with what was written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread
from _directory_rounds import BUDGET_BYTES, run_rounds
from _report import Report, spread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--folder", default=None, help="where the directory is made (default: /dev/shm, else /tmp)")
    _report.add_common_arguments(parser, "directory_kills")
    args = parser.parse_args()
    report = Report("directory_kills", args)
    parent = args.folder or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    with tempfile.TemporaryDirectory(prefix="donors-", dir=parent) as folder:
        rounds = run_rounds(Path(folder), 2 if args.quick else args.rounds, seed=args.seed)
    wrong = sum(len(one.wrong) for one in rounds)
    report.table(
        "Kills",
        [
            "kills",
            "KV files read",
            "gone while reading",
            "wrong",
            "most bytes after the next start",
            "budget",
            "parts left",
        ],
        [
            [
                2 * len(rounds),
                sum(one.read for one in rounds),
                sum(one.gone for one in rounds),
                wrong,
                max(one.bytes_after for one in rounds),
                BUDGET_BYTES,
                sum(one.left_behind for one in rounds),
            ]
        ],
    )
    report.add("killed_after_s", spread([one.killed_after_s for one in rounds]))
    report.add("problems", {str(one.number): one.wrong for one in rounds if one.wrong})
    report.note("gone while reading: evicted by its owner between the listing and the reading; the reader is told so")
    report.write(args.out)
    over = any(one.bytes_after > BUDGET_BYTES or one.left_behind for one in rounds)
    return 1 if wrong or over else 0


if __name__ == "__main__":
    sys.exit(main())
