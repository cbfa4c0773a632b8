"""The files of a replay: replay_results.json, replay_metrics.csv, replay_summary.md and the pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from semantickv.analysis.calibration import Calibration
from semantickv.analysis.latency import SIMULATED_NOTE, compute_gain
from semantickv.analysis.replay import CHAINED_NOTE, Replay
from semantickv.output import plots
from semantickv.output.files import METRICS, format_policy_table, write_csv
from semantickv.traces.trace import describe_trace
from semblend.cli.output import write_json, write_text

MOST_POINTS = 4000


def write_replay(result: Replay, folder: Path, *, pictures: bool = True) -> None:
    """Write replay_results.json, replay_metrics.csv, replay_summary.md and the pictures into ``folder``."""
    write_json(folder / "replay_results.json", result.as_json())
    rows = [
        record | {"trace": result.trace.name, "ttft_gain_vs_lru": compute_gain(result.records, record["policy"])}
        for record in result.records
    ]
    write_csv(folder / "replay_metrics.csv", rows, ["trace", *METRICS])
    write_text(folder / "replay_summary.md", format_summary(result))
    if pictures:
        draw_replay(result, folder)


def format_summary(result: Replay) -> str:
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
    shown = shown[:: max(1, len(shown) // MOST_POINTS)]
    clouds = {
        name: (result.trace.ttft_ms[shown].tolist(), times[shown].tolist()) for name, times in result.ttft_ms.items()
    }
    plots.draw_points(path, "Observed and simulated time to first token", clouds, x="observed TTFT, ms",
                      y="simulated TTFT, ms", line=(0.0, 1.0), note=note + "; the line is equality")  # fmt: skip
