"""Eviction on held-out traces: every policy with intervals, and how much of the gap from lru to Belady is closed.

    python bench/eviction_held_out.py [--mooncake DIR] [--quick] [--out bench/results/eviction_held_out.json]

``DIR`` holds ``conversation_trace.jsonl`` and ``synthetic_trace.jsonl`` of Mooncake's FAST25 release. The first half of
the conversation trace, and of the synthetic one, is what the adaptive policy was chosen on; the second half of both is
not, and is replayed from an empty cache. Intervals are 95 % percentile intervals of a bootstrap over forty stretches of
time: requests of one stretch stay together, all policies are compared on the same draw. Speed is the best of five runs,
CPU time of the whole `simulate` call; lru's stands beside it, because a busy machine slows both.

Everything here is simulated: a replay of recorded block ids, no engine ran.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _report
import numpy as np

SIZES = (1_000, 5_000, 10_000, 20_000)
CELLS = (("conversation", "second half"), ("synthetic", "whole"), ("synthetic", "second half"))
STRETCHES, DRAWS, TIMED = 40, 2_000, 5
BOUND, MINE = "belady_bypass", "adaptive_semantic"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "eviction_held_out")
    parser.add_argument("--mooncake", metavar="DIR", help="folder with Mooncake's FAST25 traces (default: DATA/traces)")
    args = parser.parse_args(arguments)
    args.mooncake = args.mooncake or str(_report.data_dir(args) / "traces")
    report = _report.Report("eviction_held_out", args)
    for name, part in CELLS:
        measure_trace(report, name, part, args)
    report.note("Everything here is simulated: a replay of recorded block ids, no engine ran.")
    report.write(args.out)
    return 0


def read_part(folder: str, name: str, part: str, quick: bool) -> Any:
    """Read a trace, or its second half."""
    from semantickv.traces.trace import Trace

    path = Path(folder) / f"{name}_trace.jsonl"
    trace = Trace.read(path)
    trace = trace.skip_first(len(trace) // 2) if part == "second half" else trace
    return trace.take_first(400) if quick else trace


def measure_trace(report: _report.Report, name: str, part: str, args: argparse.Namespace) -> None:
    """Replay every policy at every size over one trace, and say what is certain about it."""
    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.policies import POLICIES
    from semantickv.simulator.simulate import build_forest, simulate

    trace = read_part(args.mooncake, name, part, args.quick)
    forest = build_forest(trace)
    lengths = np.diff(trace.starts)
    rows: dict[str, list[str]] = {policy: [policy] for policy in POLICIES}
    gaps, leads, cells = ["gap closed %"], ["adaptive - best classic"], []
    speeds = {policy: [f"{policy}: million accesses a CPU second"] for policy in (MINE, "lru")}
    for size in SIZES:
        hits: dict[str, Any] = {}
        for policy in POLICIES:
            took_s = []
            for _ in range(TIMED if policy in speeds else 1):
                begin = time.process_time()
                hits[policy] = simulate(forest, policy, Capacity.blocks(size)).hit_blocks_by_request
                took_s.append(time.process_time() - begin)
            if policy in speeds:
                speeds[policy].append(f"{len(forest.node) / min(took_s) / 1e6:.2f}")
        cell = compare(hits, lengths, args.seed)
        cells.append({"trace": name, "part": part, "blocks": size, **cell})
        for policy in POLICIES:
            rate, low, high = cell["rates"][policy]
            rows[policy].append(f"{rate:.2f} [{low:.1f}, {high:.1f}]")
        gap = cell["rates"][BOUND][0] - cell["rates"]["lru"][0]
        gaps.append("{:.1f} [{:.0f}, {:.0f}]".format(*cell["gap_closed"]) if gap >= 0.5 else "-")
        leads.append("{:+.2f} [{:+.1f}, {:+.1f}] {}".format(*cell["lead"], cell["best_classic"]))
    table = [*rows.values(), gaps, leads, *speeds.values()]
    title = f"Mooncake {name}, {part}: block hit rate %, 95 % interval (simulated, prefix mode)"
    report.table(title, ["policy", *(f"{size:,}" for size in SIZES)], table)
    report.add(f"{name}, {part}", cells)


def compare(hits: dict[str, Any], lengths: Any, seed: int) -> dict[str, Any]:
    """Compute rates, the share of the gap that adaptive closes, and its lead over the best classic, with intervals."""
    from semantickv.simulator.policies import POLICIES

    edges = np.linspace(0, len(lengths), min(STRETCHES, len(lengths)) + 1).astype(int)[:-1]
    sums = {policy: np.add.reduceat(found.astype(np.int64), edges) for policy, found in hits.items()}
    asked = np.add.reduceat(lengths, edges)
    draws = np.random.default_rng(seed).integers(0, len(edges), (DRAWS, len(edges)))
    drawn = {policy: 100 * found[draws].sum(1) / asked[draws].sum(1) for policy, found in sums.items()}
    whole = {policy: 100 * found.sum() / asked.sum() for policy, found in sums.items()}
    classics = [name for name, policy in POLICIES.items() if not policy.offline and name != MINE]
    best = max(classics, key=whole.__getitem__)

    def share(rates: dict[str, Any]) -> Any:
        return 100 * (rates[MINE] - rates["lru"]) / np.maximum(1e-9, rates[BOUND] - rates["lru"])

    return {
        "rates": {policy: [whole[policy], *np.percentile(drawn[policy], (2.5, 97.5))] for policy in whole},
        "gap_closed": [float(share(whole)), *np.percentile(share(drawn), (2.5, 97.5))],
        "best_classic": best,
        "lead": [whole[MINE] - whole[best], *np.percentile(drawn[MINE] - drawn[best], (2.5, 97.5))],
    }


if __name__ == "__main__":
    raise SystemExit(main())
