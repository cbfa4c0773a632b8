"""Claim: through `vllm serve` over HTTP, on real text, a document under another instruction starts much sooner.

    python bench/vllm_http.py --model FOLDER --data-dir DATA --measured-on "one H200, vLLM 0.26.0"
    python bench/vllm_http.py --quick --model FOLDER --data-dir DATA    # two cores: shows that it works

The table of the source text: time to first token by data set (XSum, CNN/DailyMail, MultiNews, SAMSum) and context
length, hits alone and overall, with the perplexity ratio beside it. A context is articles of one data set, end to end.
Each arm of a case has a salt of its own, so that nothing is found by chance:

    cold    the prompt, opted out
    hit     after a donor: the same context under another instruction, with another question; modes fast and balanced
    miss    after that, another context: nothing to reuse, all the work of looking

Donors lie where the connector puts them by default, unless ``--donors`` says otherwise; a table says where they lay.
Overall: hits and misses, half and half. Perplexity: of the tokens of the greedy answer, by the engine's own log
probabilities; the ratio is that of the answer with reuse over that of the cold answer. FOLDER is a Hugging Face folder.
"""

from __future__ import annotations

import lib.reporting as reporting  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib import real_texts
from lib.vllm_runs import Budget, Rows, add_engine_arguments, read_arguments, take_turn, write_report
from lib.vllm_server import Answer, VllmServer

from semblend.config import GIB
from semblend.integration.vllm.settings import ConnectorSettings

DATASETS = {"XSum": "summ/xsum", "CNN/DailyMail": "summ/cnndm", "MultiNews": "longbench/multi_news",
            "SAMSum": "dialogue/samsum"}  # fmt: skip
MODES = ("fast", "balanced")
ARMS = ("cold", "balanced", "fast", "miss")  # as the table shows them: the default mode first
BY_LENGTH = "Time to first token through an HTTP server, by length"
INSTRUCTIONS = (
    "You are a careful assistant. Read the following texts.\n\n",
    "You work in the archive of a newspaper and help readers who ask for old stories. Here is what you have found.\n\n",
    "A colleague has left these texts on your desk, and will call in a minute to hear what you make of them.\n\n",
)
QUESTIONS = (
    "\n\nSummarize the texts above in two sentences.\nSummary:",
    "\n\nWho is named in the texts?\nAnswer:",
    "\n\nWhat happened first, and where?\nAnswer:",
)


def read_texts(folder: Path, source: str) -> list[str]:
    """The articles of a data set."""
    found = [*real_texts.articles(folder), *real_texts.dialogues(folder), *real_texts.longbench(folder)]
    return [document.text for document in found if document.source == source]


