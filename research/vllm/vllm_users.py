"""Claim: a hundred users of one new instruction and one document hold its KV once, and only the first pays for it.

    python bench/vllm_users.py --measured-on "one H200, vLLM 0.26.0"
    python bench/vllm_users.py --quick                                  # two cores: shows that it works

A donor holds the document under another instruction. Then all users ask at once, the same question or each one of its
own. Measured: KV blocks that are held at the most, the time until everybody has a first token and until everybody has
an answer. Engines: stock; ours; ours with healing (a prefix that many load is computed exactly, once); ours with
sharing switched off, so that every request has blocks of its own.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import statistics
import sys
import time
from collections import Counter
from itertools import product
from typing import Any

from _vllm_runs import (
    Budget,
    Rows,
    add_engine_arguments,
    make_task,
    read_arguments,
    run_engines,
    take_turn,
    write_report,
)

KINDS = {
    "stock": "stock vLLM",
    "fast": "fast",
    "balanced": "balanced",
    "fast-heal": "fast, prefixes healed",
    "balanced-heal": "balanced, prefixes healed",
    "fast-alone": "fast, nothing shared",
    "balanced-alone": "balanced, nothing shared",
}
ENGINES = {
    "stock": ("stock",),
    "device": ("fast", "balanced"),
    "heal": ("fast-heal", "balanced-heal"),
    "alone": ("fast-alone", "balanced-alone"),
}
CONNECTOR: dict[str, dict[str, Any]] = {
    "device": {"heal_prefixes": False},
    "heal": {"heal_prefixes": True},
    "alone": {"share_equal_prompts": False, "heal_prefixes": False},
}
QUESTIONS = ("the same", "their own")
HEAD, OTHER_HEAD, QUESTION = 64, 200, 24


def serve_users(engine: Any, args: argparse.Namespace, questions: str, asked: dict[str, Any]) -> dict[str, Any]:
    """All users at once; ``blocks`` are those that are held at the most."""
    core = engine.llm.llm_engine
    pool = core.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    document, instruction, question = engine.tokens(args.document), engine.tokens(OTHER_HEAD), engine.tokens(QUESTION)
    engine.ask(engine.tokens(HEAD) + document + engine.tokens(QUESTION))
    before = pool.get_num_free_blocks()
    begun = time.perf_counter()
    for user in range(args.users):
        ids = instruction + document + (question if questions == "the same" else engine.tokens(QUESTION))
        core.add_request(f"user-{user}", {"prompt_token_ids": ids}, engine.params(args.tokens, **asked))
    ttft: dict[str, float] = {}
    outcomes: Counter[str] = Counter()
    blocks = 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.outputs[0].token_ids:
                ttft.setdefault(output.request_id, (time.perf_counter() - begun) * 1e3)
            if output.finished:
                receipt = (output.kv_transfer_params or {}).get("semblend") or {}
                outcomes[receipt.get("outcome", "none")] += 1
        blocks = max(blocks, before - pool.get_num_free_blocks())
    return {
        "users": args.users, "blocks": blocks, "total_s": time.perf_counter() - begun, "outcomes": dict(outcomes),
        "ttft_p50": statistics.median(ttft.values()), "ttft_max": max(ttft.values()),
    }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Append the rows of one engine."""
    from _vllm_engine import Engine

    rows = Rows(args.rows)
    wanted = [
        {"kind": kind, "round": number, "questions": questions}
        for number in range(args.rounds)
        for questions in QUESTIONS
        for kind in ENGINES[args.engine]
    ]
    missing = [key for key in wanted if not rows.find(**key)]
    if not missing:
        return
    longest = args.document + OTHER_HEAD + QUESTION + args.tokens
    where = "stock" if args.engine == "stock" else args.donors
    engine = Engine(
        where, make_task(args, longest, max_requests=args.users + 4, connector=CONNECTOR.get(args.engine, {}))
    )
    with take_turn(args.turn):
        budget = Budget(args.budget_s)
        for key in [missing[0] | {"round": -1}, *missing]:  # the first one warms
            if budget.is_used_up:
                break
            asked = {} if key["kind"] == "stock" else {"quality": key["kind"].partition("-")[0]}
            found = serve_users(engine, args, key["questions"], asked)
            if key["round"] >= 0:
                rows.add(key | found)
            _report.progress(" ".join(map(str, key.values())))


def tabulate(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """One line for each kind of question and engine: medians over its rounds, and how often each outcome was."""
    lines = []
    for questions, (kind, words) in product(QUESTIONS, KINDS.items()):
        found = [row for row in rows if (row["questions"], row["kind"]) == (questions, kind)]
        if found:
            middle = [statistics.median(row[name] for row in found) for name in
                      ("blocks", "ttft_p50", "ttft_max", "total_s")]  # fmt: skip
            outcomes: Counter[str] = sum((Counter(row["outcomes"]) for row in found), Counter())
            said = ", ".join(f"{name} {count}" for name, count in outcomes.most_common() if name != "none")
            lines.append([questions, words, len(found), int(middle[0]), *middle[1:], said or "–"])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "vllm_users")
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--document", type=int, default=8000, help="shared tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--donors", choices=("device", "host"), default="device")
    args = read_arguments(parser, users=6, document=400, tokens=4, rounds=1, donors="host")
    if args.engine:
        measure(args)
        return 0
    failed = 0 if args.finished_only else run_engines(args.engines, args.turn)
    report = _report.Report("vllm_users", args)
    report.table(
        f"{args.users} users, one new instruction, one document of {args.document:,} tokens",
        ["questions", "engine", "rounds", "KV blocks held", "TTFT p50 ms", "TTFT max ms", "all answers s", "outcomes"],
        tabulate(Rows(args.rows).rows),
    )
    write_report(
        report, args, "KV blocks held: the most at any time above those held before the first user, donors left out",
        f"all users at once; answers of {args.tokens} tokens; medians over rounds",
    )  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
