"""What a miss costs more than stock vLLM's prefill, over HTTP, and where: a connector that does nothing, and ours.

    PYTHONPATH=src:bench:research/miss_cost python research/miss_cost/miss_cost.py MODEL CONTEXTS OUT.json --kv-bytes 8e9

results/h200_eager.json (one H200, vLLM 0.26.0, 2026-11-18, commit c60692a; the shape of Qwen2.5-1.5B with 49,152 tokens, random weights; too noisy to tell
servers apart): --vocabulary 40000 --budget-s 40 --hits 6 --settings '{"donor_device_bytes": 3000000000}'
    --flags "--dtype bfloat16 --gpu-memory-utilization 0.12 --load-format dummy --enforce-eager"
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lib.vllm_server as vllm_server
from lib.vllm_server import VllmServer

OURS = ("SemBlendConnectorV1", "semblend.integration.vllm.connector_v1")
NONE = {"donor_device_bytes": 0, "donor_host_bytes": 0}
SERVERS = {
    "stock": (None, {}),
    "null": (("NullConnector", "connectors"), {}),
    "keeps nothing": (OURS, NONE),
    "device only": (OURS, {"donor_host_bytes": 0}),
    "ours": (OURS, {}),
    "timed": (("TimedConnector", "connectors"), {}),
}


def draw(articles: list[list[int]], tokens: int, rng: random.Random, vocabulary: int) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < tokens:
        drawn += rng.choice(articles)
    return [one % vocabulary for one in drawn[:tokens]]


def ask_for_hits(server: VllmServer, draw_tokens: Callable[[int], list[int]], rounds: int) -> list[dict[str, Any]]:
    """Hits after a donor: fast, the first one in the default mode, and a later one."""
    rows = []
    for number in range(rounds):
        for length in (2048, 8192):
            context, asked = draw_tokens(length), {"kv_transfer_params": {"semblend": {"quality": "fast"}}}
            for arm, more in (("donor", {}), ("fast", asked), ("first", {}), ("later", {})):
                prompt, name = draw_tokens(40) + context + draw_tokens(30), f"hit-{arm}-{length}-{number}"
                begun = time.perf_counter()
                answer = server.stream(prompt, 4, name, cache_salt=f"hit-{length}-{number}", **more)
                rows.append({"length": length, "hit": arm, "begun": begun, "ttft": answer.ttft_ms})
                time.sleep(0.05)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("contexts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv-bytes", type=float, default=8e9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 24576])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--budget-s", type=float, default=100)
    parser.add_argument("--hits", type=int, default=8)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS))
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--flags", default="--dtype bfloat16 --gpu-memory-utilization 0.2")
    args = parser.parse_args()
    with gzip.open(args.contexts, "rt") as file:
        words = json.load(file)
    flags = [*args.flags.split(), "--max-model-len", str(max(args.lengths) + 512)]
    flags += ["--kv-cache-memory-bytes", str(int(args.kv_bytes))] if args.kv_bytes else []
    folder, servers = Path(tempfile.mkdtemp()), {}
    for name in args.servers:
        (folder / name).mkdir()
        line, settings = SERVERS[name]
        extra = None if line is None else json.loads(args.settings) | settings
        if line is not None:
            vllm_server.LINE["kv_connector"], vllm_server.LINE["kv_connector_module_path"] = line
        if name == "null":
            extra = {}
        servers[name] = VllmServer(args.model, folder / name, flags, extra, TIMED_CALLS=str(args.out) + "." + name)
    rows: list[dict[str, Any]] = []
    try:
        for server in servers.values():
            server.wait()
        rng, begun = random.Random(1), time.monotonic()
        articles = [one for some in words["articles"].values() for one in some]
        for number in range(args.rounds):
            for length in args.lengths:
                row: dict[str, Any] = {"length": length}
                order = list(servers)
                rng.shuffle(order)
                for name in order:
                    prompt = draw(articles, length, rng, args.vocabulary)
                    name_of = f"{name}-{length}-{number}"
                    answer = servers[name].stream(prompt, 4, name_of, cache_salt=name_of)
                    row[name] = answer.ttft_ms or 0.0
                    time.sleep(0.02)
                rows.append(row)
            if time.monotonic() - begun > args.budget_s:
                break
        if "timed" in servers:
            rows += ask_for_hits(servers["timed"], lambda tokens: draw(articles, tokens, rng, args.vocabulary), args.hits)
    finally:
        for server in servers.values():
            server.stop()
    args.out.write_text(json.dumps(rows))
    for length in args.lengths:
        mine = [row for row in rows if row["length"] == length and "hit" not in row]
        for name in servers:
            values = sorted(row[name] for row in mine)
            off = statistics.median(row[name] - row[args.servers[0]] for row in mine)
            print(length, name, len(values), f"p50 {statistics.median(values):.2f} mean {statistics.fmean(values):.2f} "
                  f"over the first {off:+.2f}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
