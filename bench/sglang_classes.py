"""The classes of SGLang's pull request 31057: how close are answers with reuse to cold ones, and how much sooner.

    python bench/sglang_classes.py --data-dir DATA --model smollm2-135m --lengths 4096 8000
    .ci/engines/sglang-cpu python bench/sglang_classes.py --engine sglang --model FOLDER --data-dir DATA --lengths 2000

The pull request publishes an A/B at 8K and 16K and not its prompts, so they are built as it describes them, of
CNN/DailyMail and XSum articles (it took WikiHow, which is not at hand). A donor is an instruction, articles and a
question. A query is

    exact        the donor's prompt again
    partial_N    N % of the articles, in their order, among others; the first article is always another one
    paraphrase   the same articles, about one word in twelve replaced, added or left out
    diverse      other articles

asked cold, cold again (the noise floor), and with reuse in modes fast and balanced. Answers are greedy. Rows go to
--rows; a second run goes on from them. What the pull request says of itself stands beside it, as published.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import _documents
from _sglang_server import CPU_FLAGS, SglangServer, read_cpu_ms
from _transforms import edited
from _vllm_runs import Budget, Rows, write_report

CLASSES = ("exact", "partial_60", "partial_80", "paraphrase", "diverse")
RECEIPT = ("reused_tokens", "exact_tokens", "outcome", "reason")
ARMS = ("rerun", "fast", "balanced")
DATASETS = {"CNN/DailyMail": "summ/cnndm", "XSum": "summ/xsum"}
INSTRUCTION = "<|im_start|>user\nRead the following articles with care.\n\n"
QUESTION = "\n\nSummarize the articles above in a few sentences.<|im_end|>\n<|im_start|>assistant\n"
PUBLISHED = {
    "exact": (None, 3264, 44, 0.941, 0.955),
    "partial_60": (0.88, 3254, 646, 0.547, 0.587),
    "partial_80": (0.58, 3257, 1700, 0.449, 0.490),
    "paraphrase": (0.76, 3262, 1034, 0.478, 0.525),
    "diverse": (0.00, 3262, 3318, 0.878, 0.898),
}
"""Of the pull request's text: share cached, ms cold, ms with reuse, ROUGE-L and token F1 against cold."""


class Serves(Protocol):
    """An engine over HTTP."""

    def ask(self, prompt: list[int], tokens: int, name: str, salt: str, **asked: Any) -> dict[str, Any]:
        """Text, times until the first token, and what was reused."""

    def stop(self) -> None: ...


class EmbeddedServer:
    """`semblend serve`: this project's own engine, on whatever device it finds."""

    def __init__(self, model: str, longest: int, device: str) -> None:
        self.model = model
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "semblend.cli.main", "serve", "--model", model, "--port", str(self.port),
                   "--threads", "1", "--pool-tokens", str(4 * longest), "--donor-bytes", "4294967296"]  # fmt: skip
        command += ["--device", device] if device else []
        self.log = Path(tempfile.mkdtemp(prefix="classes-")) / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + 300
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).read()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise RuntimeError("the server did not come up: " + self.log.read_text(errors="replace")[-2000:])

    def ask(self, prompt: list[int], tokens: int, name: str, salt: str, **asked: Any) -> dict[str, Any]:
        asked = {"reuse": False} if asked.pop("opt_out", False) else asked
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
                "cache_salt": salt, "semblend": asked, "stream_options": {"include_usage": True}}  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Request-Id": name},
        )  # fmt: skip
        found: dict[str, Any] = {"text": "", "ttft_ms": None, "reused_tokens": 0, "exact_tokens": 0}
        cpu, begun = read_cpu_ms(self.process.pid), time.perf_counter()
        with urllib.request.urlopen(request, timeout=3600) as lines:
            for line in lines:
                data = line.decode().removeprefix("data: ").strip()
                if data.startswith("{"):
                    self._read_chunk(json.loads(data), found, begun, cpu)
        return found

    def _read_chunk(self, chunk: dict[str, Any], found: dict[str, Any], begun: float, cpu: float) -> None:
        for choice in chunk.get("choices", ()):
            if choice.get("text") and found["ttft_ms"] is None:
                found["ttft_ms"] = (time.perf_counter() - begun) * 1e3
                found["cpu_ms"] = read_cpu_ms(self.process.pid) - cpu
            found["text"] += choice.get("text") or ""
        said = chunk.get("semblend") or {}
        found |= {name: said[name] for name in RECEIPT if name in said}

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


