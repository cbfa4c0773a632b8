"""Claim: under mixed traffic, with more documents than memory holds, more requests are in time than in stock vLLM.

    python bench/vllm_mixed.py --model FOLDER --contexts FILE --kv-bytes 4e9 --measured-on "one H200, vLLM 0.26.0"

`vllm_pays.py contexts` writes the contexts. Two servers take turns on one GPU, stock vLLM and ours, and get the same
requests at the same moments (a Poisson process), at rising rates:

    document  half of all: one of a pool, popular ones more often (Zipf), another instruction, another question
    new       a document that nobody has sent
    chat      the next turn of one of 24 conversations: what was said so far and one message more
    short     two hundred tokens of its own

The pool is three times what vLLM's cache and donors' memory hold, so both evict all the time; `--donor-bytes` (host)
and `--device-bytes` make that memory small enough for a run of minutes. In time is a request whose first token comes
within 500 ms and each later one within 50 ms of the one before it.
"""

from __future__ import annotations

import lib.reporting as reporting  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import gzip
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lib.vllm_loads import ITL_GOAL_MS, TTFT_GOAL_MS
from lib.vllm_runs import Budget, Rows, add_engine_arguments, read_arguments, take_turn, write_report
from lib.vllm_server import VllmServer

KINDS = {"document": 0.5, "new": 0.15, "chat": 0.2, "short": 0.15}
"""Their shares of the requests."""
CONVERSATIONS, MESSAGE, SHORT, ANSWER = 24, 160, 200, 48
PRESSURE = 3.0
"""The pool's KV, in what device and host memory hold together."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, and when, in seconds from the beginning."""

    at_s: float
    kind: str
    tokens: list[int]


