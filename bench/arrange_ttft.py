"""TTFT through `semblend serve` on a retrieval workload: stock, reuse at any offset, arranged, both; and a warm corpus.

    python bench/arrange_ttft.py --prompts 40 --out bench/results/arrange_ttft.json

Each arm has a server of its own and gets the same questions in the same order, one after the other, for one token each:
the time of a whole request is its time to the first token, HTTP included. Stock and arranged run with quality exact
(the prefix cache alone), the others with --quality.
The passages are arranged on the client by `Arranger`, which is told the size of the server's KV pool.

The warm part asks one question about documents that nobody has asked about: a server with an empty donor directory, and
one whose directory was filled by `semblend warm`, both over the same documents.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from _documents import rag
from _report import Report, add_common_arguments, data_dir, percentile, progress
from _streams import PromptStream, retrieve

from semblend.arrange import Arranger

INSTRUCTION = "Answer the question with the passages below.\n\n"
POOL_TOKENS = 16_384
ARMS = {
    "stock": ("exact", False),
    "any offset": ("", False),
    "arranged": ("exact", True),
    "arranged and any offset": ("", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "arrange_ttft")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--top", type=int, default=5, help="passages of a prompt")
    parser.add_argument("--words", type=int, default=120, help="words of a passage")
    parser.add_argument("--quality", default="balanced")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--warm", type=int, default=8, help="questions of the warm part; 0 leaves it out")
    args = parser.parse_args()
    report = Report("arrange_ttft", args)
    stream, questions = make_stream(args)
    compare_arms(report, stream, args)
    if args.warm:
        compare_warm(report, stream, questions, args)
    report.write(args.out)


def make_stream(args: argparse.Namespace) -> tuple[PromptStream, list[str]]:
    items = rag(data_dir(args), "cacheblend_musique_s")
    corpus = tuple(dict.fromkeys(" ".join(part.split()[: args.words]) for item in items for part in item.parts))
    questions = [item.questions[0] for item in items]
    return retrieve("musique", corpus, questions, top=args.top, count=args.prompts, seed=args.seed), questions


def compare_arms(report: Report, stream: PromptStream, args: argparse.Namespace) -> None:
    rows = []
    for name in args.arms:
        quality, arranged = ARMS[name]
        progress(f"{name}: {len(stream.prompts)} prompts")
        arranger = Arranger(count=lambda text: max(1, len(text) * 10 // 45), exact_size=POOL_TOKENS)
        times, receipts = [], []
        with serve(args.model, quality or args.quality) as url:
            ask(url, args.model, INSTRUCTION + "warm up " * 200)
            for number, prompt in enumerate(stream.prompts):
                passages = [stream.texts[passage] for passage in prompt]
                if arranged:
                    found = arranger.arrange(passages)
                    arranger.record(found)
                    passages = [passages[index] for index in found.order]
                seconds, receipt = ask(url, args.model, write_prompt(passages, f"Question {number}?"))
                times.append(seconds * 1e3)
                receipts.append(receipt)
        report.add(name, {"ms": times, "receipts": receipts})
        rows.append([name, len(times), *spread_ms(times), *share_tokens(receipts)])
        progress(f"{rows[-1]}")
    columns = ["arm", "n", "p50 ms", "p90 ms", "mean ms", "exact", "reused at any offset", "declined"]
    report.table("TTFT over HTTP, one request after the other", columns, rows)


def compare_warm(report: Report, stream: PromptStream, questions: Sequence[str], args: argparse.Namespace) -> None:
    del questions
    chosen = list(dict.fromkeys(stream.prompts))[: args.warm]
    with tempfile.TemporaryDirectory() as folder:
        corpus, log, donors = Path(folder, "corpus.jsonl"), Path(folder, "log.jsonl"), Path(folder, "donors")
        used = sorted({passage for prompt in chosen for passage in prompt})
        corpus.write_text("\n".join(json.dumps({"id": str(one), "text": stream.texts[one]}) for one in used))
        log.write_text("\n".join(json.dumps({"passages": [str(one) for one in prompt]}) for prompt in chosen))
        started = time.perf_counter()
        command = ["warm", "--corpus", str(corpus), "--log", str(log), "--model", args.model]
        run_semblend(*command, "--donor-directory", str(donors), "--prompt-tokens", "1024")
        spent = time.perf_counter() - started
        nbytes = sum(file.stat().st_size for file in donors.iterdir())
        rows = []
        for name, quality, directory in (
            ("cold", "exact", None),
            ("warm, fast", "fast", donors),
            (f"warm, {args.quality}", args.quality, donors),
        ):
            progress(f"{name}: {len(chosen)} first questions")
            times, receipts = [], []
            with serve(args.model, quality, directory) as url:
                ask(url, args.model, INSTRUCTION + "warm up " * 200)
                time.sleep(2)  # the folder is listed once a second, and its files are verified
                for number, prompt in enumerate(chosen):
                    passages = [stream.texts[passage] for passage in prompt]
                    seconds, receipt = ask(url, args.model, write_prompt(passages, f"Question {number}?"))
                    times.append(seconds * 1e3)
                    receipts.append(receipt)
            report.add(f"first questions, {name}", {"ms": times, "receipts": receipts})
            rows.append([name, len(times), *spread_ms(times), *share_tokens(receipts)])
    columns = ["arm", "n", "p50 ms", "p90 ms", "mean ms", "exact", "reused at any offset", "declined"]
    report.table("First questions about documents that nobody has asked about", columns, rows)
    report.note(f"semblend warm: {len(used)} passages, {nbytes / 2**20:.0f} MiB, {spent:.0f} s with loading the model")


def write_prompt(passages: Sequence[str], question: str) -> str:
    return INSTRUCTION + "\n\n".join(passages) + f"\n\n{question}"


def spread_ms(times: list[float]) -> list[float]:
    ordered = sorted(times)
    return [percentile(ordered, 50), percentile(ordered, 90), sum(times) / len(times)]


def share_tokens(receipts: list[dict]) -> list[float]:  # type: ignore[type-arg]
    """Of all prompt tokens: exact, reused; and how many requests were declined after a donor was found."""
    kinds = ("exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens")
    tokens = sum(one[kind] for one in receipts for kind in kinds)
    parts = [sum(one[name] for one in receipts) / tokens for name in ("exact_tokens", "reused_tokens")]
    return [*parts, sum(1 for one in receipts if one.get("reason") == "quality_risk")]


def ask(url: str, model: str, prompt: str) -> tuple[float, dict]:  # type: ignore[type-arg]
    """Seconds until one token is there, and the receipt."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.loads(reply.read())
    return time.perf_counter() - started, answer["semblend"]


@contextmanager
def serve(model: str, quality: str, directory: Path | None = None) -> Iterator[str]:
    words = ["serve", "--model", model, "--quality", quality, "--port", "0", "--pool-tokens", str(POOL_TOKENS)]
    if directory is not None:
        words += ["--donor-directory", str(directory)]
    command = [sys.executable, "-m", "semblend.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def run_semblend(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "semblend.cli.main", *words], check=True, capture_output=True)


if __name__ == "__main__":
    main()
