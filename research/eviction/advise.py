"""`semantickv advise` on four traces, the whole of each and its first half: does it say the same, or that it cannot?

    python bench/advise.py --data-dir DATA --pages outputs/advise

Recorded: Mooncake's conversations (6,015 requests, half an hour) and Azure's (lengths alone). Real text with drawn
arrivals: ShareGPT's chats and questions over shared passages. Everything is simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _report  # first: it sets the number of threads

from semantickv.analysis.advice import Advice
from semantickv.analysis.advise import Question, advise
from semantickv.output import advise_words
from semantickv.output.advise_page import write_advice
from semantickv.traces.trace import Trace
from semantickv.workloads.from_text import TextSource, generate_text_workload

POLICIES = ("lru", "lfu", "s3fifo", "arc", "belady")
COLUMNS = ["trace", "part", "requests", "hours", "verdict", "GPU GiB", "running GiB", "hits as it is", "most possible",
           "GiB of host memory", "policy", "hits with it", "low", "high", "left a day"]  # fmt: skip


def list_traces(data: Path, seed: int, quick: bool) -> dict[str, Callable[[], Trace]]:
    """The four traces, read or made when asked for."""

    def make(name: str) -> Trace:
        source = TextSource(data, seed, 100 if quick else None)
        return generate_text_workload(name, source)

    return {
        "mooncake": lambda: Trace.read(data / "traces" / "mooncake_conversation_first_half.jsonl.gz"),
        "azure": lambda: Trace.read(data / "traces" / "azure_llm_2023_conv.csv.gz"),
        "chats": lambda: make("chats"),
        "rag": lambda: make("rag"),
    }


def describe(made: Advice) -> list[Any]:
    """One row: the verdict, and the figures with their intervals where there are any."""
    if not made.can_tell:
        return ["cannot tell", *[None] * 10]
    choice, sure = made.choice, made.sureness
    added = choice if choice.adds else made.spare
    verdict = "leave it" if added is None else "if unused" if not choice.adds else "add" if not made.is_too_short else (
        "add, size unsure" if made.surely_helps_to_add else "too short"
    )  # fmt: skip
    rate = [None, None] if sure is None or not choice.adds else [sure.hit_rate.low, sure.hit_rate.high]
    return [
        verdict, made.to_gib(made.room.pool), made.to_gib(made.room.running), choice.own.token_hit_rate,
        made.ceiling.token_hit_rate, None if added is None else made.to_gib(added.added_tokens),
        choice.policy if added is None else added.policy, None if added is None else added.point.token_hit_rate, *rate,
        choice.net_a_day if made.by_price else None,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _report.add_common_arguments(parser, "advise")
    parser.add_argument("--pages", default="", metavar="DIR", help="write the pages there")
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "llama-3.1-70b"], help="whose KV and prefill")
    args = parser.parse_args()
    report = _report.Report("advise", args)
    data = _report.data_dir(args)
    traces = {name: read() for name, read in list_traces(data, args.seed, args.quick).items()}
    if args.quick:
        traces = {name: trace.take_first(400) for name, trace in traces.items()}
    for model in args.models:
        rows = []
        for name, trace in traces.items():
            for part, cut in (("whole", trace), ("half", trace.take_first(len(trace) // 2))):
                made = advise(cut, Question(model=model), policies=POLICIES)
                rows.append([name, part, len(cut), made.hours, *describe(made)])
                print(name, part, advise_words.format_headline(made), flush=True)
                if args.pages:
                    folder = Path(args.pages) / f"{model}_{name}_{part}"
                    folder.mkdir(parents=True, exist_ok=True)
                    write_advice(made, folder)
        report.table(f"{model} on an H200, prices of the package", COLUMNS, rows)
    report.note("left a day: USD, GPU hours saved less added memory, for traces of an hour or more; low and high: 95 %")
    report.note("size: the knee of the curve on traces under an hour; with the running requests and one of full length")
    report.note("simulated: no model ran")
    report.write(args.out)


if __name__ == "__main__":
    main()
