"""Keeps the tables of docs/research/lab.md true: ``python -m tools.reference.lab_page docs/research/lab.md``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from semantickv.analysis.experiments import CONFIG_FOLDER, ExperimentOutcome, load_experiment, run_experiment
from semantickv.analysis.latency import compute_gain
from semantickv.output.files import PUBLISHED, name_best
from semblend.errors import InputError

BEGIN, END = "<!-- tables: made by python -m tools.reference.lab_page -->", "<!-- end of tables -->"


def build_tables(folder: Path = CONFIG_FOLDER) -> str:
    """Run the five experiments and build Markdown tables of them beside the source text."""
    outcomes = [run_experiment(load_experiment(folder / f"{name}.yaml"), over_time=False) for name in PUBLISHED]
    lines = [
        "### Against LRU: average simulated TTFT, positive is faster",
        "",
        "| experiment | source: adaptive | adaptive, block | adaptive, prefix | static, block | static, prefix "
        "| knows the future, block | prefix |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for outcome in outcomes:
        name = outcome.experiment.experiment_id
        cells = [f"{1 - PUBLISHED[name]['adaptive'] / PUBLISHED[name]['lru']:+.2%}"]
        for policy in ("adaptive_semantic", "static_semantic", "belady_bypass"):
            cells += [_format_gain(outcome, mode, policy) for mode in ("block", "prefix")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "### Block hit rates and times in block mode",
        "",
        "| experiment | source: LRU | here: LRU | source: adaptive | here: adaptive | here: best of six |",
        "|---|---:|---:|---:|---:|---|",
    ]
    lines += [_format_rates(outcome) for outcome in outcomes]
    return "\n".join(lines)


def _format_gain(outcome: ExperimentOutcome, mode: str, policy: str) -> str:
    """Format the gain of a policy over LRU in one mode; empty if it did not run."""
    gain = compute_gain(outcome.records[mode], policy)
    return "" if gain is None else f"{gain:+.2%}"


def _format_rates(outcome: ExperimentOutcome) -> str:
    """Format one row of the second table: hit rates and times in block mode."""
    published = PUBLISHED[outcome.experiment.experiment_id]
    here = {record["policy"]: record for record in outcome.records["block"]}
    lru, adaptive = here["lru"], here["adaptive_semantic"]
    cells = [
        f"{published['lru_hits']:.1%}, {published['lru']:.1f} ms",
        f"{lru['block_hit_rate']:.1%}, {lru['avg_ttft_ms']:.1f} ms",
        f"{published['adaptive_hits']:.1%}, {published['adaptive']:.1f} ms",
        f"{adaptive['block_hit_rate']:.1%}, {adaptive['avg_ttft_ms']:.1f} ms",
        name_best(outcome.records["block"]),
    ]
    return f"| {outcome.experiment.experiment_id} | {' | '.join(cells)} |"


def replace_tables(page: str, made: str) -> str:
    """Return the page with its tables replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise InputError("the page has no place for the tables", hint=f"it needs a line {BEGIN} and a line {END}")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables into the page."""
    parser = argparse.ArgumentParser(description="Write the tables of the lab's experiments into their page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--config-dir", type=Path, default=CONFIG_FOLDER)
    args = parser.parse_args(argv)
    args.page.write_text(
        replace_tables(args.page.read_text(encoding="utf-8"), build_tables(args.config_dir)), encoding="utf-8"
    )
    print(args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