class Prompts:
    """Contexts of a length in tokens from the articles of each data set."""

    def __init__(self, model: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._texts = {name: read_texts(folder, source) for name, source in DATASETS.items()}
        self._encoded: dict[str, list[list[int]]] = {}

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def draw_context(self, dataset: str, tokens: int, rng: random.Random) -> list[int]:
        """Articles in a random order, cut at so many tokens."""
        if dataset not in self._encoded:
            self._encoded[dataset] = [self.encode(text + "\n\n") for text in self._texts[dataset]]
        drawn: list[int] = []
        order = rng.sample(self._encoded[dataset], len(self._encoded[dataset]))
        while len(drawn) < tokens:
            drawn += order.pop() if order else rng.choice(self._encoded[dataset])
        return drawn[:tokens]


def run_case(server: VllmServer, prompts: Prompts, args: argparse.Namespace, key: dict[str, Any]) -> dict[str, Any]:
    """All arms of one case."""
    name = f"{key['dataset']}-{key['length']}-{key['number']}".replace("/", "")
    rng = random.Random(f"{args.seed} {name}")
    context, other = (prompts.draw_context(key["dataset"], key["length"], rng) for _ in range(2))
    lead, ask = [prompts.encode(text) for text in INSTRUCTIONS], [prompts.encode(text) for text in QUESTIONS]
    target = lead[1] + context + ask[1]

    def say(arm: str, ids: list[int], salt: str, *, tokens: int = args.tokens, **asked: Any) -> Answer:
        wish = {"kv_transfer_params": {"semblend": asked}}
        return server.stream(ids, tokens, f"{name}-{arm}", cache_salt=f"{name}-{salt}", logprobs=1, **wish)

    found: dict[str, Any] = {"tokens": len(target)}
    answers = {"cold": say("cold", target, "nobody", opt_out=True)}
    for mode in MODES:
        say(f"donor-{mode}", lead[0] + context + ask[0], mode, tokens=2, quality="exact")
        answers[mode] = say(mode, target, mode, quality=mode)
    answers["miss"] = say("miss", lead[1] + other + ask[1], MODES[0], quality=MODES[0])
    for arm, answer in answers.items():
        receipt = server.find_receipt(f"{name}-{arm}")
        found[arm] = {
            "ttft_ms": answer.ttft_ms, "ppl": _perplexity(answer.logprobs), "cached": answer.cached_tokens,
            **{field: receipt.get(field) for field in ("outcome", "reason", "reused_tokens", "recomputed_tokens")},
        }  # fmt: skip
    return found


def _perplexity(logprobs: list[float]) -> float | None:
    return math.exp(-statistics.fmean(logprobs)) if logprobs else None


def measure(args: argparse.Namespace) -> None:
    """Append a row for each case that is not there yet."""
    rows = Rows(args.rows)
    cells = [
        (number, dataset, length) for number in range(args.cases) for length in args.lengths for dataset in DATASETS
    ]
    keys = [{"model": Path(args.model).name, "dataset": d, "length": length, "number": n} for n, d, length in cells]
    keys = [key for key in keys if not rows.find(**key)]
    if not keys:
        return
    prompts, longest = Prompts(args.model, reporting.data_dir(args)), max(args.lengths) + args.tokens + 256
    flags = ["--dtype", args.dtype, "--max-model-len", str(longest), "--max-num-batched-tokens", str(args.step_tokens),
             "--gpu-memory-utilization", str(args.memory), *(["--enforce-eager"] if args.eager else []),
             *(["--kv-cache-memory-bytes", str(int(args.kv_bytes))] if args.kv_bytes else [])]  # fmt: skip
    server = VllmServer(args.model, Path(tempfile.mkdtemp(prefix="vllm-http-")), flags, choose_memory(args))
    try:
        server.wait()
        with take_turn(args.turn):
            budget = Budget(args.budget_s)
            run_case(server, prompts, args, keys[0] | {"number": "warm"})
            for key in keys:
                if budget.is_used_up:
                    break
                rows.add(key | {"memory": choose_memory(args)} | run_case(server, prompts, args, key))
                reporting.progress(f"{key['dataset']} {key['length']} {key['number']}")
    finally:
        server.stop()


def choose_memory(args: argparse.Namespace) -> dict[str, int]:
    """The settings of donor memory; by default those of the runs that were published first."""
    if args.donors in (None, "default"):
        return {"donor_host_bytes": 4 * GIB, "donor_device_bytes": 0}
    return {f"donor_{tier}_bytes": int(args.donor_bytes) if args.donors == tier else 0 for tier in ("host", "device")}


def read_memory(rows: list[dict[str, Any]], args: argparse.Namespace) -> ConnectorSettings:
    """Where the donors of these rows lay: as the rows say, or as the flag says of rows that do not."""
    told = {json.dumps(row["memory"]) for row in rows if "memory" in row}
    if len(told) > 1:
        reporting.fail("these rows were measured with different donor memory", hint="a file for each setting")
    if not told and args.donors is None:
        reporting.fail("these rows do not say where donors lay", hint="say it: --donors default, host or device")
    named = json.loads(told.pop()) if told else {}
    return ConnectorSettings(**(named or choose_memory(args)))  # rows that name nothing are of before 2026-11-18


def tabulate_by_length(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[list[Any]]:
    """One line for each model, length and arm, over all data sets: misses beside hits, the mean beside the median.

    An arm counts in full: a prompt that was declined, or computed after all, is one of those that asked for reuse.
    """
    lines = []
    settings = read_memory(rows, args)
    tier = "device" if settings.donor_device_bytes else "host"
    held_bytes = settings.donor_device_bytes or settings.donor_host_bytes
    for model, length in sorted(dict.fromkeys((row["model"], row["length"]) for row in rows)):
        some = [row for row in rows if (row["model"], row["length"]) == (model, length)]
        cold = statistics.fmean(row["cold"]["ttft_ms"] for row in some)
        for arm in ARMS:
            ours = [row[arm] for row in some]
            times = sorted(one["ttft_ms"] for one in ours)
            again = int(statistics.median(one["recomputed_tokens"] or 0 for one in ours))
            hits, mean = sum(bool(one["reused_tokens"]) for one in ours), statistics.fmean(times)
            spread = [statistics.median(times), mean, reporting.percentile(times, 90), mean / cold]
            lines.append([model, length, arm, tier, held_bytes, len(ours), hits, again, *spread])
    return lines


def tabulate(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """One line for each model, data set, length and mode."""
    lines = []
    keys = dict.fromkeys((row["model"], row["dataset"], row["length"]) for row in rows)
    for model, dataset, length in sorted(keys, key=lambda key: (key[0], list(DATASETS).index(key[1]), key[2])):
        some = [row for row in rows if (row["model"], row["dataset"], row["length"]) == (model, dataset, length)]
        cold = statistics.median(row["cold"]["ttft_ms"] for row in some)
        misses = [row["miss"]["ttft_ms"] for row in some]
        for mode in MODES:
            hits = [row for row in some if row[mode]["reused_tokens"]]
            times = [row[mode]["ttft_ms"] for row in hits]
            everything = statistics.fmean([*(row[mode]["ttft_ms"] for row in some), *misses])
            cold_mean = statistics.fmean(row["cold"]["ttft_ms"] for row in some)
            ratios = [row[mode]["ppl"] / row["cold"]["ppl"] for row in hits if row["cold"]["ppl"]]
            hit = statistics.median(times) if times else None
            lines.append([model, dataset, length, mode, len(some), len(hits), cold, hit, cold / hit if hit else None,
                          cold_mean / everything, statistics.fmean(ratios) if ratios else None])  # fmt: skip
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "vllm_http")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 24576], help="tokens of a context")
    parser.add_argument("--cases", type=int, default=15, help="of each data set and length")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    where = "where donors lie: as the connector has it by default, or --donor-bytes in host or device memory"
    parser.add_argument("--donors", choices=("default", "device", "host"), default=None, help=where)
    args = read_arguments(parser, lengths=[500], cases=1, tokens=8, donors="host", memory=0.15)
    if not args.model and not args.finished_only:
        reporting.fail("no weights given", hint="--model is a Hugging Face folder")
    if not args.finished_only:
        measure(args)
    report = reporting.Report("vllm_http", args)
    rows = Rows(args.rows).rows
    report.table(
        BY_LENGTH,
        ["model", "tokens", "arm", "donors in", "bytes", "n", "with reuse", "computed again", "p50 ms", "mean ms",
         "p90 ms", "mean over cold"],
        tabulate_by_length(rows, args),
    )  # fmt: skip
    report.table(
        "Time to first token through an HTTP server, by data set",
        ["model", "data set", "tokens", "mode", "n", "hits", "cold p50 ms", "hit p50 ms", "hit-only speed-up",
         "overall speed-up", "PPL ratio"],
        tabulate(rows),
    )  # fmt: skip
    write_report(
        report, args,
        "cold: our engine, opted out; miss: another text of the same data set; computed again: tokens, the median",
        "hits: prompts of which the receipt says that donor KV was used; speed-up: cold over this",
        "hit-only: medians; overall: means over all prompts, half of which have no donor",
        f"PPL ratio: mean over hits, answers of {args.tokens} greedy tokens, each under its own log probabilities",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
