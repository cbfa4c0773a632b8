"""The files of an experiment (results.json, metrics.csv, summary.md, six pictures) and the summary of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from semantickv.analysis.experiments import ExperimentOutcome
from semantickv.analysis.latency import BOUNDS, SIMULATED_NOTE, compute_gain
from semantickv.output import plots
from semantickv.output.files import METRICS, format_policy_table, write_csv
from semantickv.traces.trace import describe_trace
from semblend.cli.output import write_json, write_text

# What the SemanticKV text reports for the experiments of the same name, in block mode: average simulated TTFT of LRU
# and of adaptive in ms, and their block hit rates. Its workloads are its own; ours have the same dimensions only.
PUBLISHED: Final[Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        "low_memory_rag_stress": {
            "lru": 149.9362, "adaptive": 96.4737, "lru_hits": 0.367725, "adaptive_hits": 0.600529,
        },
        "shared_system_prompt_high_reuse": {
            "lru": 89.4469, "adaptive": 89.4469, "lru_hits": 0.664352, "adaptive_hits": 0.664352,
        },
        "tool_agent_session_reuse": {
            "lru": 90.0865, "adaptive": 91.1179, "lru_hits": 0.548529, "adaptive_hits": 0.201471,
        },
        "legal_review_long_context": {
            "lru": 97.7219, "adaptive": 99.0933, "lru_hits": 0.705357, "adaptive_hits": 0.4375,
        },
        "workload_shift_static_vs_adaptive": {
            "lru": 112.5770, "adaptive": 90.2206, "lru_hits": 0.549242, "adaptive_hits": 0.659091,
        },
    }
)  # fmt: skip
COLUMNS = ("experiment_id", *METRICS)


def build_metric_rows(outcome: ExperimentOutcome) -> list[dict[str, Any]]:
    """Build one flat row for each policy and mode."""
    rows = []
    for mode, records in outcome.records.items():
        for record in records:
            gain = compute_gain(records, record["policy"])
            flat = {key: round(value, 6) if isinstance(value, float) else value for key, value in record.items()}
            rows.append(
                flat
                | {
                    "experiment_id": outcome.experiment.experiment_id,
                    "mode": mode,
                    "ttft_gain_vs_lru": "" if gain is None else round(gain, 6),
                }
            )
    return rows


def write_experiment(outcome: ExperimentOutcome, folder: Path, *, pictures: bool = True) -> None:
    """Write all files of one experiment into ``folder``."""
    write_json(folder / "results.json", outcome.as_json())
    write_csv(folder / "metrics.csv", build_metric_rows(outcome), COLUMNS)
    write_text(folder / "summary.md", format_summary(outcome))
    if pictures:
        draw_experiment(outcome, folder)


def draw_experiment(outcome: ExperimentOutcome, folder: Path) -> None:
    """Draw the six pictures that the source text names."""
    experiment, records = outcome.experiment, outcome.records
    note = (
        f"{experiment.experiment_id}, seed {experiment.seed}: {len(outcome.trace)} requests, "
        f"{experiment.capacity_tokens:,} tokens of cache"
    )
    plots.draw_policies(
        records,
        ttft=folder / "policy_comparison_avg_ttft.png",
        tokens_saved=folder / "tokens_saved_by_policy.png",
        hit_rate=folder / "policy_comparison_hit_rate.png",
        note=note,
    )
    evicted = {
        f"{mode} mode": {record["policy"]: record["evictions_by_type"] for record in rows}
        for mode, rows in records.items()
    }
    plots.draw_stacked_bars(folder / "evictions_by_semantic_type.png", "What was evicted", evicted, note=note)
    over = {f"{mode} mode": lines for mode, lines in outcome.weights_over_time.items()}
    plots.draw_lines(folder / "adaptive_weights_over_time.png", "What adaptive_semantic has learned", over,
                     x="requests", y="returns per cache-ful of waiting", note=note,
                     empty="adaptive_semantic did not run or keeps no weights")  # fmt: skip
    over = {f"{mode} mode": lines for mode, lines in outcome.utilization_over_time.items()}
    plots.draw_lines(folder / "memory_utilization_over_time.png", "Share of the cache in use", over, x="requests",
                     y="share of the cache in use", note=note, share=True)  # fmt: skip


def format_summary(outcome: ExperimentOutcome) -> str:
    """Format the result as Markdown."""
    experiment, facts = outcome.experiment, describe_trace(outcome.trace)
    lines = [
        f"# {experiment.experiment_id} (simulated)",
        "",
        f"> {SIMULATED_NOTE}",
        "",
        str(experiment.metadata.get("description", "")),
        "",
        f"{facts['requests']} requests, {facts['block_accesses']:,} block accesses, {facts['distinct_blocks']:,} "
        f"distinct blocks of {facts['distinct_tokens']:,} tokens; cache {experiment.capacity_tokens:,} tokens; seed "
        f"{experiment.seed}. TTFT = {experiment.latency.base_ttft_ms:g} ms + uncached tokens x "
        f"{experiment.latency.token_latency_ms:g} ms.",
    ]
    for mode, records in outcome.records.items():
        lines += ["", f"## {mode} mode", "", *format_policy_table(records), "", _describe_best(records)]
    published = PUBLISHED.get(experiment.experiment_id)
    if published and "block" in outcome.records:
        lines += ["", "## Beside the source text (block mode)", "", *_compare_with_published(outcome, published)]
    return "\n".join(lines) + "\n"


def _describe_best(records: Sequence[Mapping[str, Any]]) -> str:
    """Name the policy with the lowest average TTFT and its time in ms."""
    best = min((record["avg_ttft_ms"] for record in records if record["policy"] not in BOUNDS), default=0.0)
    return (
        f"Lowest average TTFT (simulated): {name_best(records)}, {best:.2f} ms. Policies named belady know the future."
    )


def _compare_with_published(outcome: ExperimentOutcome, published: Mapping[str, float]) -> list[str]:
    """Build a Markdown table of the source text's figures and ours, in block mode."""
    here = {record["policy"]: record for record in outcome.records["block"]}
    lines = ["| | source text | here |", "|---|---:|---:|"]
    for policy, key in (("lru", "lru"), ("adaptive_semantic", "adaptive")):
        if policy in here:
            lines.append(f"| {policy} avg TTFT | {published[key]:.2f} ms | {here[policy]['avg_ttft_ms']:.2f} ms |")
            hits = f"{published[key + '_hits']:.1%} | {here[policy]['block_hit_rate']:.1%}"
            lines.append(f"| {policy} block hits | {hits} |")
    gain = compute_gain(outcome.records["block"], "adaptive_semantic")
    if gain is not None:
        lines.append(f"| adaptive against LRU | {1 - published['adaptive'] / published['lru']:+.2%} | {gain:+.2%} |")
    return lines