class Traffic:
    """Requests, drawn once, so that both servers get the same."""

    def __init__(self, words: dict[str, Any], pool_tokens: int, lengths: Sequence[int], seed: int) -> None:
        self._rng, self._words, self._lengths = random.Random(seed), words, lengths
        texts = [*words["documents"], *(one for found in words["articles"].values() for one in found)]
        self._rng.shuffle(texts)
        self._texts = [token for one in texts for token in one]
        self._used = 0
        self.pool: list[list[int]] = []
        while sum(map(len, self.pool)) < pool_tokens:
            self.pool.append(self._draw_document())
        self._weights = [1 / (rank + 1) for rank in range(len(self.pool))]
        self._said: list[list[int]] = [[] for _ in range(CONVERSATIONS)]

    def draw(self, rate: float, seconds: float) -> list[Request]:
        """The requests of some seconds."""
        found: list[Request] = []
        at = self._rng.expovariate(rate)
        while at < seconds:
            (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
            found.append(Request(at, kind, self._draw_tokens(kind)))
            at += self._rng.expovariate(rate)
        return found

    def _draw_tokens(self, kind: str) -> list[int]:
        if kind == "short":
            return self._rng.sample(self._texts, SHORT)
        if kind == "chat":
            at = self._rng.randrange(CONVERSATIONS)
            so_far = self._said[at] if len(self._said[at]) < max(self._lengths) else []
            asked = so_far + self._rng.sample(self._texts, MESSAGE)
            self._said[at] = asked + self._rng.sample(self._texts, ANSWER)  # the client's words: not what a server said
            return asked
        document = self._draw_document() if kind == "new" else self._rng.choices(self.pool, self._weights)[0]
        lead, ask = self._rng.choice(self._words["lead"]), self._rng.choice(self._words["ask"])
        return [*self._rng.sample(self._texts, 12), *lead, *document, *ask]

    def _draw_document(self) -> list[int]:
        """Text that no other document has; where all is used, tokens of it in another order."""
        length = self._rng.choice(self._lengths)
        start, self._used = self._used, self._used + length
        if self._used > len(self._texts):
            return self._rng.sample(self._texts, length)
        return self._texts[start : self._used]


def serve(server: VllmServer, requests: Sequence[Request], name: str) -> list[dict[str, Any]]:
    """Send each at its moment, whoever still waits; when the tokens of each came."""
    rows: list[dict[str, Any]] = []

    def ask(number: int, one: Request) -> None:
        answer = server.stream(one.tokens, ANSWER, f"{name}-{number}")
        rows.append({"kind": one.kind, "prompt": len(one.tokens), "ttft_ms": answer.ttft_ms, "gaps": answer.gaps_ms,
                     "cached": answer.cached_tokens})  # fmt: skip

    threads = []
    begun = time.perf_counter()
    for number, one in enumerate(requests):
        time.sleep(max(0.0, begun + one.at_s - time.perf_counter()))
        threads.append(threading.Thread(target=ask, args=(number, one), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(300)
    return rows


def summarize(rows: Sequence[dict[str, Any]], asked: int) -> dict[str, Any]:
    """Of one server at one rate; a request that was not answered is not in time."""
    ttft, gaps = [one["ttft_ms"] for one in rows], [gap for one in rows for gap in one["gaps"]]
    first = sum(one["ttft_ms"] <= TTFT_GOAL_MS for one in rows)
    all_in_time = sum(one["ttft_ms"] <= TTFT_GOAL_MS and max(one["gaps"], default=0) <= ITL_GOAL_MS for one in rows)
    by_kind = {kind: [one["ttft_ms"] for one in rows if one["kind"] == kind] for kind in KINDS}
    return {
        "n": asked, "answered": len(rows), "in_time": all_in_time / asked, "first_in_time": first / asked,
        "ttft_p50": float(np.median(ttft)), "ttft_mean": statistics.fmean(ttft),
        "ttft_p90": float(np.percentile(ttft, 90)), "ttft_p99": float(np.percentile(ttft, 99)),
        "gap_p99": float(np.percentile(gaps, 99)), "gap_max": max(gaps),
        "cached_share": sum(one["cached"] or 0 for one in rows) / sum(one["prompt"] for one in rows),
        **{f"{kind}_p50": float(np.median(found)) if found else None for kind, found in by_kind.items()},
    }  # fmt: skip


def count_kv_bytes(model: str) -> int:
    """Bytes of KV that a token of this model takes in 16 bits."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


def measure(args: argparse.Namespace, pool_tokens: int) -> None:
    """Rate after rate, each on both servers; first a fill, which is not measured: both have evicted when it ends."""
    with gzip.open(args.contexts, "rt") as file:
        traffic = Traffic(json.load(file), pool_tokens, args.lengths, args.seed)
    flags = ["--dtype", args.dtype, "--max-model-len", str(2 * max(args.lengths)), "--gpu-memory-utilization",
             str(args.memory), "--kv-cache-memory-bytes", str(int(args.kv_bytes)),
             *(["--enforce-eager"] if args.eager else [])]  # fmt: skip
    held = {"donor_host_bytes": int(args.donor_bytes), "donor_device_bytes": int(args.device_bytes)}
    extras: dict[str, dict[str, Any] | None] = {"stock": None, "ours": held}
    folder, servers = Path(tempfile.mkdtemp(prefix="vllm-mixed-")), {}
    for name, extra in extras.items():
        (folder / name).mkdir()
        servers[name] = VllmServer(args.model, folder / name, flags, extra)
    rows = Rows(args.rows)
    try:
        for server in servers.values():
            server.wait()
        with take_turn(args.turn):
            budget = Budget(args.budget_s)
            fill = traffic.draw(args.fill / 10, 10)
            for name, server in servers.items():
                serve(server, fill, "fill")
                reporting.progress(f"{name}: {len(fill)} requests sent before measuring")
            for number, rate in enumerate(args.rates):
                requests = traffic.draw(rate, args.seconds)
                for name in sorted(servers, reverse=bool(number % 2)):
                    if budget.is_used_up:
                        return
                    found = serve(servers[name], requests, f"r{number}")
                    rows.add({"server": name, "rate": rate, "number": number} | summarize(found, len(requests)))
                    reporting.progress(f"{name}: {rate} a second")
    finally:
        for server in servers.values():
            server.stop()


COLUMNS = {
    "server": "server", "rate": "a second", "n": "n", "in_time": "in time", "first_in_time": "first token in time",
    "ttft_p50": "TTFT p50 ms", "ttft_mean": "mean", "ttft_p90": "p90", "ttft_p99": "p99",
    "document_p50": "document p50", "new_p50": "new p50", "chat_p50": "chat p50", "short_p50": "short p50",
    "gap_p99": "gap p99 ms", "gap_max": "gap max", "cached_share": "not computed",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "vllm_mixed")
    parser.add_argument("--contexts", default="contexts.json.gz", help="file of tokens")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens of documents")
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 4, 6, 8, 12], help="requests a second")
    parser.add_argument("--seconds", type=float, default=25, help="of each rate")
    parser.add_argument("--fill", type=int, default=150, help="requests before anything is measured")
    parser.add_argument("--device-bytes", type=float, default=2e9, help="of the GPU, for donors")
    parser.set_defaults(donor_bytes=4e9, kv_bytes=4e9, memory=0.3)
    small = {"donor_bytes": 1e8, "device_bytes": 0, "kv_bytes": 1e8}
    args = read_arguments(parser, lengths=[200, 300], rates=[1.0], seconds=10, fill=4, **small)
    held_bytes = args.kv_bytes + args.donor_bytes + args.device_bytes
    pool_tokens = int(PRESSURE * held_bytes / count_kv_bytes(args.model))
    if not args.finished_only:
        measure(args, pool_tokens)
    report = reporting.Report("vllm_mixed", args)
    rows = sorted(Rows(args.rows).rows, key=lambda row: (row["number"], row["server"]))
    report.table(
        "Mixed traffic under pressure", list(COLUMNS.values()), [[row[key] for key in COLUMNS] for row in rows]
    )
    write_report(
        report, args,
        f"documents of {pool_tokens:,} tokens in all: {PRESSURE:.0f} times what vLLM's cache ({args.kv_bytes / 1e9:g} "
        f"GB) and donors' memory (donor_host_bytes {args.donor_bytes / 1e9:g} GB, donor_device_bytes "
        f"{args.device_bytes / 1e9:g} GB, set for this run) hold",
        f"in time: first token within {TTFT_GOAL_MS:.0f} ms, and no gap above {ITL_GOAL_MS:.0f} ms",
        "the same requests at the same moments on both servers, which take turns; all else as it is without settings",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
