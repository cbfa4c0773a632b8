"""Claim: reuse does not decay when the same documents come in ever new orders, for as long as they come.

    python bench/vllm_shuffle.py --measured-on "one H200, vLLM 0.26.0"
    python bench/vllm_shuffle.py --quick                                # two cores: shows that it works

The workload of LMCache issue 4663: each query has 14 documents of a small corpus in an order that was never there
before, and a question. There each novel order was stored whole and pushed out what could be reused, so that the gain
was gone after 60 to 90 queries. Here reuse is counted from receipts, by tenths of the run. The donor budget holds the
corpus and a little more, so that whoever stores every order must push something out.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import statistics
import sys
from typing import Any

from _vllm_runs import Budget, Rows, add_engine_arguments, make_task, read_arguments, run_engines, write_report

KINDS = {"stock": "stock vLLM", "fast": "fast", "balanced": "balanced"}
HEAD, QUESTION = 48, 24


def measure(args: argparse.Namespace) -> None:
    """Append a row for each query of one engine; a second run begins again, because caches do not survive."""
    from _vllm_engine import Engine

    rows, budget, kind = Rows(args.rows), Budget(args.budget_s), args.engine
    if len(rows.find(kind=kind)) >= args.queries:
        return
    attempt = 1 + max((row["attempt"] for row in rows.find(kind=kind)), default=0)
    longest = args.in_a_query * args.document + HEAD + QUESTION + 64
    where = "stock" if kind == "stock" else args.donors
    connector = {} if kind == "stock" else {"heal_prefixes": args.heal}
    engine = Engine(where, make_task(args, longest, connector=connector))
    asked = {} if kind == "stock" else {"quality": kind}
    corpus = [engine.tokens(args.document) for _ in range(args.documents)]
    instruction = engine.tokens(HEAD)
    for document in corpus:
        engine.ask(instruction + document + engine.tokens(QUESTION))
    for number in range(args.queries):
        if budget.is_used_up:
            break
        drawn = engine.rng.sample(corpus, args.in_a_query)
        ids = instruction + [token for document in drawn for token in document] + engine.tokens(QUESTION)
        found = engine.ask(ids, **asked)
        kept = {name: found.get(name) for name in ("ttft_ms", "cached", "exact_tokens", "reused_tokens",
                                                   "recomputed_tokens", "prefill_tokens", "outcome")}  # fmt: skip
        rows.add({"kind": kind, "attempt": attempt, "query": number, "tokens": len(ids), **kept})


def tabulate(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """One line for each kind and tenth of its last attempt: share of prompt tokens, and the median TTFT."""
    lines: list[list[Any]] = []
    for kind, words in KINDS.items():
        found = [row for row in rows if row["kind"] == kind]
        last = max((row["attempt"] for row in found), default=0)
        found = [row for row in found if row["attempt"] == last]
        tenth = -(-len(found) // 10)
        for number in range(0, len(found), tenth or 1):
            some = found[number : number + tenth]
            tokens = sum(row["tokens"] for row in some)
            shares = [sum(row.get(f"{name}_tokens") or 0 for row in some) / tokens for name in ("reused", "exact")]
            ttft = statistics.median(row["ttft_ms"] for row in some)
            lines.append([words, f"{number + 1}–{number + len(some)}", len(some), *shares, ttft])
    return lines


def find_decay(rows: list[dict[str, Any]], kind: str) -> float | None:
    """The reuse rate of the last tenth, of that of the first; None where there are not two."""
    shares = [line[3] for line in tabulate(rows) if line[0] == KINDS[kind]]
    return shares[-1] / shares[0] if len(shares) > 1 and shares[0] else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "vllm_shuffle")
    parser.add_argument("--documents", type=int, default=20, help="of the corpus")
    parser.add_argument("--in-a-query", type=int, default=14)
    parser.add_argument("--document", type=int, default=512, help="tokens of a document")
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--engines", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--donors", choices=("device", "host"), default="device")
    parser.add_argument("--held", type=float, default=2.0, help="donor budget, in times the corpus")
    parser.add_argument("--heal", action="store_true", help="prefixes that many load are computed exactly, once")
    args = read_arguments(parser, documents=6, in_a_query=4, document=96, queries=20, donors="host")
    if args.engine:
        args.donor_bytes = args.held * args.documents * (args.document + HEAD + QUESTION) * bytes_per_token(args)
        measure(args)
        return 0
    failed = 0 if args.finished_only else run_engines(args.engines)
    report, rows = _report.Report("vllm_shuffle", args), Rows(args.rows).rows
    report.table(
        f"Queries of {args.in_a_query} documents in a new order each, by tenths of the run",
        ["engine", "queries", "n", "reused share", "exact share", "TTFT p50 ms"],
        tabulate(rows),
    )
    decays = {kind: find_decay(rows, kind) for kind in ("fast", "balanced")}
    report.add("last tenth of first", decays)
    write_report(
        report, args, f"{args.documents} documents of {args.document} tokens; donors may hold {args.held} × the corpus",
        "share: of the prompts' tokens, from receipts; a random model's answers mean nothing, its times do",
        *(f"{kind}: the last tenth reuses {share:.2f} of the first's" for kind, share in decays.items() if share),
    )  # fmt: skip
    return 1 if failed or any(share is not None and share < 0.9 for share in decays.values()) else 0


def bytes_per_token(args: argparse.Namespace) -> int:
    """KV of one token in a shape, of all layers."""
    from _vllm_engine import SHAPES

    config, width = SHAPES[args.shape], 4 if args.dtype == "float32" else 2
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * width * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


if __name__ == "__main__":
    sys.exit(main())
