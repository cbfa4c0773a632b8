"""Eviction policies on a real trace: how fast they replay, whether they are right, what they gain. All simulated.

    python bench/eviction.py --data-dir DATA [--quick] [--trace FILE ...] [--out bench/results/eviction.json]

The constants of adaptive_semantic were chosen on the first third of the Mooncake trace and on made-up traces that are
not among those measured here; "held out" is everything else. ``--trace`` adds traces of your own to that table.

Speed is CPU time of the whole `simulate` call, best of three. Where the package libcachesim can be imported (or
``--libcachesim PYTHON`` names an interpreter that can), the same accesses go through it, one block at a time, and hit
counts must agree. Exit code 1 when a policy beats its bound, when adaptive
closes less than 15 % of the gap between lru and Belady at 1,000 or 5,000 blocks, or when a hit count differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lib.reporting as reporting

SIZES = (1_000, 5_000, 10_000, 20_000)
HELD_OUT_SIZES = (200, 1_000, 2_800, 5_000, 10_000, 20_000)
TEXTS = (("chats", 0.5, 20.0), ("chats", 2.0, 120.0), ("agents", 0.05, 20.0), ("agents", 1.0, 20.0), ("rag", 0.5, 20.0))
FAST = ("lru", "lfu", "s3fifo", "adaptive_semantic")
CLASSIC = ("fifo", "lru", "lfu", "size_aware_lru", "sieve", "s3fifo", "gdsf", "lfuda", "arc", "tinylfu")
PEER = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "sieve": "Sieve", "s3fifo": "S3FIFO", "arc": "ARC"}
PEER_SCRIPT = """
import json, sys, time
import libcachesim as lcs
ids = json.load(open(sys.argv[1]))
for name, size in json.loads(sys.argv[2]):
    cache = getattr(lcs, name)(size)
    requests = [lcs.Request() for _ in range(1)]
    request = requests[0]
    request.obj_size = 1
    hits, begin = 0, time.process_time()
    for i in ids:
        request.obj_id = i + 1
        hits += bool(cache.get(request))
    print(json.dumps([name, size, hits, time.process_time() - begin]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reporting.add_common_arguments(parser, "eviction")
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="one more held-out trace")
    parser.add_argument("--libcachesim", default="", help="a Python interpreter that can import libcachesim")
    args = parser.parse_args(arguments)
    report = reporting.Report("eviction", args)
    from semantickv.simulator.simulate import build_forest
    from semantickv.traces.trace import Trace

    trace = Trace.read(reporting.data_dir(args) / "traces" / "mooncake_conversation_first_half.jsonl.gz")
    trace = trace.take_first(600) if args.quick else trace
    forest = build_forest(trace)
    wrong = measure_gain(report, forest, judged=not args.quick)
    measure_held_out(report, trace, args)
    measure_bounds(report, forest)
    measure_curves(report, forest)
    measure_speed(report, forest)
    measure_long_trace(report, 200_000 if args.quick else 10_000_000, args.seed)
    wrong += compare_with_libcachesim(report, trace, args.libcachesim)
    for line in wrong:
        report.note(f"FAILED: {line}")
    report.note("Everything here is simulated: a replay of recorded block ids, no engine ran.")
    report.add("passed", not wrong)
    report.write(args.out)
    return 1 if wrong else 0


def measure_gain(report: reporting.Report, forest: Any, *, judged: bool) -> list[str]:
    """Measure block hit rates of all policies, and how much of the gap between lru and Belady adaptive closes."""
    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.policies import POLICIES
    from semantickv.simulator.simulate import simulate

    rates = {
        name: [simulate(forest, name, Capacity.blocks(size)).block_hit_rate for size in SIZES] for name in POLICIES
    }
    rows = [[name, *(f"{100 * rate:.2f}" for rate in row)] for name, row in rates.items()]
    best = [max(rates[name][n] for name in CLASSIC) for n in range(len(SIZES))]
    low, mine, high = rates["lru"], rates["adaptive_semantic"], rates["belady_bypass"]
    share = [(mine[n] - low[n]) / max(1e-12, high[n] - low[n]) for n in range(len(SIZES))]
    rows.append(["gap closed %", *(f"{100 * value:.1f}" for value in share)])
    rows.append(["adaptive - best classic", *(f"{100 * (mine[n] - best[n]):+.2f}" for n in range(len(SIZES)))])
    report.table("Block hit rate % (simulated, prefix mode)", ["policy", *map(str, SIZES)], rows)
    report.add("block_hit_rates", rates)
    wrong = [
        f"{name} beats {bound} at {SIZES[n]} blocks"
        for name, row in rates.items()
        for bound in ("belady_bypass", "belady")
        for n in range(len(SIZES))
        if row[n] > rates[bound][n] + 1e-12
        and (bound == "belady_bypass" or not (POLICIES[name].bypass or POLICIES[name].refuses))
    ]
    if judged:
        wrong += [f"adaptive closes {100 * share[n]:.1f} % at {SIZES[n]} blocks" for n in (0, 1) if share[n] < 0.15]
    return wrong


def measure_held_out(report: reporting.Report, trace: Any, args: argparse.Namespace) -> None:
    """Compare lru, the best classic, adaptive and Belady on what adaptive was tuned on and on what it was not."""
    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.simulate import build_forest, simulate

    rows, cells = [], []
    for name, one in build_held_out_traces(trace, args).items():
        forest = build_forest(one)
        for size in HELD_OUT_SIZES:
            rates = {
                policy: 100 * simulate(forest, policy, Capacity.blocks(size)).block_hit_rate
                for policy in (*CLASSIC, "adaptive_semantic", "belady_bypass")
            }
            low, mine, high = rates["lru"], rates["adaptive_semantic"], rates["belady_bypass"]
            best = max(CLASSIC, key=rates.__getitem__)
            share = f"{100 * (mine - low) / (high - low):.0f}" if high - low >= 0.5 else "-"
            figures = (low, f"{rates[best]:.2f} {best}", mine, mine - rates[best], high)
            shown = [figure if isinstance(figure, str) else f"{figure:.2f}" for figure in figures]
            rows.append([name, size, *shown, share])
            cells.append({"trace": name, "blocks": size, "best_classic": best, **rates})
            if high - low < 0.05 and size >= forest.nodes:
                break
    columns = ["trace", "blocks", "lru", "best classic", "adaptive", "adaptive - best", "belady_bypass", "gap closed %"]
    report.table("Held out: block hit rate % (simulated, prefix mode)", columns, rows)
    report.add("held_out", cells)
    worst = min(cells, key=lambda cell: cell["adaptive_semantic"] - cell[cell["best_classic"]])
    gap = worst[worst["best_classic"]] - worst["adaptive_semantic"]
    report.note(
        f"adaptive is furthest behind the best classic on {worst['trace']}, {worst['blocks']}: {gap:.2f} points"
    )


def build_held_out_traces(trace: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Build the traces by name: both parts of the Mooncake trace, real text, hard cases, and those of --trace."""
    from semantickv.traces.trace import Trace
    from semantickv.workloads.families import Arrivals
    from semantickv.workloads.from_text import TextSource, generate_text_workload

    third = len(trace) // 3
    found = {"mooncake, first third (tuned on)": trace.take_first(third), "mooncake, the rest": trace.skip_first(third)}
    for name, rate, think_s in TEXTS:
        source = TextSource(
            reporting.data_dir(args), 11, 50 if args.quick else None, Arrivals("poisson", rate, think_s)
        )
        found[f"{name}, {rate:g}/s"] = generate_text_workload(name, source)
    requests = 600 if args.quick else 8000
    found |= {
        name: build_made_up_trace(name, requests, args.seed + 99)
        for name in ("loop", "hot and scan", "favourites move")
    }
    return found | {Path(path).name: Trace.read(path) for path in args.trace}


def build_made_up_trace(name: str, requests: int, seed: int) -> Any:
    """Build documents of six blocks, each followed by two blocks of its own: a hard case for some policy."""
    import numpy as np

    from semantickv.traces.trace import Trace, TraceRequest

    rng = np.random.default_rng(seed)
    favourites = rng.zipf(1.3, requests) % 2000
    asks = []
    for r in range(requests):
        once = 10**8 + 2 * r
        document = {
            "loop": r % 300,
            "hot and scan": int(rng.integers(40)) if r % 3 else 10_000 + r,
            "favourites move": int(favourites[r]) + r // 1500 * 3000,
        }[name]
        ids = (*(document * 32 + place for place in range(6)), once, once + 1)
        asks.append(TraceRequest(str(r), float(r), ids, (512,) * 8, ("other",) * 8))
    return Trace.from_requests(asks, name=name)


def measure_bounds(report: reporting.Report, forest: Any) -> None:
    """Measure hit rates for capacities in tokens beside their upper bound."""
    from lib.upper_bound import compute_upper_bound

    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.simulate import simulate

    rows = []
    for tokens in (500_000, 2_500_000):
        bound = compute_upper_bound(forest, Capacity.tokens(tokens))
        for name in ("lru", "gdsf", "adaptive_semantic", "belady_bypass"):
            result = simulate(forest, name, Capacity.tokens(tokens))
            rows.append([tokens, name, f"{100 * result.token_hit_rate:.2f}", f"{100 * result.block_hit_rate:.2f}"])
        rows.append([tokens, "upper bound", f"{100 * bound.token_hit_rate:.2f}", f"{100 * bound.block_hit_rate:.2f}"])
    report.table("Capacity in tokens (simulated)", ["tokens", "policy", "token hit %", "block hit %"], rows)


def measure_curves(report: reporting.Report, forest: Any) -> None:
    """Compare sampled curves with full ones."""
    import numpy as np

    from semantickv.analysis.mrc import simulate_curve

    rows = []
    for name in ("lru", "lfu", "s3fifo", "arc", "adaptive_semantic", "belady_bypass"):
        full = simulate_curve(forest, name, SIZES, rate=1.0)
        for rate in (0.25, 0.1):
            part = simulate_curve(forest, name, SIZES, rate=rate)
            off = 100 * np.abs(part.hit_rates - full.hit_rates)
            said = 100 * float(np.nanmean(part.errors))
            rows.append([name, part.method, rate, f"{off.mean():.2f}", f"{off.max():.2f}", f"{said:.2f}"])
    columns = ["policy", "method", "rate", "mean error", "largest error", "standard error it gives"]
    report.table("Sampled curves against full runs (percentage points, simulated)", columns, rows)


def measure_speed(report: reporting.Report, forest: Any) -> None:
    """Measure million block accesses per CPU second for every policy and size, best of three."""
    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.policies import POLICIES
    from semantickv.simulator.simulate import simulate

    rows = []
    for name in POLICIES:
        simulate(forest, name, Capacity.blocks(100))  # compiles
        row = []
        for size in SIZES:
            best = min(
                time_cpu(lambda name=name, size=size: simulate(forest, name, Capacity.blocks(size))) for _ in range(3)
            )
            row.append(len(forest.node) / best / 1e6)
        rows.append([name, *(f"{value:.2f}" for value in row), "yes" if min(row) >= 1 or name not in FAST else "NO"])
    report.table("Million block accesses per CPU second", ["policy", *map(str, SIZES), "at least 1 where asked"], rows)


def time_cpu(call: Any) -> float:
    """Return the CPU seconds of one call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def measure_long_trace(report: reporting.Report, accesses: int, seed: int) -> None:
    """Replay ten million accesses in bounded memory: 20-block conversations over Zipf-popular beginnings."""
    import resource

    import numpy as np

    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.simulate import build_forest, simulate
    from semantickv.traces.trace import BLOCK_TYPES, Trace

    rng = np.random.default_rng(seed)
    requests = accesses // 20
    chat = rng.zipf(1.2, requests) % 300_000
    ids = (chat[:, None] * 64 + np.arange(20) + (rng.integers(0, 8, requests)[:, None] * (np.arange(20) > 12))).ravel()
    trace = Trace(
        ids.astype(np.int64),
        np.full(accesses, 16, np.int32),
        np.zeros(accesses, np.int16),
        np.arange(requests + 1, dtype=np.int64) * 20,
        np.arange(requests, dtype=np.float64),
        np.zeros(requests, np.int32),
        np.zeros(requests, np.int32),
        np.full(requests, np.nan),
        BLOCK_TYPES,
        ("default",),
        "synthetic",
    )
    rows, forest = [], None
    begin = time.process_time()
    forest = build_forest(trace)
    took_s = time.process_time() - begin
    for name in FAST:
        seconds = time_cpu(lambda name=name: rows.append([name, simulate(forest, name, Capacity.blocks(50_000))]))
        rows[-1] = [name, f"{100 * rows[-1][1].block_hit_rate:.2f}", f"{accesses / seconds / 1e6:.2f}"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    report.table(f"Synthetic trace, {accesses:,} accesses, 50,000 blocks", ["policy", "hit %", "M accesses/s"], rows)
    report.note(f"numbering {forest.nodes:,} nodes took {took_s:.1f} CPU s; peak memory of the process {peak:.0f} MiB")


def compare_with_libcachesim(report: reporting.Report, trace: Any, python: str) -> list[str]:
    """Replay the same block ids, one at a time, in libCacheSim and here in block mode; return the differences."""
    if not python:
        report.note("libcachesim: not compared (no interpreter given with --libcachesim)")
        return []
    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.simulate import build_forest, simulate
    from semantickv.traces.trace import Trace, TraceRequest

    ids = trace.ids.tolist()
    singles = Trace.from_requests(TraceRequest("", float(n), (i,), (1,), ("other",)) for n, i in enumerate(ids))
    forest = build_forest(singles, "block")
    asked = [(PEER[name], size) for name in PEER for size in SIZES[:3]]
    with tempfile.TemporaryDirectory() as folder:
        script, data = Path(folder) / "peer.py", Path(folder) / "ids.json"
        script.write_text(PEER_SCRIPT)
        data.write_text(json.dumps(ids))
        done = subprocess.run(
            [python, str(script), str(data), json.dumps(asked)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        report.note("libcachesim: failed: " + (done.stderr.strip().splitlines() or ["no message"])[-1])
        return []
    rows, wrong = [], []
    names = {theirs: ours for ours, theirs in PEER.items()}
    for line in done.stdout.splitlines():
        theirs, size, hits, seconds = json.loads(line)
        name = names[theirs]
        best = min(
            time_cpu(lambda name=name, size=size: simulate(forest, name, Capacity.blocks(size))) for _ in range(2)
        )
        mine = simulate(forest, name, Capacity.blocks(size)).block_hits
        rows.append([name, size, mine, hits, f"{len(ids) / best / 1e6:.2f}", f"{len(ids) / seconds / 1e6:.2f}"])
        if mine != hits:
            wrong.append(f"{name} at {size} blocks: {mine} hits, libCacheSim {hits}")
    columns = ["policy", "blocks", "our hits", "libCacheSim hits", "our M/s", "its M/s through Python"]
    report.table("Beside libCacheSim, one block per request (simulated)", columns, rows)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
