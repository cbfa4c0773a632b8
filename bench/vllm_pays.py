"""Claim: with default settings, over HTTP, a request is answered sooner than by stock vLLM, or not later.

    python bench/vllm_pays.py contexts --model FOLDER --data-dir DATA --contexts FILE
    python bench/vllm_pays.py --model FOLDER --contexts FILE --measured-on "one H200, vLLM 0.26.0"

Servers take turns on one GPU, one request at a time: `stock` (no connector), `ours` (nothing set), and `forced` (what
is expected not to pay is begun all the same: only for short prompts, to see what was missed). Each arm of a case has a
salt of its own, so that nothing is found by chance:

    cold      stock: the prompt, for the first time
    exact     stock: the same prompt with another question at its end, from its prefix cache: the limit of any reuse
    miss      ours: a prompt of which nothing was seen; it becomes the donor of the next
    balanced  ours: the miss's context under another instruction, with another question; the default mode
    later     ours: a third instruction and question for the same context; the default mode, one pass
    fast      as balanced, in mode fast, after a donor of its own
    half      ours, default mode: only the first half of the context is a donor's

Contexts are articles of four data sets; `contexts` writes their tokens, so that the machine with the GPU needs no data.
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
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lib.real_texts import leval, longbench, qmsum
from lib.vllm_runs import Budget, Rows, add_engine_arguments, read_arguments, take_turn, write_report
from lib.vllm_server import VllmServer
from vllm_http import DATASETS, INSTRUCTIONS, QUESTIONS, Prompts

MAX_TOKENS_OF_A_SET = 600_000
FORCED_BELOW = 8192
FIRST = 100
RECEIPT = ("outcome", "reason", "detail", "risk", "escalations", "mode", "kind", "reused_tokens", "recomputed_tokens",
           "lookup_ms", "load_ms", "compute_ms", "service_ms", "expected_ms", "expected_cold_ms")  # fmt: skip
ARMS = ("stock:cold", "stock:exact", "ours:miss", "ours:balanced", "ours:later", "ours:fast", "ours:half",
        "forced:balanced")  # fmt: skip


def write_contexts(model: str, folder: Path, out: str) -> None:
    """Articles of each data set as tokens, what stands around them, and long documents for `vllm_mixed.py`."""
    prompts, articles = Prompts(model, folder), {}
    for name in DATASETS:
        prompts.draw_context(name, 1, random.Random(0))
        kept, tokens = [], 0
        for one in prompts._encoded[name]:
            if tokens < MAX_TOKENS_OF_A_SET:
                kept.append(one)
                tokens += len(one)
        articles[name] = kept
    around = {"lead": list(map(prompts.encode, INSTRUCTIONS)), "ask": list(map(prompts.encode, QUESTIONS))}
    documents = [prompts.encode(one.text) for one in (*leval(folder), *longbench(folder), *qmsum(folder))]
    with gzip.open(out, "wt") as file:
        json.dump({"articles": articles, "documents": documents, **around}, file)


class Case:
    """One prompt in every arm."""

    def __init__(
        self, servers: dict[str, VllmServer], words: dict[str, Any], key: dict[str, Any], counts: Counter[str]
    ) -> None:
        self._servers, self._words = servers, words
        self._name = f"{key['dataset']}-{key['length']}-{key['number']}".replace("/", "")
        self._rng, self._key, self._counts = random.Random(self._name), key, counts
        self.found: dict[str, dict[str, Any]] = {}

    def run(self) -> dict[str, dict[str, Any]]:
        length, lead, ask = self._key["length"], self._words["lead"], self._words["ask"]
        context, other = self._draw(length), self._draw(length // 2)
        target, donor = lead[1] + context + ask[1], lead[0] + context + ask[0]
        half = lead[1] + context[: length // 2] + other + ask[1]
        self._ask("stock:cold", target, "cold")
        self._ask("stock:exact", lead[1] + context + ask[0], "cold")
        self._ask("ours:miss", donor, "balanced")
        self._ask("ours:balanced", target, "balanced")
        self._ask("ours:later", lead[2] + context + ask[2], "balanced")
        self._ask("ours:half", half, "balanced")
        self._ask("ours:donor", donor, "fast")
        self._ask("ours:fast", target, "fast", quality="fast")
        if length < FORCED_BELOW and "forced" in self._servers:
            self._ask("forced:donor", donor, "forced")
            self._ask("forced:balanced", target, "forced")
        return self.found

    def _draw(self, tokens: int) -> list[int]:
        articles, drawn = self._words["articles"][self._key["dataset"]], []
        while len(drawn) < tokens:
            drawn += self._rng.choice(articles)
        return drawn[:tokens]

    def _ask(self, arm: str, ids: list[int], salt: str, **asked: Any) -> None:
        wish = {"kv_transfer_params": {"semblend": asked}} if asked else {}
        name, server = f"{self._name}-{arm}", arm.partition(":")[0]
        answer = self._servers[server].stream(ids, 4, name, cache_salt=f"{self._name}-{salt}", **wish)
        self._counts[server] += 1
        number = self._counts[server]
        self.found[arm] = {"ttft_ms": answer.ttft_ms, "cached": answer.cached_tokens, "number": number}


def measure(args: argparse.Namespace) -> None:
    """Rows by round, so that all lengths have as many whenever time is up; then what receipts say of each."""
    with gzip.open(args.contexts, "rt") as file:
        words = json.load(file)
    flags = ["--dtype", args.dtype, "--max-model-len", str(max(args.lengths) + 512),
             "--gpu-memory-utilization", str(args.memory), *(["--enforce-eager"] if args.eager else []),
             *(["--kv-cache-memory-bytes", str(int(args.kv_bytes))] if args.kv_bytes else [])]  # fmt: skip
    extras: dict[str, dict[str, Any] | None] = {
        "stock": None,
        "ours": json.loads(args.settings),
        "forced": {"learn_costs": False, "control_share": 0.0},
    }
    folder = Path(tempfile.mkdtemp(prefix="vllm-pays-"))
    servers: dict[str, VllmServer] = {}
    rows, model, counts = Rows(args.rows), Path(args.model).name, Counter[str]()
    try:
        for name in args.servers:
            (folder / name).mkdir()
            begun = time.perf_counter()
            servers[name] = VllmServer(args.model, folder / name, flags, extras[name])
            if args.start_apart:
                servers[name].wait()
                rows.add({"model": model, "started": name, "seconds": time.perf_counter() - begun})
        for name, server in servers.items():
            server.wait()
            reporting.progress(f"{name} answers")
        with take_turn(args.turn):
            budget = Budget(args.budget_s)
            for number in range(args.cases):
                if budget.is_used_up:
                    break
                asked = []
                for length in args.lengths:
                    for dataset in DATASETS:
                        key = {"model": model, "dataset": dataset, "length": length, "number": number}
                        if not budget.is_used_up and not rows.find(**key):
                            asked.append(key | {"arms": Case(servers, words, key, counts).run()})
                add_receipts(asked, servers)
                for row in asked:
                    rows.add(row)
                reporting.progress(f"round {number}")
    finally:
        for server in servers.values():
            server.stop()


def add_receipts(rows: list[dict[str, Any]], servers: dict[str, VllmServer]) -> None:
    """What the receipts of our servers say of each request."""
    receipts: dict[str, dict[str, Any]] = {}
    for name, server in servers.items():
        receipts |= server.read_receipts() if name != "stock" else {}
    for row in rows:
        name = f"{row['dataset']}-{row['length']}-{row['number']}".replace("/", "")
        for arm, found in row["arms"].items():
            mine = [one for request, one in receipts.items() if f"{name}-{arm}-" in f"{request}-"]
            found |= {field: mine[-1].get(field) for field in RECEIPT} if mine else {}


def summarize(values: Sequence[float]) -> list[float]:
    """p50, mean with its interval, p90, p99."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return [round(float(one), 2) for one in (p50, mean, mean - 1.96 * error, mean + 1.96 * error, p90, p99)]


