"""The same queries and donors for us, for the peers and for plain baselines, side by side.

    python bench/peers.py --setup                  # once: environments below .peers/, from constraints/peer.txt
    python bench/peers.py --data-dir DATA [--quick] [--out bench/results/peers.json]

docs/research/peers.md has all of them on one page. This script is about finding what can be reused. Every system runs
in its own process and environment, on one thread, and gets lists of integers. Recall is scored here, by the oracle of
bench/recall.py: tokens in runs of 32 or more that some donor holds. The corpus is capped, because some of the systems
need a second for a lookup; all of them get the same cap. A system that can't be loaded stays in the result with its
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lib.reporting as reporting
import numpy as np
from lib import corpus as corpus_module
from lib.reporting import REPO, progress, spread
from lib.scoring import Score, by_kind, score, summary

ADAPTERS = Path(__file__).resolve().parent / "lib" / "peer_adapters"
CONSTRAINTS = REPO / "constraints" / "peer.txt"
LIMIT_S = 20.0
SEMBLEND, LMCACHE = "semblend-0.3.25", "lmcache-0.5.6"
LMCACHE_NEEDS = (
    "torch", "numpy", "numba", "msgspec", "pydantic", "sortedcontainers", "prometheus_client", "py-cpuinfo", "psutil",
    "aiohttp", "requests", "cachetools", "PyYAML", "cryptography", "opentelemetry-api", "opentelemetry-sdk",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system as the table names it, how it is started, and what a reader must know about it."""

    name: str
    adapter: str
    flags: tuple[str, ...] = ()
    environment: str = ""
    remark: str = ""


