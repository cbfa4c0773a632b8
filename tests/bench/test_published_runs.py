"""Pages show the newest run of a row, better or worse, and the default configuration before any other."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import publish  # noqa: E402
from lib.reporting import get_day, read_results  # noqa: E402
from vllm_http import tabulate_by_length  # noqa: E402

ARMS = ("cold", "balanced", "fast", "miss")


def make_run(day: str, tier: str, ms: float, tokens: int = 8192) -> dict[str, Any]:
    columns = ["model", "tokens", "arm", "donors in", "bytes", "n", "with reuse", "computed again", "p50 ms", "mean ms",
               "p90 ms", "mean over cold"]  # fmt: skip
    rows = [["m", tokens, arm, tier, 4 << 30, 60, 0, 0, ms, ms, ms, 1.0] for arm in ARMS]
    table = {"title": f"Time to first token {publish.BY_LENGTH}", "columns": columns, "rows": rows}
    return {
        "tables": [table], "notes": [], "arguments": {"measured_at": day, "measured_on": "one GPU"},
        "provenance": {"date": "2026-12-31T00:00:00+00:00", "command": "python bench/vllm_http.py"},
    }  # fmt: skip


def write_runs(folder: Path, **runs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    for name, run in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(run), encoding="utf-8")
    return read_results(publish.BY_LENGTH, folder)


def test_runs_are_ordered_by_the_day_of_their_rows_not_by_the_day_they_were_printed(tmp_path: Path) -> None:
    later, earlier = make_run("2026-11-17", "host", 1.0), make_run("2026-11-16", "host", 2.0)
    assert list(write_runs(tmp_path, a_later=later, z_earlier=earlier)) == ["z_earlier", "a_later"]
    assert get_day({"provenance": {"date": "2026-11-15T00:00:00"}}) == "2026-11-15T00:00:00"


def test_the_newest_run_is_shown_though_an_older_one_was_better(tmp_path: Path) -> None:
    better, worse = make_run("2026-11-15", "host", 50.0), make_run("2026-11-16", "host", 90.0)
    page = publish.vllm_http(write_runs(tmp_path, better=better, worse=worse))
    assert page.count("|     90 |      90 |     90 |") == len(ARMS)
    assert "|     50 |" not in page
    assert "[worse](bench/results/worse.json)" in page
    assert "not the default" not in page


def test_a_run_as_the_default_is_set_up_comes_before_a_newer_one_with_another_setting(tmp_path: Path) -> None:
    default, newer = make_run("2026-11-15", "host", 90.0), make_run("2026-11-16", "device", 50.0)
    other = make_run("2026-11-16", "device", 77.0, tokens=24576)
    page = publish.vllm_http(write_runs(tmp_path, default=default, newer=newer, other=other))
    assert "|  8,192 | miss     | 60 |          0 |              0 |     90 |" in page
    assert "| 24,576 | miss     | 60 |          0 |              0 |     77 |" in page
    assert "- 8,192 tokens: m, donors in host memory (4 GiB)" in page
    assert f"- 24,576 tokens: m, donors on the GPU (4 GiB): {publish.OTHER}" in page


def tabulate_one(memory: dict[str, int] | None, donors: str | None) -> list[Any]:
    arm = {"ttft_ms": 9.0, "recomputed_tokens": 0, "reused_tokens": 0}
    row = {"model": "m", "length": 8192, **dict.fromkeys(ARMS, arm)}
    rows = [row if memory is None else row | {"memory": memory}]
    return tabulate_by_length(rows, argparse.Namespace(donors=donors, donor_bytes=3e10))[0][3:5]


def test_a_row_says_itself_where_its_donors_lay(capsys: pytest.CaptureFixture[str]) -> None:
    assert tabulate_one({}, None) == ["host", 4 << 30]
    assert tabulate_one({"donor_device_bytes": 7, "donor_host_bytes": 0}, "host") == ["device", 7]
    assert tabulate_one(None, "device") == ["device", int(3e10)]
    with pytest.raises(SystemExit):  # an old run must not be printed as one of the default by mistake
        tabulate_one(None, None)
    assert "hint: say it: --donors" in capsys.readouterr().err
