"""What the files of experiments and replays share: the result folder, the CSV file and the Markdown table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from semantickv.analysis.latency import compute_gain
from semblend.cli.output import write_text
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
