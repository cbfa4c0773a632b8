"""How many hits a verdict of sembench needs, from the noise of real requests: the gates and `compare`.

    PYTHONPATH=src:bench python bench/sembench_power.py [--draws 100]

Two servers' noise is read from bench/results: prompts asked cold again and again of vLLM on a GPU, and first turns of
chats, which share nothing, asked twice of `semblend serve` on a busy CPU. Runs of sembench are then made up with that
noise and a speed-up that is known, and judged by sembench's own code. *Passes* is the share of the runs in which the
default gates have no doubt `hits_save_nothing`; a server that saves nothing should pass in 5 % of the runs at most.
*Found* is the share of comparisons that call the slower server worse (family-wise error 1 %).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import numpy as np

from sembench.result import RequestRecord, Result
from sembench.scoring.compare import compare_results
from sembench.trust import Doubt, find_doubtful_behaviour

RESULTS = _report.REPO / "bench" / "results"
HITS = (3, 4, 6, 8, 12, 16)
SPEEDUPS = (1.0, 1.1, 1.25, 1.5, 2.0)
DOCUMENTS = (4, 8, 16, 32)
SLOWER = (1.0, 1.2, 1.5, 2.0)
TTFT_MS = 1000.0

Noise = tuple[float, ...]


def read_gpu_noise() -> Noise:
    """Return differences of the logarithms of cold times, of neighbours among one prompt length and engine."""
    found = []
    for line in _report.read_lines(RESULTS / "vllm_ttft_h200.cells.jsonl"):
        row = json.loads(line)
        if row.get("what") == "ttft" and "cold" in row["arms"]:
            times = [one["ttft_ms"] for one in row["arms"]["cold"]]
            found += [math.log(later / earlier) for earlier, later in pairwise(times)]
    return tuple(found)


def read_busy_noise() -> Noise:
    """Return the same of first turns, whose warm request had no more in the cache than the shared instruction."""
    rows = map(json.loads, _report.read_lines(RESULTS / "chats.rows.jsonl"))
    return tuple(
        math.log(row["warm"]["ttft_ms"] / row["cold"]["ttft_ms"])
        for row in rows
        if row["kind"] == "turn 1" and row["warm"]["exact_tokens"] <= 16 and not row["warm"]["reused_tokens"]
    )


def draw_times(rng: np.random.Generator, noise: Noise, count: int) -> np.ndarray:
    """Return times in milliseconds whose ratios scatter as the measured ones: half of a difference's variance each."""
    drawn = rng.choice(np.asarray(noise), count) * rng.choice((-1.0, 1.0), count) / math.sqrt(2)
    return np.asarray(TTFT_MS * np.exp(drawn))


def make_records(
    rng: np.random.Generator, noise: Noise, count: int, *, speedup: float, slower: float = 1.0
) -> Iterator[RequestRecord]:
    """Yield three arms of ``count`` cases of as many documents, every warm request with confirmed reuse."""
    arms = {"cold": 1.0, "warm": speedup, "rerun": 1.0}
    times = {arm: draw_times(rng, noise, count) * slower / faster for arm, faster in arms.items()}
    for number in range(count):
        for arm in arms:
            yield RequestRecord(
                item_id=f"case-{number}", dataset="made-up", transform="instruction_variant", negative_control=False,
                source_id=f"document-{number}", pair_id=f"case-{number}", arm=arm, prompt_tokens=1000, total_blocks=62,
                backend_confirmed_tokens=512 if arm == "warm" else 0, ttft_ms=float(times[arm][number]),
            )  # fmt: skip


def has_doubt(records: Sequence[RequestRecord]) -> bool:
    return any(found.doubt is Doubt.HITS_SAVE_NOTHING for found in find_doubtful_behaviour(records))


def call_worse(base: Sequence[RequestRecord], new: Sequence[RequestRecord]) -> bool:
    """Whether `sembench compare` finds the second run slower."""
    results = [
        Result(created_at_utc="", config={}, environment={}, aggregate={}, by_transform={}, requests=tuple(records))
        for records in (base, new)
    ]
    rows = compare_results(*results)["metrics"]
    return any(row["metric"] == "ttft_ms" and row["verdict"] == "worse" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100, metavar="N", help="runs made up for each cell (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--quick", action="store_true", help="ten runs a cell")
    parser.add_argument("--out", default="bench/results/sembench_power.json", help="JSON result file; '' writes none")
    args = parser.parse_args()
    draws = 10 if args.quick else args.draws
    report = _report.Report("sembench_power", args)
    servers = {"vLLM on an H200": read_gpu_noise(), "semblend serve on a busy CPU": read_busy_noise()}
    for name, noise in servers.items():
        spread = math.exp(float(np.std(noise)))
        rng = np.random.default_rng(args.seed)
        rows = [
            [hits, *(_share(not has_doubt(list(make_records(rng, noise, hits, speedup=s))) for _ in range(draws))
                     for s in SPEEDUPS)]
            for hits in HITS
        ]  # fmt: skip
        title = (
            f"{name}: two equal requests differ {spread:.2f} times (1 sd). Share of runs that pass, by true speed-up"
        )
        report.table(title, ["hits", *(f"{s:g} times" for s in SPEEDUPS)], rows)
        rows = [[documents, *(_share(_compare_once(rng, noise, documents, s) for _ in range(draws)) for s in SLOWER)]
                for documents in DOCUMENTS]  # fmt: skip
        title = f"{name}: share of comparisons in which the second server is found slower, by how much it is"
        report.table(title, ["documents", *("equal" if s == 1 else f"{s:g} times" for s in SLOWER)], rows)
        report.note(f"{name}: {len(noise)} measured differences; {draws} made-up runs a cell")
    report.note("hits: cases with three arms each, in which the warm one has confirmed reuse; the noise is per request")
    report.write(args.out)
    return 0


def _compare_once(rng: np.random.Generator, noise: Noise, documents: int, slower: float) -> bool:
    base, new = (list(make_records(rng, noise, documents, speedup=1.5, slower=s)) for s in (1.0, slower))
    return call_worse(base, new)


def _share(found: Iterator[bool]) -> float:
    return float(np.mean(list(found)))


if __name__ == "__main__":
    raise SystemExit(main())
