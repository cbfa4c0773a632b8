"""The files that experiments, replays and comparisons of routing policies leave in their result folders.

JSON, CSV, Markdown and pictures; everything in them is simulated.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from semantickv.analysis.experiments import CHAINED_NOTE, ExperimentOutcome, Replay
from semantickv.analysis.latency import BOUNDS, SIMULATED_NOTE, Calibration, compute_gain
from semantickv.analysis.placement import PlacementResult
from semantickv.output import plots
from semantickv.traces.trace import describe_trace
from semblend.cli.output import write_json, write_text
from semblend.errors import InputError

METRICS = (
    "mode", "policy", "hit_rate", "block_hit_rate", "token_hit_rate", "tokens_saved", "evictions", "avg_ttft_ms",
    "p50_ttft_ms", "p95_ttft_ms", "ttft_gain_vs_lru", "utilization", "regret", "simulated",
)  # fmt: skip


def make_folder(parent: str | Path, name: str, now: datetime | None = None) -> Path:
    """Make the folder ``parent/<timestamp>_<name>``; a second one in the same second gets a number."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d_%H%M%S")
    for attempt in range(1000):
        folder = Path(parent) / (f"{stamp}_{name}" if not attempt else f"{stamp}_{name}_{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"cannot make {folder}: {error.strerror}", hint="pass another --output-dir") from None
        return folder
    raise InputError(f"{parent} already holds a thousand results of this second", hint="pass another --output-dir")


def check_parent(parent: str | Path) -> None:
    """Complain about a parent of result folders that cannot be written before the long work, not after it."""
    whole = Path(parent).absolute()
    nearest = next(one for one in (whole, *whole.parents) if one.exists())
    if not nearest.is_dir():
        raise InputError(f"cannot make {parent}: {nearest} is no folder", hint="pass another --output-dir")
    if not os.access(nearest, os.W_OK):
        raise InputError(f"cannot make {parent}: Permission denied", hint="pass another --output-dir")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write these columns of the rows as CSV with a heading; other keys of a row are left out."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, out.getvalue())


def format_policy_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the records of policies as the lines of a Markdown table."""
    lines = [
        "| policy | block hits | token hits | tokens saved | evictions | avg TTFT | p95 TTFT | against LRU |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for record in records:
        gain = compute_gain(list(map(dict, records)), record["policy"])
        lines.append(
            f"| {record['policy']} | {record['block_hit_rate']:.2%} | {record['token_hit_rate']:.2%} | "
            f"{record['tokens_saved']:,} | {record['evictions']:,} | {record['avg_ttft_ms']:.2f} ms | "
            f"{record['p95_ttft_ms']:.2f} ms | {'' if gain is None else f'{gain:+.2%}'} |"
        )
    return lines


PLACEMENT_COLUMNS = (
    "policy", "requests", "prefix_share", "any_offset_share", "copies_per_shared_block", "busiest_over_mean",
    "simulated",
)  # fmt: skip


def write_placement(parent: str | Path, results: Sequence[PlacementResult], setup: Mapping[str, Any]) -> Path:
    """Write the comparison into a new folder under ``parent`` and return that."""
    folder = make_folder(parent, "demo")
    rows = [result.to_dict() for result in results]
    write_json(folder / "routing_results.json", {"setup": dict(setup), "policies": rows})
    write_csv(folder / "routing_metrics.csv", rows, PLACEMENT_COLUMNS)
    write_text(folder / "routing_summary.md", "\n".join(format_placement_summary(results, setup)) + "\n")
    return folder


def format_placement_summary(results: Sequence[PlacementResult], setup: Mapping[str, Any]) -> list[str]:
    """Format the comparison as the lines of a Markdown page."""
    lines = [
        "# Where policies send requests (simulated)",
        "",
        ", ".join(f"{name} {value}" for name, value in setup.items()),
        "",
        "| policy | prefix hits (tokens) | any-offset hits (tokens) | copies of a shared block | busiest / mean |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.policy} | {one.prefix_share:.1%} | {one.any_offset_share:.1%} | "
        f"{one.copies_per_shared_block:.2f} | {one.busiest_over_mean:.2f} |"
        for one in results
    ]
    return lines


def write_replay(result: Replay, folder: Path, *, pictures: bool = True) -> None:
    """Write replay_results.json, replay_metrics.csv, replay_summary.md and the pictures into ``folder``."""
    write_json(folder / "replay_results.json", result.as_json())
    rows = [
        record | {"trace": result.trace.name, "ttft_gain_vs_lru": compute_gain(result.records, record["policy"])}
        for record in result.records
    ]
    write_csv(folder / "replay_metrics.csv", rows, ["trace", *METRICS])
    write_text(folder / "replay_summary.md", format_replay_summary(result))
    if pictures:
        draw_replay(result, folder)


def format_replay_summary(result: Replay) -> str:
    """Format the result as Markdown."""
    facts, trace = describe_trace(result.trace), result.trace
    lines = [
        f"# Replay of {trace.name} (simulated)",
        "",
        f"> {SIMULATED_NOTE}",
        "",
        f"{facts['requests']:,} requests ({trace.format} format), {facts['block_accesses']:,} block accesses, "
        f"{facts['distinct_blocks']:,} distinct blocks of {facts['distinct_tokens']:,} tokens; cache "
        f"{result.capacity}; {result.mode} mode.",
        f"TTFT = {result.latency.base_ttft_ms:.2f} ms + uncached tokens x {result.latency.token_latency_ms:.5f} ms "
        f"({result.latency.source}).",
        *([f"{trace.skipped} bad lines were skipped."] if trace.skipped else []),
        *([CHAINED_NOTE] if trace.chained and result.mode == "block" else []),
        "",
        *format_policy_table(result.records),
    ]
    if result.calibration is not None:
        lines += ["", "## Calibration", "", *describe_calibration(result.calibration)]
    return "\n".join(lines) + "\n"


def describe_calibration(fitted: Calibration) -> list[str]:
    """Describe a calibration as Markdown list items."""
    low, high = fitted.token_interval_ms
    lines = [
        f"- base {fitted.base_ttft_ms:.2f} ms (95 %: {fitted.base_interval_ms[0]:.2f} to "
        f"{fitted.base_interval_ms[1]:.2f}), {fitted.token_latency_ms:.5f} ms a token (95 %: {low:.5f} to {high:.5f})",
        f"- {fitted.requests} observed requests, {fitted.outliers} of them far off the line; typical residual "
        f"{fitted.residual_mad_ms:.2f} ms; the line explains {fitted.explained:.0%} of the absolute deviation",
        f"- least squares would say {fitted.least_squares[0]:.2f} ms and {fitted.least_squares[1]:.5f} ms a token",
    ]
    if fitted.assumed_cold:
        lines.append(
            f"- {fitted.assumed_cold} requests did not say how many of their tokens were computed: all of them were "
            "taken as computed, so the cost of a token is too low where a cache helped"
        )
    if fitted.left_out:
        lines.append(f"- {fitted.left_out} observed requests were left out: impossible values")
    return lines


def draw_replay(result: Replay, folder: Path) -> None:
    """Draw the pictures that the source text names, and the residuals of a calibration."""
    note = f"{result.trace.name}: {len(result.trace):,} requests, cache {result.capacity}"
    plots.draw_policies(
        {result.mode: result.records},
        ttft=folder / "replay_policy_avg_ttft.png",
        tokens_saved=folder / "replay_tokens_saved.png",
        hit_rate=folder / "replay_hit_rate.png",
        note=note,
    )
    _draw_observed(result, folder / "observed_vs_simulated_ttft.png", note)
    if result.calibration is not None and result.observed is not None:
        tokens, times = result.observed.prefill_tokens, result.observed.ttft_ms
        plots.draw_residuals(folder / "calibration_residuals.png", result.calibration, tokens, times)


def _draw_observed(result: Replay, path: Path, note: str) -> None:
    """Draw observed against simulated times; for a trace without times, the simulated times alone."""
    seen = np.flatnonzero(~np.isnan(result.trace.ttft_ms))
    if not len(seen):
        panels = {
            name: [(record["policy"], record[key]) for record in result.records]
            for name, key in (("median", "p50_ttft_ms"), ("95th percentile", "p95_ttft_ms"))
        }
        title = "Simulated time to first token (this trace has no observed times)"
        plots.draw_bars(path, title, panels, unit="ms", best="low", note=note, one_scale=False)
        return
    edge = 1.25 * float(np.quantile(result.trace.ttft_ms[seen], 0.97))
    shown = seen[result.trace.ttft_ms[seen] <= edge]
    if len(shown) < len(seen):
        note += f"; {len(seen) - len(shown)} observed above {edge:,.0f} ms are not shown"
    clouds = {
        name: (result.trace.ttft_ms[shown].tolist(), times[shown].tolist()) for name, times in result.ttft_ms.items()
    }
    plots.draw_points(path, "Observed and simulated time to first token", clouds, x="observed TTFT, ms",
                      y="simulated TTFT, ms", line=(0.0, 1.0), note=note + "; the line is equality")  # fmt: skip


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
EXPERIMENT_COLUMNS = ("experiment_id", *METRICS)


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
    write_csv(folder / "metrics.csv", build_metric_rows(outcome), EXPERIMENT_COLUMNS)
    write_text(folder / "summary.md", format_experiment_summary(outcome))
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


def format_experiment_summary(outcome: ExperimentOutcome) -> str:
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
    write_csv(folder / "aggregate_summary.csv", rows, EXPERIMENT_COLUMNS)
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
