"""How much of what could be reused is found, and whether anything is found that is not there.

    python bench/recall.py --data-dir DATA [--quick] [--out bench/results/recall.json]

All donors of the corpus stand in one store. For each query an independent oracle says which tokens lie in a run of
32 or more tokens that some donor holds too; the plan's spans are then checked token by token. Exit code 1 when a
class recovers less than 99 % of those tokens, when any span claims a wrong token or overlaps another, or when an
unrelated prompt is given anything at all.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import lib.reporting as reporting
from lib import corpus as corpus_module
from lib.reporting import progress, spread
from lib.scoring import RawSpan, Score, by_kind, score, summary

LOWEST_RECOVERED = 0.99
REPEATS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reporting.add_common_arguments(parser, "recall")
    args = parser.parse_args(arguments)
    report = reporting.Report("recall", args)
    corpus = corpus_module.load(args)
    blend, register_ms = filled_store(corpus)
    scores = run(blend, corpus)
    tables(report, corpus, scores, register_ms)
    wrong = failures(scores)
    for line in wrong:
        report.note(f"FAILED: {line}")
    report.add("passed", not wrong)
    report.add("queries", [row(item) for item in scores])
    report.write(args.out)
    return 1 if wrong else 0


def filled_store(corpus: corpus_module.Corpus) -> tuple[Any, list[float]]:
    """A `SemBlend` with every donor, and the CPU milliseconds of each registration."""
    from semblend import Prompt, SemBlend, SemBlendConfig

    blend = SemBlend(SemBlendConfig(embedder="none", max_donors=len(corpus.donors) + 1, max_bytes=4 << 30))
    blend.warm_up()
    times = []
    for donor in corpus.donors:
        prompt = Prompt(donor.tokens)
        start = time.process_time_ns()
        blend.register(prompt, donor_id=donor.donor_id)
        times.append((time.process_time_ns() - start) / 1e6)
    progress(f"registered {len(times)} donors in {sum(times) / 1000:.2f} CPU s")
    return blend, times


def run(blend: Any, corpus: corpus_module.Corpus) -> list[Score]:
    """Every query, `REPEATS` times (a lookup changes nothing); its time is the median."""
    from semblend import Prompt

    oracle = corpus.oracle()
    donors = {donor.donor_id: donor.tokens for donor in corpus.donors}
    blend.lookup(Prompt(corpus.queries[0].tokens))  # the first call of a process pays for lazy set-up
    scores = []
    for number, query in enumerate(corpus.queries, start=1):
        prompt, times = Prompt(query.tokens), []
        for _ in range(REPEATS):
            start = time.process_time_ns()
            answer = blend.lookup(prompt)
            times.append((time.process_time_ns() - start) / 1e6)
        covered = oracle.covered(query.tokens)
        median = float(spread(times)["p50"] or 0.0)
        scores.append(score(query.query_id, query.kind, query.tokens, covered, spans_of(answer), donors, median))
        if number % 100 == 0:
            progress(f"{number} of {len(corpus.queries)} queries")
    return scores


def spans_of(answer: Any) -> list[RawSpan]:
    """The spans of a plan; none of a decline."""
    from semblend import ReusePlan

    if not isinstance(answer, ReusePlan):
        return []
    return [(span.donor_id, span.donor_start, span.target_start, span.length) for span in answer.spans]


def failures(scores: Sequence[Score]) -> list[str]:
    """Each broken promise as a sentence."""
    broken = []
    for kind, own in by_kind(scores).items():
        facts = summary(own)
        if facts["recovered"] is not None and facts["recovered"] < LOWEST_RECOVERED:
            broken.append(f"{kind} recovered {facts['recovered']:.4f} of the shared tokens, below {LOWEST_RECOVERED}")
        if facts["wrong_tokens"]:
            broken.append(f"{kind} claimed {facts['wrong_tokens']} tokens that its donor does not hold")
        if facts["overlapping_tokens"]:
            broken.append(f"{kind} has spans that overlap by {facts['overlapping_tokens']} tokens")
        if kind == "unrelated" and facts["found"]:
            claimed = sum(item.claimed_tokens for item in own)
            broken.append(f"unrelated prompts were given {claimed} tokens in {sum(i.spans for i in own)} spans")
    return broken


def tables(
    report: reporting.Report, corpus: corpus_module.Corpus, scores: Sequence[Score], register_ms: Sequence[float]
) -> None:
    rows = []
    for kind, own in [*by_kind(scores).items(), ("all", list(scores))]:
        facts = summary(own)
        cpu = facts["cpu_ms"]
        rows.append(
            [kind, facts["n"], facts["tokens"], facts["oracle_tokens"], facts["recovered"], facts["worst_query"],
             facts["beyond_tokens"], facts["wrong_tokens"], facts["spans_p50"], cpu["p50"], cpu["p95"], cpu["max"]]
        )  # fmt: skip
    columns = ["class", "n", "tokens", "in shared runs", "recovered", "worst query", "beyond", "wrong",
               "spans p50", "CPU ms p50", "p95", "max"]  # fmt: skip
    donor_tokens = sum(len(donor.tokens) for donor in corpus.donors)
    report.table(f"Recall: {len(corpus.donors):,} donors, {donor_tokens:,} tokens in one store", columns, rows)
    report.table("CPU ms of a lookup by prompt length", ["tokens", "n", "p05", "p50", "p95", "max"], by_length(scores))
    cpu = spread(register_ms)
    per_token = sum(register_ms) * 1e6 / donor_tokens
    report.table(
        "Registration, CPU ms a donor",
        ["n", "p50", "p95", "max", "ns a token"],
        [[cpu["n"], cpu["p50"], cpu["p95"], cpu["max"], per_token]],
    )
    report.note("in shared runs: tokens in a run of 32 or more that some donor holds, by the oracle")
    report.note("recovered: share of those that the plan covers; beyond: token-equal, but in runs below 32 tokens")
    report.note(f"time: CPU of one thread, median of {REPEATS} calls a query, Prompt already built")
    for note in corpus.notes:
        report.note(note)


def by_length(scores: Sequence[Score]) -> list[list[Any]]:
    edges = (0, 1_000, 4_000, 16_000, 64_000, 1 << 30)
    rows = []
    for low, high in itertools.pairwise(edges):
        cpu = spread([item.cpu_ms for item in scores if low <= item.tokens < high])
        name = f"{low:,} to {high:,}" if high < 1 << 30 else f"{low:,} and more"
        rows.append([name, cpu["n"], cpu["p05"], cpu["p50"], cpu["p95"], cpu["max"]])
    return rows


def row(item: Score) -> dict[str, Any]:
    return {name: getattr(item, name) for name in Score.__slots__}


if __name__ == "__main__":
    raise SystemExit(main())
