"""The first questions about documents that nobody has asked about: cold, and after `semblend warm`.

    python bench/warm.py --out bench/results/warm.json

`semblend warm` computes the passages of some questions into a donor directory. A server with that directory answers
each question in every arm:

    cold           without reuse, under a salt that nobody else has
    traffic        after somebody else's prompt with the same passages in the same order, under another instruction:
                   any other donor. Asker and donor have a salt of their own, so nothing of the directory is found
    warm           the first request to the tenant of the directory

Traffic and warm come in mode fast, then in balanced. Mode fast leaves no exact block behind its first reused token, so
the second is a first request too; the exact tokens of the receipt show it. Prompts are texts, so warm gets --format
text; bench/warm_donors.py has the same comparison for chat.

Every question is a row of --rows, and a second run goes on from there. Each question goes through all arms before the
next one, so that whatever else the machine does hits all arms alike. An answer is compared with the cold one.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _arm_servers import EmbeddedArms
from _documents import rag
from _report import Report, add_common_arguments, data_dir, progress
from _streams import Ranking, find_words
from _vllm_runs import Rows
from arrange_ttft import share_tokens, spread_times, write_prompt

from semblend.demo.runner import word_f1

OTHER_INSTRUCTION = "Here is what the archive holds. Read all of it, then write one sentence about it.\n\n"
ARMS = ("cold", "traffic, fast", "warm, fast", "traffic, balanced", "warm, balanced")
POOL_TOKENS = 8_192


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with it
    args = parse_arguments()
    rows = Rows(args.rows)
    if not args.finished_only:
        cases = choose_cases(args)
        with tempfile.TemporaryDirectory(prefix="warm-") as folder:
            donors = Path(folder, "donors")
            rows.add({"warm": run_warm(args, cases, Path(folder), donors)})
            ask_all(args, cases, Path(folder), donors, rows)
    report = Report("warm", args)
    tabulate(report, rows, args)
    report.write(args.out)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "warm")
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--rows", default="", help="a second run goes on from them (default: beside --out)")
    add("--finished-only", action="store_true", help="measure nothing, print the rows")
    add("--measured-on", default="", help="the machine, in words")
    add("--source", default="hotpotqa_distractor", help="a file of rag/: questions with passages")
    add("--questions", type=int, default=20)
    add("--top", type=int, default=3, help="passages of a question")
    add("--answer-tokens", type=int, default=16)
    add("--prompt-tokens", type=int, default=1024, help="of a donor that warm computes")
    args = parser.parse_args()
    args.questions = 2 if args.quick else args.questions
    args.rows = args.rows or str(Path(args.out or "warm.json").with_suffix(".rows.jsonl"))
    return args


def choose_cases(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Questions with the passages that BM25 finds; no passage belongs to two of them."""
    items = rag(data_dir(args), args.source)
    corpus = tuple(dict.fromkeys(part for item in items for part in item.parts))
    ranking, used, cases = Ranking(corpus), set[int](), []
    for question in dict.fromkeys(item.questions[0] for item in items):
        found = ranking.find_best(find_words(question), args.top)
        if len(cases) < args.questions and not used & set(found):
            used |= set(found)
            cases.append((question, [corpus[number] for number in found]))
    return cases


def run_warm(
    args: argparse.Namespace, cases: Sequence[tuple[str, list[str]]], folder: Path, donors: Path
) -> dict[str, Any]:
    """Write corpus and log as a user would, and compute them; what it took."""
    corpus, log = folder / "corpus.jsonl", folder / "log.jsonl"
    texts = [text for _, passages in cases for text in passages]
    corpus.write_text("\n".join(json.dumps({"id": str(at), "text": text}) for at, text in enumerate(texts)))
    numbers = iter(range(len(texts)))
    log.write_text("\n".join(json.dumps({"passages": [str(next(numbers)) for _ in found]}) for _, found in cases))
    words = ["warm", "--corpus", str(corpus), "--log", str(log), "--model", args.model, "--threads", "1",
             "--format", "text", "--donor-directory", str(donors),
             "--prompt-tokens", str(args.prompt_tokens)]  # fmt: skip
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "semblend.cli.main", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    spent, nbytes = time.perf_counter() - begun, sum(file.stat().st_size for file in donors.iterdir())
    progress(f"{done.stdout.strip()}, {nbytes:,} bytes, {spent:.0f} s")
    return {"said": done.stdout.strip(), "bytes": nbytes, "seconds": spent, "passages": len(texts)}


def ask_all(
    args: argparse.Namespace, cases: Sequence[tuple[str, list[str]]], folder: Path, donors: Path, rows: Rows
) -> None:
    flags = ["--quality", "balanced", "--donor-directory", str(donors)]
    server = EmbeddedArms(args.model, folder / "server", stock=False, pool_tokens=POOL_TOKENS, flags=flags)
    try:
        server.wait()
        server.ask("warm up " * 200, 4, name="warm-up", salt="warm up")
        for number, (question, passages) in enumerate(cases):
            if rows.find(number=number):
                continue
            prompt, tokens = write_prompt(passages, question), args.answer_tokens
            donor = OTHER_INSTRUCTION + "\n\n".join(passages) + "\n\nSentence:"
            row = {"cold": server.ask(prompt, tokens, name=f"cold-{number}", salt=f"cold-{number}")}
            server.ask(donor, 2, name=f"donor-{number}", salt=f"traffic-{number}", quality="exact")
            for arm in ARMS[1:]:
                donors_of, _, quality = arm.partition(", ")
                salt = "" if donors_of == "warm" else f"traffic-{number}"
                row[arm] = server.ask(prompt, tokens, name=f"{arm}-{number}", salt=salt, quality=quality)
            rows.add({"number": number, **{arm: reply.to_row() for arm, reply in row.items()}})
            progress(f"question {number + 1} of {len(cases)}")
    finally:
        server.stop()


def tabulate(report: Report, rows: Rows, args: argparse.Namespace) -> None:
    found = [row for row in rows.rows if "number" in row]
    some = {arm: [row[arm] for row in found] for arm in ARMS}
    report.table(
        f"First questions about {args.top} passages that nobody has asked about: {len(found)} questions",
        ["arm", "p50 ms", "p50, 95 %", "p90 ms", "mean ms", "mean / cold", "ratio, 95 %", "CPU p50 ms", "CPU mean ms"],
        [[arm, *spread_times(some[arm], some["cold"], args.seed)] for arm in ARMS],
    )
    report.table(
        "Prompt tokens by what became of them, and answers beside the cold ones",
        ["arm", "tokens a prompt", "exact", "moved KV", "computed", "declined after a look", "changed",
         "F1 against cold"],
        [[arm, *share_tokens(some[arm]), *compare_with_cold(some[arm], some["cold"])] for arm in ARMS],
    )  # fmt: skip
    taken = next(row["warm"] for row in rows.rows if "warm" in row)
    report.note(
        f"semblend warm: {taken['passages']} passages, {taken['said']}, {taken['bytes'] / 2**20:.0f} MiB, "
        f"{taken['seconds']:.0f} s with loading the model"
    )
    report.note(f"an answer is {args.answer_tokens} greedy tokens; changed: its text is not the cold one's")
    report.note("CPU: of all processes of the server until the first token; the machine was shared with other work")


def compare_with_cold(some: list[dict[str, Any]], cold: list[dict[str, Any]]) -> list[Any]:
    pairs = [(one["answer"], other["answer"]) for one, other in zip(some, cold, strict=True)]
    return [sum(a != b for a, b in pairs), statistics.fmean(word_f1(a, b) for a, b in pairs)]


if __name__ == "__main__":
    sys.exit(main())