class ServedSglang:
    """SGLang on a CPU with our cache."""

    def __init__(self, model: str, longest: int) -> None:
        flags = [*CPU_FLAGS, "--context-length", str(longest), "--max-total-tokens", str(4 * longest)]
        self.server = SglangServer(model, Path(tempfile.mkdtemp(prefix="classes-")), flags, {})
        self.server.wait()

    def ask(self, prompt: list[int], tokens: int, name: str, salt: str, **asked: Any) -> dict[str, Any]:
        answer = self.server.stream(prompt, tokens, name, salt, timeout=3600, **asked)
        receipt = self.server.find_receipt(name)
        return {
            "text": answer.text, "ttft_ms": answer.ttft_ms, "cpu_ms": answer.cpu_ms,
            **{field: receipt.get(field) for field in RECEIPT},
        }  # fmt: skip

    def stop(self) -> None:
        self.server.stop()


def build(texts: list[str], encode: Any, length: int, rng: random.Random) -> tuple[list[int], dict[str, list[int]]]:
    """The donor's prompt, and the query of every class, cut at ``length`` tokens."""
    order = rng.sample(texts, len(texts))
    head, tail = encode(INSTRUCTION), encode(QUESTION)
    room = length - len(head) - len(tail)

    def fill(count: int = 0) -> list[str]:
        """Articles that nobody has yet: as many, or as fill the prompt."""
        found: list[str] = []
        while len(found) < count if count else sum(len(encode(one)) for one in found) < room:
            found.append(order.pop() + "\n\n")
        return found

    def put(articles: list[str]) -> list[int]:
        return [*head, *[token for one in articles for token in encode(one)][:room], *tail]

    articles = fill()
    queries = {"exact": put(articles), "paraphrase": put([edited(one, 12, rng) + "\n\n" for one in articles])}
    for share in (60, 80):
        replaced = {0, *rng.sample(range(1, len(articles)), max(0, round(len(articles) * (1 - share / 100)) - 1))}
        others = fill(len(replaced))
        queries[f"partial_{share}"] = put([others.pop() if at in replaced else one for at, one in enumerate(articles)])
    queries["diverse"] = put(fill())
    return put(articles), queries


def run_class(
    engine: Serves, donor: list[int], query: list[int], name: str, tokens: int, *, floor: bool
) -> dict[str, Any]:
    """Cold, cold again, and both modes, each under a salt of its own."""
    cold = engine.ask(query, tokens, f"{name}-cold", f"{name} cold", opt_out=True)
    found = {"tokens": len(query), "cold": cold}
    if floor:
        found["rerun"] = engine.ask(query, tokens, f"{name}-rerun", f"{name} rerun", opt_out=True)
    for mode in ("fast", "balanced"):
        salt = f"{name.rpartition('-')[0]} {mode}"  # all queries of a cluster find the same donor, computed once
        engine.ask(donor, 1, f"{name}-{mode}-donor", salt, quality="exact")
        found[mode] = engine.ask(query, tokens, f"{name}-{mode}", salt, quality=mode)
    return found


def measure(args: argparse.Namespace) -> None:
    """Append a row for every class of every cluster that is not there yet."""
    from tokenizers import Tokenizer

    rows, budget, folder = Rows(args.rows), Budget(args.budget_s), _report.data_dir(args)
    tokenizer = Tokenizer.from_file(args.tokenizer_file or str(Path(args.model) / "tokenizer.json"))
    texts = {
        name: [document.text for document in _documents.articles(folder) if document.source == source]
        for name, source in DATASETS.items()
    }
    longest = max(args.lengths) + args.answer + 64
    label = {"embedded": "embedded engine", "sglang": "SGLang 0.5.23"}[args.engine]
    engine: Serves = (
        EmbeddedServer(args.model, longest, args.device)
        if args.engine == "embedded"
        else ServedSglang(args.model, longest)
    )
    try:
        for number in range(args.clusters):
            for length in args.lengths:
                dataset = list(DATASETS)[number % len(DATASETS)]
                rng = random.Random(f"{args.seed} {number} {length}")
                donor, queries = build(
                    texts[dataset], lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), length, rng
                )
                for kind in args.classes:
                    key = {"engine": label, "length": length, "number": number, "class": kind}
                    if rows.find(**key) or budget.is_used_up:
                        continue
                    name = f"{number}-{length}-{kind}"
                    found = run_class(engine, donor, queries[kind], name, args.answer, floor=number == 0 or args.floor)
                    rows.add(key | {"dataset": dataset, **found})
                    _report.progress(name)
    finally:
        engine.stop()


