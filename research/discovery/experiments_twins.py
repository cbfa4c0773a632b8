"""What do the compiled kernels and the store file each cost or save? The same calls with and without.

python bench/experiments_twins.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread
import numpy as np

from semblend import Prompt, SemBlend, SemBlendConfig

LENGTH, DONORS, REPEAT = 8192, 200, 50


def median_ms(call: Callable[[int], object], repeat: int = REPEAT) -> tuple[float, float]:
    """Wall and CPU milliseconds of one call."""
    walls, cpus = [], []
    for i in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        call(i)
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    return statistics.median(walls), statistics.median(cpus)


def measure(name: str, *, compiled: bool, store: str) -> list[list[object]]:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 150_000, LENGTH) for _ in range(DONORS)]
    config = SemBlendConfig(embedder="none", metrics=False, store=store)
    with SemBlend(config, compiled=compiled) as sb:
        sb.warm_up()
        add = median_ms(lambda i: sb.register(Prompt(documents[i]), donor_id=str(i)), DONORS)
        hits = [Prompt(np.concatenate([rng.integers(0, 150_000, 40), documents[i]])) for i in range(REPEAT)]
        misses = [Prompt(rng.integers(0, 150_000, LENGTH)) for _ in range(REPEAT)]
        hit = median_ms(lambda i: sb.lookup(hits[i]))
        miss = median_ms(lambda i: sb.lookup(misses[i]))
    return [[name, what, *times] for what, times in (("register", add), ("lookup, hit", hit), ("lookup, miss", miss))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "experiments_twins")
    args = parser.parse_args()
    report = _report.Report("experiments_twins", args)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            *measure("compiled", compiled=True, store=""),
            *measure("compiled, store file", compiled=True, store=str(Path(folder) / "donors.semblend")),
            *measure("plain numpy", compiled=False, store=""),
        ]
    columns = ["way", "call", "median ms", "median CPU ms"]
    report.table(f"{DONORS} donors and prompts of {LENGTH:,} random tokens", columns, rows)
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
