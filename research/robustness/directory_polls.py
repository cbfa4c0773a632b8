"""Claim: a donor directory with thousands of donors costs the scheduler's thread next to nothing between two steps.

    PYTHONPATH=src:bench python bench/directory_polls.py

For each number of donors, milliseconds of CPU time of the calling thread: a poll while nothing changes, a poll after a
neighbour has published one donor, a look for what the dead left (once in five seconds), and an eviction in a full
budget. Beside them a listing that reads all names, which a scheduler's thread does once, when the engine starts.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _report import Report

from semblend import Namespace, Prompt
from semblend.materialize.donors.shared.directory_listing import DirectoryListing
from semblend.materialize.donors.shared.directory_watch import DirectoryWatch
from semblend.materialize.donors.shared.directory_writer import DirectoryWriter
from semblend.materialize.donors.shared.private_folder import PrivateFolder

ENGINE = Namespace(model="m")
KV_BYTES = 64


def publish(folder: PrivateFolder, writer: DirectoryWriter, number: int) -> None:
    prompt = Prompt(range(number, number + 64), namespace=Namespace(model="m", tenant=f"t{number % 20}"))
    record = writer.publish(prompt, f"r{number}", KV_BYTES)
    if record is None:
        raise SystemExit("a donor does not fit")
    folder.write(f"{record.key}.0of1.kv", lambda out: out.write(b"x" * KV_BYTES))


def take_ms(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    call()
    return (time.thread_time() - begun) * 1e3


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def measure(path: Path, donors: int, repeats: int) -> list[object]:
    """One row: medians of the calling thread's milliseconds."""
    folder, clock = PrivateFolder(path), Clock()
    neighbour = DirectoryWriter(folder, 1 << 40)
    for number in range(donors):
        publish(folder, neighbour, number)
    whole = statistics.median(take_ms(DirectoryListing(folder).refresh) for _ in range(repeats))
    listing = DirectoryListing(folder)
    owner = DirectoryWriter(folder, 1 << 40, listing=listing, clock=clock)
    watch = DirectoryWatch(folder, ENGINE, listing=listing, at_once=1 << 20)
    listing.start(0.02)
    watch.poll()
    time.sleep(0.3)
    watch.poll()
    still = statistics.median(take_ms(watch.poll) for _ in range(100))
    came, looked = [], []
    for number in range(repeats):
        publish(folder, neighbour, donors + number)
        time.sleep(0.3)  # the thread has listed it
        came.append(take_ms(watch.poll))
        clock.now += 10
        looked.append(take_ms(owner.look_over))
    neighbour.look_over()
    neighbour.budget_bytes = neighbour.used_bytes
    evicted = [take_ms(lambda n=number: publish(folder, neighbour, 10 * donors + n)) for number in range(repeats)]
    listing.close()
    for writer in (owner, neighbour):
        writer.close()
    folder.close()
    return [donors, whole, still, statistics.median(came), statistics.median(looked), max(evicted)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "directory_polls")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    report = Report("directory_polls", args)
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    rows = []
    for donors in (100, 500) if args.quick else (100, 1000, 5000):
        with tempfile.TemporaryDirectory(prefix="polls-", dir=parent) as folder:
            rows.append(measure(Path(folder) / "donors", donors, 3 if args.quick else args.repeats))
    columns = ["donors", "whole listing, at start", "poll, nothing new", "poll, one came", "look for the dead"]
    columns.append("worst eviction")
    report.table("CPU milliseconds of the scheduler's thread", columns, rows)
    report.note(f"medians of {args.repeats}, but the largest for evictions; a thread lists the folder meanwhile")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
