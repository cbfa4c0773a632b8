"""Request hit rate and time to first token on real chats, by turn: a prefix cache's hits and ours apart.

    PYTHONPATH=src:bench python bench/chats.py --data-dir DATA [--conversations 60] [--quality balanced] [--quick]

Conversations of ShareGPT with three turns of the user or more, the answers in the history as they were logged. Every
request is asked twice of `semblend serve`, in random order: *warm*, where all requests before it are donors and the
prefix cache is on, and *cold*, under a salt of its own. ``turn 3, oldest dropped`` is the third turn as clients with a
limited history send it: without the first exchange, so that a prefix cache has the instruction alone. Whoever talks
about hits must say of what: *exact* is the prefix cache, *moved* is KV that was materialized at another position by the
receipt. Time to first token is wall time; CPU time of the server up to then is steadier on a machine that does other
work.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _arm_servers import EmbeddedArms, Reply
from _documents import read_jsonl
from _vllm_runs import Rows

MODEL = "smollm2-135m"
SYSTEM = "You are a helpful assistant. Answer shortly."
DROPPED = "turn 3, oldest dropped"
KINDS = ("turn 1", "turn 2", "turn 3", DROPPED)
ANSWER_TOKENS = 1
COMMON_TOKENS = 16
"""One block: the template and the instruction that every request begins with."""

Message = dict[str, str]


def read_conversations(folder: Path, count: int, chars: int) -> Iterator[tuple[str, list[Message]]]:
    """Yield conversations whose first three turns of the user, with the answers between, fit into ``chars``."""
    found = 0
    for row in read_jsonl(folder / "chat" / "sharegpt_multiturn.jsonl.gz"):
        turns = row["conversations"][:5]
        roles = [turn["role"] for turn in turns]
        size = sum(len(turn["content"]) for turn in turns)
        if roles == ["user", "assistant", "user", "assistant", "user"] and chars // 2 <= size <= chars:
            yield row["id"], turns
            found += 1
            if found == count:
                return


def write_prompt(turns: Sequence[Message]) -> str:
    """Return the turns as a chat template of the ChatML family writes them."""
    said = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{said}<|im_start|>assistant\n"


def list_prompts(turns: Sequence[Message]) -> dict[str, str]:
    """Return the prompt of each kind, in the order in which a user sends them."""
    shown = {"turn 1": turns[:1], "turn 2": turns[:3], "turn 3": turns[:5], DROPPED: turns[2:5]}
    return {kind: write_prompt(own) for kind, own in shown.items()}


def measure(args: argparse.Namespace, rows: Rows) -> None:
    """Ask every request warm and cold; requests that an earlier run measured are sent warm again, not measured."""
    rng, begun = random.Random(args.seed), time.monotonic()
    folder = _report.data_dir(args)
    done = {(row["conversation"], row["kind"]) for row in rows.rows}
    with tempfile.TemporaryDirectory() as scratch:
        server = EmbeddedArms(MODEL, Path(scratch), stock=False, pool_tokens=16_384)
        try:
            server.wait()
            server.ask(write_prompt([{"role": "user", "content": "Hello."}]), 1, name="warm-up", salt="warm-up")
            for number, (name, turns) in enumerate(read_conversations(folder, args.conversations, args.chars), start=1):
                if args.budget_s and time.monotonic() - begun > args.budget_s:
                    _report.progress("the budget is spent; run again to go on")
                    break
                for kind, prompt in list_prompts(turns).items():
                    arms = rng.sample(("warm", "cold"), 2)
                    if (name, kind) in done:  # it is a donor for what follows
                        ask(server, prompt, "warm", f"{name}-{kind}", args.quality)
                        continue
                    found = {arm: ask(server, prompt, arm, f"{name}-{kind}", args.quality) for arm in arms}
                    rows.add({"conversation": name, "kind": kind, "first": arms[0],
                              **{arm: reply.to_row() for arm, reply in found.items()}})  # fmt: skip
                _report.progress(f"{number} of {args.conversations} conversations")
        finally:
            server.stop()


def ask(server: EmbeddedArms, prompt: str, arm: str, name: str, quality: str) -> Reply:
    if arm == "warm":
        return server.ask(prompt, ANSWER_TOKENS, name=name, salt="warm", quality=quality)
    return server.ask(prompt, ANSWER_TOKENS, name=name, salt=f"cold-{name}")


def tabulate(report: _report.Report, rows: Sequence[dict[str, Any]], quality: str) -> None:
    lines = [summarize(kind, [row for row in rows if row["kind"] == kind]) for kind in KINDS]
    lines.append(summarize("all", rows))
    columns = ["request", "n", "prompt tokens", "exact hits", "moved hits", "tokens not computed", "TTFT, all",
               "TTFT, hits alone", "CPU time, all", "CPU time, hits alone"]  # fmt: skip
    title = f"ShareGPT on semblend serve, {MODEL}, mode {quality}: cold over warm"
    report.table(title, columns, lines)


def summarize(kind: str, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """All: sums of cold over sums of warm. Hits alone: the median of the ratios of requests with a hit."""
    moved = [row for row in rows if row["warm"]["reused_tokens"]]
    exact = [row for row in rows if count_exact(row) and not row["warm"]["reused_tokens"]]
    total = sum(count_tokens(row) for row in rows)
    kept = sum(row["warm"]["exact_tokens"] + row["warm"]["reused_tokens"] for row in rows)
    hits = [*moved, *exact]
    ratios = [
        value
        for name in ("ttft_ms", "cpu_ms")
        for value in (
            sum(row["cold"][name] for row in rows) / sum(row["warm"][name] for row in rows),
            median(row["cold"][name] / max(row["warm"][name], 1.0) for row in hits) if hits else None,
        )
    ]
    return [kind, len(rows), total / len(rows), len(exact) / len(rows), len(moved) / len(rows), kept / total, *ratios]


def count_tokens(row: dict[str, Any]) -> int:
    return sum(row["warm"][f"{kind}_tokens"] for kind in ("exact", "reused", "recomputed", "prefill"))


def count_exact(row: dict[str, Any]) -> bool:
    """Whether the prefix cache held more than the template and the instruction that every request begins with."""
    return bool(row["warm"]["exact_tokens"] > COMMON_TOKENS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "chats")
    parser.add_argument("--conversations", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument("--chars", type=int, default=1600, metavar="N", help="of three turns at most, half at least")
    parser.add_argument("--quality", default="balanced", help="of warm requests (default: balanced)")
    parser.add_argument(
        "--budget-s", type=float, default=0.0, help="begin no conversation after this long; 0: no limit"
    )
    parser.add_argument("--rows", default="bench/results/chats.rows.jsonl", help="a second run goes on from it")
    parser.add_argument("--tables-only", action="store_true", help="ask nothing, read the rows")
    args = parser.parse_args()
    if args.quick:
        args.conversations, args.out, args.rows = 2, "", "/dev/null"
    report = _report.Report("chats", args)
    rows = Rows(args.rows)
    if not args.tables_only:
        measure(args, rows)
    tabulate(report, rows.rows, args.quality)
    report.note(
        "all: sums of cold over sums of warm; hits alone: median ratio; an exact hit is more than the first block of "
        "16, which the instruction that all requests share fills"
    )
    refused = Counter(row["warm"]["reason"] for row in rows.rows if row["kind"] == DROPPED)
    report.note(f"{DROPPED}, why nothing was moved: {', '.join(f'{why} {n}' for why, n in refused.items() if why)}")
    report.note("answers of one token; history as logged; one thread; the machine did other work")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