def write_aggregate(outcomes: Sequence[ExperimentOutcome], folder: Path) -> None:
    """Write ``aggregate_summary.csv`` and ``.md``: every policy of every experiment, beside the source text."""
    rows = [row for outcome in outcomes for row in build_metric_rows(outcome)]
    write_csv(folder / "aggregate_summary.csv", rows, COLUMNS)
    lines = [
        "# All experiments (simulated)",
        "",
        f"> {SIMULATED_NOTE}",
        "",
        "adaptive_semantic against LRU, average simulated TTFT (positive: adaptive is faster), and the best policy.",
        "",
        "| experiment | source text | block mode | prefix mode | best, block mode | best, prefix mode |",
        "|---|---:|---:|---:|---|---|",
    ]
    for outcome in outcomes:
        name = outcome.experiment.experiment_id
        known = PUBLISHED.get(name)
        source = f"{1 - known['adaptive'] / known['lru']:+.2%}" if known else ""
        gains = {mode: compute_gain(records, "adaptive_semantic") for mode, records in outcome.records.items()}
        cells = [source, *("" if gains.get(mode) is None else f"{gains[mode]:+.2%}" for mode in ("block", "prefix"))]
        cells += [name_best(outcome.records.get(mode, [])) for mode in ("block", "prefix")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for outcome in outcomes:
        for mode, records in outcome.records.items():
            lines += ["", f"## {outcome.experiment.experiment_id}, {mode} mode", "", *format_policy_table(records)]
    write_text(folder / "aggregate_summary.md", "\n".join(lines) + "\n")


def name_best(records: Sequence[Mapping[str, Any]]) -> str:
    """Name the policies within 0.05 % of the lowest average TTFT, or say that all are equal."""
    real = [record for record in records if record["policy"] not in BOUNDS]
    best = min((record["avg_ttft_ms"] for record in real), default=0.0)
    names = [record["policy"] for record in real if record["avg_ttft_ms"] <= best * 1.0005]
    return "all equal" if len(names) == len(real) > 1 else ", ".join(names)