def rouge_l(one: str, other: str) -> float:
    """F of the longest common subsequence of words.

    >>> rouge_l("a b c d", "a c d e")
    0.75
    """
    a, b = one.lower().split(), other.lower().split()
    if not a or not b:
        return float(a == b)
    row = [0] * (len(b) + 1)
    for word in a:
        last = 0
        for at, known in enumerate(b, start=1):
            last, row[at] = row[at], last + 1 if word == known else max(row[at], row[at - 1])
    return 2 * row[-1] / (len(a) + len(b))


def word_overlap(one: str, other: str) -> float:
    """Token F1 as the pull request names it: words, without their order.

    >>> word_overlap("the red house", "the red roof")
    0.6666666666666666
    """
    a, b = one.lower().split(), other.lower().split()
    shared = sum(min(a.count(word), b.count(word)) for word in set(a))
    return 2 * shared / (len(a) + len(b)) if a and b else float(a == b)


def tabulate(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """A line for each engine, length, class and arm."""
    lines = []
    for engine, length in sorted({(row["engine"], row["length"]) for row in rows}):
        for kind in CLASSES:
            some = [row for row in rows if (row["engine"], row["length"], row["class"]) == (engine, length, kind)]
            for arm in ARMS:
                picked = [row for row in some if arm in row]
                if not picked:
                    continue
                pairs = [(row[arm]["text"], row["cold"]["text"]) for row in picked]
                total = sum(row["tokens"] for row in picked)
                lines.append([
                    engine, length, kind, "cold again" if arm == "rerun" else arm, len(picked),
                    sum(row[arm].get("reused_tokens") or 0 for row in picked) / total,
                    sum(row[arm].get("exact_tokens") or 0 for row in picked) / total,
                    statistics.median(row["cold"]["cpu_ms"] for row in picked),
                    statistics.median(row[arm]["cpu_ms"] for row in picked),
                    statistics.median(row["cold"]["cpu_ms"] / max(row[arm]["cpu_ms"], 1.0) for row in picked),
                    statistics.fmean(rouge_l(*pair) for pair in pairs),
                    statistics.fmean(word_overlap(*pair) for pair in pairs),
                ])  # fmt: skip
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "sglang_classes")
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokenizer-file", default="", help="tokenizer.json, where --model is no folder with one")
    parser.add_argument("--device", default="", help="of the embedded engine")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8000])
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--clusters", type=int, default=2)
    parser.add_argument("--floor", action="store_true", help="ask cold twice in every cluster, not only in the first")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rows", default="bench/results/sglang_classes.rows.jsonl")
    parser.add_argument("--budget-s", type=float, default=0.0)
    parser.add_argument("--finished-only", action="store_true")
    parser.add_argument("--measured-on", default="")
    parser.add_argument("--note", action="append", default=[])
    args = parser.parse_args()
    if not args.finished_only:
        measure(args)
    report = _report.Report("sglang_classes", args)
    report.table(
        "Ours, SmolLM2-135M in float32",
        ["engine", "tokens", "class", "arm", "n", "reused", "exact", "cold CPU ms", "CPU ms", "cold/this", "ROUGE-L",
         "token F1"],
        tabulate(Rows(args.rows).rows),
    )  # fmt: skip
    report.table(
        "Pull request 31057, as published by its author (not measured here; another model, a GPU, other prompts)",
        ["class", "cached", "cold TTFT ms", "TTFT ms", "cold/this", "ROUGE-L", "token F1"],
        [
            [kind, cached, cold, warm, cold / warm, rouge, f1]
            for kind, (cached, cold, warm, rouge, f1) in PUBLISHED.items()
        ],
    )
    write_report(
        report, args, "ROUGE-L and token F1: of the answer against the cold answer to the same prompt",
        "CPU ms: of the server until the first token; reused, exact: shares of the prompt's tokens",
        "as published, its noise floor (cold twice, with batching) is 0.88 and 0.90",
        "16K is more than this model's context",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
