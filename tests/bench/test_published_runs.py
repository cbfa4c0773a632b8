"""Pages show what a user gets with the defaults, and rows say where their donors lay."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import publish  # noqa: E402
from vllm_http import tabulate_by_length  # noqa: E402

ARMS = ("cold", "balanced", "fast", "miss")


def test_the_table_of_the_readme_says_what_stock_vllm_takes_first() -> None:
    columns = ["tokens", "arm", "n", "reused", "p50 ms", "mean ms", "p90 ms"]
    arms = {"ours:fast": 35.0, "stock:cold": 70.0, "forced:balanced": 99.0}
    rows = [[8192, arm, 60, 0.5, ms, ms, ms] for arm, ms in arms.items()]
    table = {"title": "Time to first token over HTTP, against stock vLLM", "columns": columns, "rows": rows}
    made = {"date": "2026-12-31T00:00:00+00:00", "command": "python bench/vllm_pays.py"}
    asked = {"measured_at": "2026-11-18", "measured_on": "one GPU"}
    page = publish.vllm_pays({"tables": [table], "arguments": asked, "provenance": made})
    assert [line.rsplit("|", 2)[1].strip() for line in page.splitlines()[2:4]] == ["0.50", "1.00"]
    assert "99" not in page, "what is forced is no default"
    assert "Measured on one GPU, 2026-11-18" in page


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