CONTESTANTS = (
    Contestant("this project", "ours.py", remark="defaults, embedder none"),
    Contestant(
        "semblend 0.3.25, perfect embedder", "semblend_0325.py", ("--embedder", "oracle"), SEMBLEND,
        "defaults; a stand-in embedder names the right donors at no cost: an upper bound, MiniLM would add over a CPU "
        "second a prompt",
    ),
    Contestant(
        "semblend 0.3.25, perfect embedder, multi-donor", "semblend_0325.py",
        ("--embedder", "oracle", "--multi-donor", "1"), SEMBLEND, "SEMBLEND_MULTI_DONOR=1, chunks of 16 tokens",
    ),
    Contestant(
        "semblend 0.3.25, jaccard", "semblend_0325.py", ("--embedder", "jaccard"), SEMBLEND,
        "the embedder that needs no model; it embeds nothing, so its vector search can't propose a donor",
    ),
    Contestant(
        "LMCache 0.5.6 matcher, chunk 256", "lmcache_056.py", ("--chunk", "256"), LMCACHE,
        "BlendTokenRangeMatcher with its default chunk",
    ),
    Contestant(
        "LMCache 0.5.6 matcher, chunk 32", "lmcache_056.py", ("--chunk", "32"), LMCACHE,
        "the same with the finest chunk that the oracle's runs allow, not its default",
    ),
    Contestant("prefix blocks of 16", "baselines.py", ("--system", "prefix"), remark="exact-prefix cache, pure Python"),
    Contestant(
        "content blocks of 16", "baselines.py", ("--system", "content"),
        remark="blocks by content on a fixed grid, pure Python",
    ),
    Contestant(
        "dict of 16-grams", "baselines.py", ("--system", "ngrams"),
        remark="every 16th 16-gram in a dict, extended both ways, pure Python",
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reporting.add_common_arguments(parser, "peers")
    parser.add_argument("--setup", action="store_true", help="create the environments of the peers and stop")
    parser.add_argument("--peers-dir", default=str(REPO / ".peers"), help="where the environments live")
    parser.add_argument("--donors", type=int, default=388, help="cap on donors, the same for every system")
    parser.add_argument("--per-class", type=int, default=10, help="cap on queries of a class")
    parser.add_argument("--max-tokens", type=int, default=40_000, help="leave longer prompts out, for every system")
    parser.add_argument("--budget-s", type=float, default=240.0, help="CPU seconds that a system may spend on lookups")
    parser.add_argument("--only", default="", help="run only systems whose name contains this")
    args = parser.parse_args(arguments)
    if args.setup:
        return set_up(Path(args.peers_dir))
    report = reporting.Report("peers", args)
    full = corpus_module.load(args).shorter_than(args.max_tokens)
    corpus = full.capped(60, 2) if args.quick else full.capped(args.donors, args.per_class)
    chosen = [contestant for contestant in CONTESTANTS if args.only in contestant.name]
    if not chosen:
        reporting.fail(f"no system is called {args.only!r}", hint="; ".join(item.name for item in CONTESTANTS))
    results = compete(chosen, corpus, Path(args.peers_dir), args.budget_s)
    tables(report, corpus, chosen, results)
    report.write(args.out)
    return 0


def set_up(folder: Path) -> int:
    """One environment a peer. LMCache comes without its own dependencies, which ask for CUDA."""
    pins = ["-c", str(CONSTRAINTS)]
    for name, steps in {
        SEMBLEND: [[*pins, "semblend"]],
        LMCACHE: [[*pins, *LMCACHE_NEEDS], [*pins, "--no-deps", "lmcache"]],
    }.items():
        progress(f"{name}: creating its environment")
        venv.create(folder / name, with_pip=True, clear=True)
        for words in steps:
            done = subprocess.run([python_of(folder, name), "-m", "pip", "install", "--quiet", *words], check=False)
            if done.returncode:
                reporting.fail(f"could not install {name}", hint="see pip's message above; then run --setup again")
    progress("ready")
    return 0


def python_of(folder: Path, environment: str) -> str:
    return str(folder / environment / "bin" / "python") if environment else sys.executable


def compete(
    chosen: Sequence[Contestant], corpus: corpus_module.Corpus, folder: Path, budget_s: float
) -> dict[str, dict[str, Any]]:
    """Runs one system after the other, never two at once, and scores what each of them claims."""
    oracle = corpus.oracle()
    covered = {query.query_id: oracle.covered(query.tokens) for query in corpus.queries}
    donors = {donor.donor_id: donor.tokens for donor in corpus.donors}
    queries = {query.query_id: query for query in corpus.queries}
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        cases = Path(scratch) / "cases.npz"
        write_cases(in_turn(corpus), cases)
        for contestant in chosen:
            raw = run_one(contestant, cases, Path(scratch) / "answer.json", folder, budget_s)
            if "error" not in raw:
                raw["timed_out"] = sum(item["timed_out"] for item in raw["answers"])
                raw["scores"] = [
                    score(
                        item["query_id"], queries[item["query_id"]].kind, queries[item["query_id"]].tokens,
                        covered[item["query_id"]], [tuple(span) for span in item["spans"]], donors, item["cpu_ms"],
                    )
                    for item in raw.pop("answers")
                ]  # fmt: skip
            results[contestant.name] = raw
    return results


def in_turn(corpus: corpus_module.Corpus) -> corpus_module.Corpus:
    """One query of each class, then the next of each: a budget that runs out cuts every class alike."""
    rank: dict[str, int] = {}
    seen: dict[str, int] = {}
    for query in corpus.queries:
        rank[query.query_id] = seen[query.kind] = seen.get(query.kind, -1) + 1
    return corpus_module.Corpus(corpus.donors, tuple(sorted(corpus.queries, key=lambda query: rank[query.query_id])))


def write_cases(corpus: corpus_module.Corpus, path: Path) -> None:
    prompts = [donor.tokens for donor in corpus.donors] + [query.tokens for query in corpus.queries]
    names = {
        "donors": [donor.donor_id for donor in corpus.donors],
        "queries": [query.query_id for query in corpus.queries],
        "gold": {query.query_id: query.gold for query in corpus.queries},
    }
    ends = np.cumsum([len(prompt) for prompt in prompts])
    np.savez(path, tokens=np.concatenate(prompts), ends=ends, names=np.array(json.dumps(names)))


def run_one(contestant: Contestant, cases: Path, out: Path, folder: Path, budget_s: float) -> dict[str, Any]:
    python = python_of(folder, contestant.environment)
    if not Path(python).exists():
        return {"error": "its environment is missing: run python bench/peers.py --setup"}
    progress(f"running {contestant.name}")
    out.unlink(missing_ok=True)
    command = [python, str(ADAPTERS / contestant.adapter), "--cases", str(cases), "--out", str(out)]
    done = subprocess.run(
        [*command, "--budget-s", str(budget_s), "--limit-s", str(LIMIT_S), *contestant.flags],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not out.exists():
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": last[0]}
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def tables(
    report: reporting.Report,
    corpus: corpus_module.Corpus,
    chosen: Sequence[Contestant],
    results: dict[str, dict[str, Any]],
) -> None:
    ran = [item.name for item in chosen if "scores" in results[item.name]]
    facts = {
        name: {
            **{kind: summary(own) for kind, own in by_kind(results[name]["scores"]).items()},
            "all": summary(results[name]["scores"]),
        }
        for name in ran
    }
    together = sum(len(donor.tokens) for donor in corpus.donors)
    size = f"{len(corpus.donors)} donors ({together:,} tokens), {len(corpus.queries)} queries"
    kinds = (*corpus.kinds, "all")
    for title, key in (
        ("Share of the reusable tokens that is found", "recovered"),
        ("CPU ms of a lookup, median", "p50"),
        ("CPU ms of a lookup, 95th percentile", "p95"),
    ):
        rows = [[name, *(cell(facts[name], kind, key) for kind in kinds)] for name in ran]
        report.table(f"{title}: {size}", ["system", *kinds], rows)
    report.table(
        "Costs and mistakes",
        ["system", "queries run", "timed out", "wrong tokens", "unrelated given something", "CPU ms p50", "p95", "max",
         "register CPU ms p50", "p95", "memory MiB"],
        [totals(name, results[name]) for name in ran],
    )  # fmt: skip
    for item in chosen:
        report.note(f"{item.name}: {results[item.name].get('error', item.remark)}")
    for name in ran:
        if (n := len(results[name]["scores"])) < len(corpus.queries):
            report.note(
                f"{name}: its time ran out after {n} of {len(corpus.queries)} queries; its figures are over those"
            )
    report.note(f"a lookup may take {LIMIT_S:g} seconds; one that takes longer counts as nothing found")
    counts = Counter(query.kind for query in corpus.queries)
    report.note("n of each class: " + ", ".join(f"{kind} {n}" for kind, n in counts.items()))
    report.note("one thread; CPU time of the call alone, from a list of integers; median of 3 calls, 1 if it is slow")
    report.add("systems", {name: own if "error" in own else facts[name] for name, own in results.items()})


def cell(facts: dict[str, Any], kind: str, key: str) -> float | None:
    """None for a class that a system did not reach within its budget."""
    own = facts.get(kind)
    if own is None:
        return None
    value: float | None = own[key] if key in own else own["cpu_ms"][key]
    return value


def totals(name: str, result: dict[str, Any]) -> list[Any]:
    scores: list[Score] = result["scores"]
    cpu, register = spread([item.cpu_ms for item in scores]), spread(result["register_ms"])
    given = sum(item.spans > 0 for item in scores if item.kind == "unrelated")
    return [
        name, len(scores), result["timed_out"], sum(item.wrong_tokens for item in scores), given,
        cpu["p50"], cpu["p95"], cpu["max"], register["p50"], register["p95"], round(result["memory_mib"]),
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