def tabulate(rows: list[dict[str, Any]]) -> list[list[Any]]:
    lines = []
    for model, length in dict.fromkeys((row["model"], row["length"]) for row in rows):
        mine = [row["arms"] for row in rows if (row["model"], row["length"]) == (model, length)]
        cold = summarize([one["stock:cold"]["ttft_ms"] for one in mine])
        exact = summarize([one["stock:exact"]["ttft_ms"] for one in mine])
        for arm in ARMS:
            found = [one[arm] for one in mine if arm in one]
            if not found:
                continue
            line = summarize([one["ttft_ms"] for one in found])
            reused = statistics.fmean(bool(one.get("reused_tokens")) for one in found)
            closed = (cold[0] - line[0]) / (cold[0] - exact[0]) if cold[0] > exact[0] else 0.0
            lines.append([model, length, arm, len(found), reused, *line, line[3] / cold[1], line[4] / cold[4], closed])
    return lines


def tabulate_first(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """The first requests of a server after its start, against the median of later ones like them."""
    lines = []
    for server in ("stock", "ours"):
        found = [
            ((row["model"], row["length"], arm), one["number"], one["ttft_ms"])
            for row in rows
            for arm, one in row["arms"].items()
            if arm.startswith(server) and "number" in one
        ]
        later: dict[Any, list[float]] = {}
        for kind, number, ms in found:
            if number > FIRST:
                later.setdefault(kind, []).append(ms)
        ratios = [
            ms / statistics.median(later[kind]) for kind, number, ms in found if number <= FIRST and kind in later
        ]
        if ratios:
            lines.append(
                [server, len(ratios), *map(float, np.percentile(ratios, (50, 90, 100))), statistics.fmean(ratios)]
            )
    return lines


def tabulate_predictions(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """How far what was expected of a plan was from what it took."""
    lines = []
    for length in dict.fromkeys(row["length"] for row in rows):
        for arm in ("ours:balanced", "ours:later", "ours:fast", "ours:half"):
            found = [row["arms"][arm] for row in rows if row["length"] == length and arm in row["arms"]]
            found = [one for one in found if one.get("expected_ms") and one.get("service_ms")]
            served = [one["expected_ms"] / one["service_ms"] - 1 for one in found if one.get("reused_tokens")]
            cold = [one["expected_cold_ms"] / one["service_ms"] - 1 for one in found if not one.get("reused_tokens")]
            for what, off in (("reuse", served), ("prefill", cold)):
                if off:
                    median = float(np.median(np.abs(off)))
                    lines.append(
                        [length, arm, what, len(off), median, float(np.median(off)), float(np.mean(np.abs(off)))]
                    )
    return lines


def tabulate_regret(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """What it cost that a choice was not the better one, in prefills: ours began a reuse or not, `forced` always does.

    Against an oracle by prompt, whose choice knows the noise of both measurements too (so this is too much), and
    against one that knows both means of a length.
    """
    mine = [(row["length"], row["arms"]) for row in rows if "forced:balanced" in row["arms"]]
    lengths = np.array([length for length, _ in mine])
    pairs = np.array([(one["stock:cold"]["ttft_ms"], one["forced:balanced"]["ttft_ms"]) for _, one in mine])
    begun = np.array([bool(one["ours:balanced"].get("reused_tokens")) for _, one in mine])
    known = {length: pairs[lengths == length].mean(0).min() for length in dict.fromkeys(lengths.tolist())}
    by_length = np.array([known[length] for length in lengths.tolist()])
    lines = []
    for name in [*known, "all"] if mine else []:
        at = lengths == name if name != "all" else np.ones(len(mine), dtype=bool)
        chosen, cold, forced = np.where(begun, pairs[:, 1], pairs[:, 0])[at].mean(), *pairs[at].mean(0)
        regrets = [(chosen - best[at].mean()) / cold for best in (pairs.min(1), by_length)]
        lines.append([name, int(at.sum()), float(begun[at].mean()), *map(float, (cold, forced, *regrets))])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "vllm_pays")
    parser.add_argument("do", nargs="?", choices=("contexts", "measure"), default="measure")
    parser.add_argument("--contexts", default="contexts.json.gz", help="file of tokens")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 24576], help="tokens of a context")
    parser.add_argument("--cases", type=int, default=50, help="of each data set and length")
    parser.add_argument("--servers", nargs="+", default=["stock", "ours", "forced"])
    parser.add_argument("--start-apart", action="store_true", help="start one server after the other, and time it")
    parser.add_argument("--settings", default="{}", help="of `ours`, as JSON: no default any more")
    args = read_arguments(parser, lengths=[400], cases=2, memory=0.15)
    if args.do == "contexts":
        write_contexts(args.model, reporting.data_dir(args), args.contexts)
        return 0
    if not args.finished_only:
        measure(args)
    report, found = reporting.Report("vllm_pays", args), Rows(args.rows).rows
    rows = [row for row in found if "arms" in row]
    report.table(
        "Time to first token over HTTP, against stock vLLM",
        ["model", "tokens", "arm", "n", "reused", "p50 ms", "mean ms", "low", "high", "p90 ms", "p99 ms",
         "high over cold's mean", "p90 over cold's", "of the gap closed"],
        tabulate(rows),
    )  # fmt: skip
    report.table(
        "What was expected against what it took (shares)",
        ["tokens", "arm", "of", "n", "median error", "median bias", "mean error"],
        tabulate_predictions(rows),
    )
    report.table(
        "What choosing wrongly cost (shares of a prefill)",
        ["tokens", "n", "begun", "cold mean ms", "forced mean ms", "regret by prompt", "regret by length"],
        tabulate_regret(rows),
    )
    if first := tabulate_first(rows):
        report.table(
            f"The first {FIRST} requests after a start, in medians of later ones of their kind",
            ["server", "n", "p50", "p90", "largest", "mean"],
            first,
        )
    if started := [[row["started"], row["seconds"]] for row in found if "started" in row]:
        report.table("From the command to the first answer, one server after the other", ["server", "s"], started)
    write_report(
        report, args,
        "low, high: 95 % interval of the mean; the gap: from stock's cold to its exact hit, of medians",
        "reused: share of prompts of which the receipt says that donor KV was used",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
