"""The files of ``semantickv router --demo``: results, a table, and a summary for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semantickv.analysis.placement import PlacementResult
from semantickv.output.files import make_folder, write_csv
from semblend.cli.output import write_json, write_text

COLUMNS = (
    "policy", "requests", "prefix_share", "any_offset_share", "copies_per_shared_block", "busiest_over_mean",
    "simulated",
)  # fmt: skip


def write_placement(parent: str | Path, results: Sequence[PlacementResult], setup: Mapping[str, Any]) -> Path:
    """Write the comparison into a new folder under ``parent`` and return that."""
    folder = make_folder(parent, "demo")
    rows = [result.to_dict() for result in results]
    write_json(folder / "routing_results.json", {"setup": dict(setup), "policies": rows})
    write_csv(folder / "routing_metrics.csv", rows, COLUMNS)
    write_text(folder / "routing_summary.md", "\n".join(format_summary(results, setup)) + "\n")
    return folder


def format_summary(results: Sequence[PlacementResult], setup: Mapping[str, Any]) -> list[str]:
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
