"""Replay: the promised files and keys for every format, and bad traces named by file, line and field."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from semantickv.cli import main

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "traces" / "rag_serving_trace.jsonl"
DATA = os.environ.get("SEMBLEND_TEST_DATA")
FILES = {
    "replay_results.json", "replay_metrics.csv", "replay_summary.md", "replay_policy_avg_ttft.png",
    "replay_tokens_saved.png", "replay_hit_rate.png", "observed_vs_simulated_ttft.png",
}  # fmt: skip
POLICY_KEYS = (
    "policy", "hit_rate", "block_hit_rate", "token_hit_rate", "tokens_saved", "evictions", "evictions_by_type",
    "avg_ttft_ms", "p50_ttft_ms", "p95_ttft_ms", "utilization", "regret", "weights",
)  # fmt: skip
MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 5, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 9, "input_length": 600, "output_length": 5, "hash_ids": [1, 3]},
]
BAILIAN = [
    {"chat_id": n, "parent_chat_id": -1, "timestamp": n * 0.5, "input_length": 30, "output_length": 3, "type": "text",
     "turn": 1, "hash_ids": [7, 8]}
    for n in range(3)
]  # fmt: skip
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


def replayed(tmp_path: Path, trace: Path, *flags: str) -> tuple[int, dict[str, Any], set[str]]:
    code = main(["replay", "--trace", str(trace), "--output-dir", str(tmp_path / "out"), *flags])
    folders = sorted((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else []
    if not folders:
        return code, {}, set()
    folder = folders[-1]
    return code, json.loads((folder / "replay_results.json").read_text()), {path.name for path in folder.iterdir()}


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_the_shipped_example_gives_the_promised_files_and_keys(tmp_path: Path) -> None:
    code, results, files = replayed(
        tmp_path, EXAMPLE, "--cache-token-budget", "50000", "--policies", "lru", "adaptive_semantic",
        "static_semantic", "--calibrate-from-trace", "--output-name", "mine",
    )  # fmt: skip
    assert code == 0
    assert FILES | {"calibration_residuals.png"} == files
    assert [record["policy"] for record in results["policies"]] == ["lru", "adaptive_semantic", "static_semantic"]
    for record in results["policies"]:
        assert set(POLICY_KEYS) <= set(record)
        assert record["simulated"] is True
    assert results["simulated"] is True
    # The example's times are made by a formula with 42 ms and 0.065 ms a token; the fit must find it.
    assert results["calibration"]["base_ttft_ms"] == pytest.approx(42, abs=4)
    assert results["calibration"]["token_latency_ms"] == pytest.approx(0.065, rel=0.05)


@pytest.mark.parametrize(
    ("name", "records", "format", "hits"),
    [("m.jsonl", MOONCAKE, "mooncake", 3), ("m.jsonl.gz", MOONCAKE, "mooncake", 3), ("b.jsonl", BAILIAN, "bailian", 4)],
)
def test_recorded_formats_are_recognised(
    tmp_path: Path, name: str, records: list[dict[str, Any]], format: str, hits: int
) -> None:
    trace = jsonl(tmp_path / name, records)
    flags = ("--cache-block-budget", "10", "--policies", "lru", "--no-plots")
    code, results, _ = replayed(tmp_path, trace, *flags)
    assert code == 0
    assert results["trace"]["format"] == format
    assert results["policies"][0]["block_hit_rate"] == pytest.approx(hits / 6)


def test_azure_has_no_shared_blocks_and_no_observed_times(tmp_path: Path) -> None:
    trace = tmp_path / "a.csv"
    trace.write_text(AZURE)
    code, results, files = replayed(tmp_path, trace, "--cache-token-budget", "9000", "--policies", "lru")
    assert code == 0
    assert results["policies"][0]["tokens_saved"] == 0
    assert files == FILES


GOOD = {"request_id": "a", "timestamp_ms": 5, "blocks": [{"content_hash": "x", "token_count": 9}]}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"timestamp_ms": 6}, "blocks"),
        (GOOD | {"timestamp_ms": -5}, "timestamp_ms"),
        (GOOD | {"timestamp_ms": 1}, "timestamp_ms"),  # earlier than the line before
        (GOOD | {"timestamp_ms": "noon"}, "timestamp_ms"),
        (GOOD | {"blocks": [{"content_hash": "x"}]}, "token_count"),
        (GOOD | {"blocks": [{"token_count": 3}]}, "content_hash"),
        (MOONCAKE[0] | {"timestamp": 9}, "mooncake"),  # another format in the middle
    ],
)
def test_a_bad_line_is_named_by_file_line_and_field_or_skipped_and_counted(
    tmp_path: Path, bad: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = jsonl(tmp_path / "t.jsonl", [GOOD, bad, GOOD | {"timestamp_ms": 9}])
    flags = ("--cache-token-budget", "100", "--policies", "lru", "--no-plots")
    assert replayed(tmp_path, trace, *flags)[0] == 2
    told = capsys.readouterr().err
    assert str(trace) in told
    assert "line 2" in told
    assert said in told
    assert "hint: " in told
    code, results, _ = replayed(tmp_path, trace, *flags, "--skip-bad")
    assert code == 0
    assert results["trace"]["skipped_lines"] == 1
    assert results["trace"]["requests"] == 2
    assert "skipped 1 bad line" in capsys.readouterr().err


def test_unsorted_requests_are_sorted_on_request(tmp_path: Path) -> None:
    trace = jsonl(tmp_path / "t.jsonl", [GOOD | {"timestamp_ms": 9}, GOOD])
    code, results, _ = replayed(
        tmp_path, trace, "--cache-token-budget", "100", "--policies", "lru", "--no-plots", "--sort"
    )
    assert code == 0
    assert results["trace"]["requests"] == 2


@pytest.mark.parametrize(
    "flags",
    [
        ("--cache-token-budget", "0"),
        ("--cache-block-budget", "-3"),
        ("--cache-token-budget", "5", "--policies", "best"),
        ("--cache-token-budget", "5", "--output-name", "../x"),
        ("--cache-token-budget", "5", "--base-ms", "-1"),
        ("--cache-token-budget", "5", "--calibrate-from-trace", "--base-ms", "5"),
        ("--cache-token-budget", "5", "--max-requests", "0"),
        (),
        ("--cache-token-budget", "5", "--cache-block-budget", "5"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_is_written(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replayed(tmp_path, EXAMPLE, *flags)[0] == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_trace_that_is_not_there_or_is_cut_off_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(EXAMPLE.read_bytes())[:2000])
    for path in (tmp_path / "none.jsonl", cut):
        assert replayed(tmp_path, path, "--cache-token-budget", "500")[0] == 2
        assert str(path) in capsys.readouterr().err


@pytest.mark.data
@pytest.mark.skipif(not DATA, reason="SEMBLEND_TEST_DATA is not set")
@pytest.mark.parametrize(("blocks", "rate"), [(1000, 0.0434), (5000, 0.1128), (10_000, 0.2085), (20_000, 0.2797)])
def test_the_shared_half_trace_gives_the_figures_found_before(tmp_path: Path, blocks: int, rate: float) -> None:
    trace = Path(str(DATA)) / "traces" / "mooncake_conversation_first_half.jsonl.gz"
    code, results, _ = replayed(tmp_path, trace, "--cache-block-budget", str(blocks), "--policies", "lru", "--no-plots")
    assert code == 0
    assert results["policies"][0]["block_hit_rate"] == pytest.approx(rate, abs=0.003)
