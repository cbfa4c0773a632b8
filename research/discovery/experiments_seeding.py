"""Which k-grams should stand for a prompt? Three ways of choosing, the same k, the same promise or none.

    python bench/experiments_seeding.py [--donors 1000]

A seed is kept for donors and looked up for prompts. Found: of planted runs of exactly 32 tokens at random places, the
share in which some looked-up seed of the prompt is a kept seed of the donor at the same place of the run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import _report  # first: it holds the numeric libraries to one thread
import numpy as np

from semblend.discover.flat_index import FlatIndex
from semblend.fingerprint import kernels
from semblend.fingerprint.hashes import DEFAULT_SCHEME, HashArray, PositionArray, hash_kgrams
from semblend.prompt import as_token_array

LENGTH, RUN, STRIDE, VOCABULARY, TRIALS = 8192, 32, DEFAULT_SCHEME.window, 150_000, 500
KEY = np.uint64(0)
Seeds = tuple[PositionArray, HashArray]


def every(step: int) -> Callable[[np.ndarray], Seeds]:
    def chosen(tokens: np.ndarray) -> Seeds:
        hashes = hash_kgrams(tokens, DEFAULT_SCHEME)
        at = np.arange(0, len(hashes), step)
        return at, hashes[at]

    return chosen


def minimizers(tokens: np.ndarray) -> Seeds:
    return kernels.select_minimizers(tokens, DEFAULT_SCHEME)


WAYS = {
    "every 17th kept, every 17th asked": (every(STRIDE), every(STRIDE)),
    "every 17th kept, all asked": (every(STRIDE), every(1)),
    "minimizers kept and asked": (minimizers, minimizers),
}


def found(keep: Callable, ask: Callable, rng: np.random.Generator) -> float:
    hits = 0
    for _ in range(TRIALS):
        donor, prompt = (as_token_array(rng.integers(0, VOCABULARY, 400)).copy() for _ in range(2))
        d, p = rng.integers(0, 400 - RUN, 2)
        prompt[p : p + RUN] = donor[d : d + RUN]
        kept = {int(at) - d for at in keep(donor)[0] if d <= at <= d + RUN - DEFAULT_SCHEME.k}
        hits += any(int(at) - p in kept for at in ask(prompt)[0] if p <= at <= p + RUN - DEFAULT_SCHEME.k)
    return hits / TRIALS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "experiments_seeding")
    parser.add_argument("--donors", type=int, default=1000)
    args = parser.parse_args()
    report, rows = _report.Report("experiments_seeding", args), []
    for name, (keep, ask) in WAYS.items():
        rng = np.random.default_rng(args.seed)
        index, kept = FlatIndex(args.donors * LENGTH), 0
        for slot in range(args.donors):
            kept += index.add(slot, *keep(as_token_array(rng.integers(0, VOCABULARY, LENGTH))), KEY)
        asked = [ask(as_token_array(rng.integers(0, VOCABULARY, LENGTH)))[1] for _ in range(50)]
        index.probe(asked[0], KEY)
        started = time.process_time()
        for hashes in asked * 10:
            index.probe(hashes, KEY)
        micros = (time.process_time() - started) / (10 * len(asked)) * 1e6
        rows.append([name, kept / args.donors, float(np.mean([len(a) for a in asked])), micros, found(keep, ask, rng)])
    report.table(
        f"{args.donors:,} donors and prompts of {LENGTH:,} random tokens, k = {DEFAULT_SCHEME.k}",
        ["seeds", "kept a donor", "asked a prompt", "probe CPU µs", "runs of 32 found"], rows,
    )  # fmt: skip
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
