"""Claim: in stock vLLM a shifted prompt starts in a fraction of its cold time, and a miss loses next to nothing.

    python bench/vllm_ttft.py --rounds 15                        # an H200: Qwen2.5-7B shape, 4k … 32k tokens
    python bench/vllm_ttft.py --shape tiny --lengths 512 --dtype float32 --eager --memory 0.1 --rounds 3    # a CPU
    python bench/vllm_ttft.py --cells FILE.jsonl --finished-only # tables from cells that were measured before

Engines after each other on one machine, each in a process of its own (`lib/vllm_engine.py`): stock vLLM; with our
connector and nothing set about donors; with donors on the device; in host memory. Arms of a round: cold (opted out of
reuse), miss (looked up in vain, and kept as a donor), exact (vLLM's own prefix hit, another question behind it), fast
(also with another question), balanced (10 % repaired; with random weights the gate accepts after that). Random weights
and random tokens: speed, not quality. Cells are appended as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import lib.reporting as reporting  # first: it holds the numeric libraries to one thread
from lib.ttft_tables import break_even

ENGINES = ("stock", "default", "device", "host")
Cells = list[dict[str, Any]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reporting.add_common_arguments(parser, "vllm_ttft")
    parser.add_argument("--engines", nargs="+", default=["stock", "default"], choices=ENGINES)
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 12288, 16384, 24576, 32768])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the device's memory that vLLM takes")
    parser.add_argument("--kv-bytes", type=float, default=0, help="of vLLM's KV cache; several can start at once then")
    parser.add_argument("--turn", default="", help="a file: whoever names it measures alone")
    parser.add_argument("--donor-bytes", type=int, default=16_000_000_000)
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--decode", type=int, default=5, help="answers of 256 tokens; 0: none")
    parser.add_argument("--crowd", type=int, default=96, help="requests from 8 clients at once; 0: none")
    parser.add_argument("--crowd-tokens", type=int, default=8000)
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="tokens of prompts whose time is traced")
    parser.add_argument(
        "--budget-s", type=float, default=600.0, help="an engine that has started begins no cell after this long"
    )
    parser.add_argument("--folder", default="vllm-shape", help="where the model's config.json is written")
    parser.add_argument("--cells", default="bench/results/vllm_ttft.cells.jsonl")
    parser.add_argument("--finished-only", action="store_true", help="measure nothing")
    parser.add_argument("--measured-on", default="", help="the machine, where tables are printed on another")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    names = ("lengths", "rounds", "shape", "folder", "dtype", "memory", "eager", "donor_bytes", "decode", "crowd",
             "crowd_tokens", "profile", "budget_s", "kv_bytes", "turn")  # fmt: skip
    task = {name: getattr(args, name) for name in names}
    for engine in args.engines:
        subprocess.run(
            [sys.executable, "-m", "lib.vllm_engine", engine, args.cells, json.dumps(task)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            check=False,
        )


def times(cell: dict[str, Any], arm: str, name: str = "ttft_ms") -> list[float]:
    return [found[name] for found in cell["arms"].get(arm, []) if found.get(name) is not None]


def p50(cell: dict[str, Any] | None, arm: str, name: str = "ttft_ms") -> float | None:
    found = times(cell, arm, name) if cell else []
    return statistics.median(found) if found else None


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def show(report: reporting.Report, cells: Cells) -> None:
    by_key = {
        (cell["engine"], cell["tokens"]): cell for cell in cells if cell["what"] == "ttft" and "error" not in cell
    }
    rows, overheads = [], []
    for (engine, tokens), cell in sorted(by_key.items(), key=lambda item: (item[0][1], ENGINES.index(item[0][0]))):
        stock = by_key.get(("stock", tokens))
        cold, exact = p50(stock, "cold") or p50(cell, "cold"), p50(cell, "exact")
        for arm in cell["arms"]:
            spread = times(cell, arm)
            mid = p50(cell, arm)
            above = (
                mid - exact if mid is not None and exact is not None and arm not in ("cold", "miss", "exact") else None
            )
            kinds = [p50(cell, arm, f"{kind}_tokens") for kind in ("reused", "recomputed", "prefill")]
            rows.append(
                [tokens, engine, arm, len(spread), mid, min(spread), max(spread), ratio(cold, mid), above,
                 p50(cell, arm, "lookup_ms"), p50(cell, arm, "load_ms"), p50(cell, arm, "compute_ms"), *kinds]
            )  # fmt: skip
        if engine != "stock" and stock is not None:
            overheads.append(overhead(engine, tokens, cell, stock))
    report.table(
        "Time to first token in vLLM",
        ["tokens", "engine", "arm", "n", "p50 ms", "min", "max", "times faster than stock cold", "above exact, ms",
         "lookup ms", "load ms", "compute ms", "reused", "recomputed", "prefilled"],
        rows,
    )  # fmt: skip
    report.table(
        "What a miss costs",
        ["tokens", "donors in", "stock cold ms", "miss ms", "overhead", "against cold in the same engine",
         "break-even hit rate fast", "break-even hit rate balanced"],
        overheads,
    )  # fmt: skip
    others(report, cells)


def overhead(engine: str, tokens: int, cell: dict[str, Any], stock: dict[str, Any]) -> list[Any]:
    """Both prefills of a stock round are cold; a miss is compared with both places of the round alike."""
    cold = statistics.median([*times(stock, "cold"), *times(stock, "miss")])
    miss, own = p50(cell, "miss") or 0.0, p50(cell, "cold")
    hits = [p50(cell, arm) for arm in ("fast", "balanced")]
    even = [None if hit is None else break_even(cold, miss, hit) for hit in hits]
    return [tokens, engine, cold, miss, miss / cold - 1, None if own is None else miss / own - 1, *even]


def others(report: reporting.Report, cells: Cells) -> None:
    decode = [c for c in cells if c["what"] == "decode" and "error" not in c]
    if decode:
        base = next((statistics.median(c["tokens_per_s"]) for c in decode if c["engine"] == "stock"), None)
        rows = [[c["engine"], len(c["tokens_per_s"]), statistics.median(c["tokens_per_s"]),
                 ratio(statistics.median(c["tokens_per_s"]), base)] for c in decode]  # fmt: skip
        report.table("Decoding, one answer of 256 tokens", ["engine", "n", "tokens/s", "of stock"], rows)
    crowd = [c for c in cells if c["what"] == "crowd" and "error" not in c]
    if crowd:
        rows = []
        for c in crowd:
            ttft = sorted(one["ttft_ms"] for one in c["done"])
            rows.append([c["engine"], c["requests"], c["repeats"], sum(bool(one["reused"]) for one in c["done"]),
                         c["wall_s"], c["requests"] / c["wall_s"], statistics.median(ttft),
                         ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))]])  # fmt: skip
        report.table(
            "Eight clients at once",
            ["engine", "requests", "that repeat a document", "with reuse", "seconds", "requests/s", "TTFT p50 ms",
             "p99 ms"],
            rows,
        )  # fmt: skip
    for cell in cells:
        if "error" in cell:
            report.note(f"{cell['engine']} {cell['what']}: {cell['error'].splitlines()[-1]}")


def main() -> None:
    args = arguments()
    if args.quick:
        args.shape, args.lengths, args.rounds, args.crowd = "tiny", [512], 2, 0
    report = reporting.Report("vllm_ttft", args)
    if not args.finished_only:
        measure(args)
    lines = Path(args.cells).read_text(encoding="utf-8").splitlines()
    show(report, [json.loads(line) for line in lines])
    report.write(args.out)


if __name__ == "__main__":
    main()
