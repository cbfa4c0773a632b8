"""Gates: pass on a good result, fail with one reason on one line on everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_samples import PREFIX, changed, live_records, result_of, written

from sembench.cli import build_parser, main
from sembench.gates import GATES, check, observe
from sembench.trust import examine
from sembench.witnesses.engine_events import summarize_file

FIXTURES = Path(__file__).parent.parent / "fixtures"
Capture = pytest.CaptureFixture[str]


def judge(capsys: Capture, *flags: str) -> tuple[int, dict[str, Any], list[str]]:
    code = main(["assert-result-gates", *flags])
    said = capsys.readouterr()
    failed = [line.removeprefix("gate failed: ") for line in said.err.splitlines() if line.startswith("gate failed: ")]
    return code, json.loads(said.out), failed


@pytest.fixture
def good(tmp_path: Path) -> str:
    return written(tmp_path / "good.json", live_records())


@pytest.fixture
def summary(tmp_path: Path) -> str:
    """The summary of a log that names requests of the sample run."""
    log, path = tmp_path / "engine.log", tmp_path / "engine.json"
    text = (FIXTURES / "sglang_semantic.log").read_text()
    log.write_text(text.replace("request_id=r", f"request_id={PREFIX}-r").replace("rid=r", f"rid={PREFIX}-r"))
    path.write_text(json.dumps({**summarize_file("sglang", str(log)), "errors": 0}))
    return str(path)


README = [
    "--min-quality-pass-rate", "0.80", "--min-backend-confirmed-block-rate", "0.05",
    "--min-materialization-events", "1", "--min-materialized-tokens", "512",
    "--max-negative-control-confirmed-rate", "0.0", "--require-materialized-reuse", "--require-no-engine-errors",
]  # fmt: skip


def test_the_command_of_the_readme_passes_on_a_good_result(good: str, summary: str, capsys: Capture) -> None:
    code, verdict, failed = judge(capsys, "--result", good, "--engine-summary", summary, *README)
    assert (code, failed, verdict["passed"], verdict["missing_metrics"]) == (0, [], True, [])
    assert set(verdict) >= {
        "result", "engine_summaries", "passed", "failures", "observed", "requested_gates", "missing_metrics",
        "allow_missing",
    }  # fmt: skip
    assert verdict["observed"]["materialized_tokens"] == 640  # 96 more name no request and are not in the run's time
    assert verdict["requested_gates"]["min_quality_pass_rate"] == 0.8


def warm(record: Any) -> bool:
    return record.arm == "warm"


def reused(record: Any) -> bool:
    return warm(record) and record.backend_confirmed_tokens > 0


def negative(record: Any) -> bool:
    return warm(record) and record.negative_control


SLOW = {"ttft_ms": 9e9, "latency_ms": 9e9}
SPOILED = [
    (("--min-quality-pass-rate", "0.8"), warm, {"quality_pass": False}, "quality_pass_rate is 0 "),
    (
        ("--min-backend-confirmed-block-rate", "0.05"), warm, {"backend_confirmed_blocks": 0},
        "backend_confirmed_block_rate is 0 ",
    ),
    (
        ("--max-negative-control-confirmed-rate", "0"), negative, {"backend_confirmed_tokens": 40},
        "negative_control_backend_confirmed_rate is ",
    ),
    (
        ("--max-negative-control-semantic-placement-rate", "0"), negative, {"route_outcome": "semantic_placement"},
        "negative_control_semantic_placement_rate is 1 ",
    ),
    (("--min-semantic-placement-rate", "0.5"), warm, {"route_outcome": "cold"}, "semantic_placement_rate_by_request"),
    (("--min-blended-ttft-speedup", "1.2"), warm, SLOW, "blended_ttft_speedup_median is "),
    (("--min-hit-only-ttft-speedup", "1.2"), warm, SLOW, "hit_only_ttft_speedup_median is "),
    (
        ("--max-negative-control-speedup-deviation", "0.1"), negative, {"ttft_ms": 1.0},
        "negative_control_speedup_deviation is ",
    ),
    (("--max-contaminated-pair-rate", "0.1"), warm, {"flush_contaminated": True}, "contaminated_pair_rate is 1 (n=48)"),
    (("--max-cold-kl", "0.1"), reused, {"cold_kl_topk": 0.4}, "confirmed_cold_kl_mean is 0.4 "),
    (("--min-cold-f1", "0.9"), reused, {"cold_f1": 0.3}, "confirmed_cold_f1_mean is 0.3 "),
    (("--max-false-safe-rate", "0.05"), reused, {"cold_f1": 0.49}, "false_safe_rate is 1 "),
    (("--max-false-safe-rate", "0.05"), reused, {"cold_kl_topk": 0.11}, "false_safe_rate is 1 "),
    (("--require-no-contradictions",), reused, {"contradictions": ("receipt 9, usage 0",)}, "contradiction_count is "),
    (("--max-cross-tenant-confirmed-rate", "0"), reused, {"cross_tenant": True}, "cross_tenant_backend_confirmed_rate"),
    (("--max-donor-fact-rate", "0"), reused, {"donor_fact_answered": True}, "donor_fact_answered_rate is 1 "),
    (("--min-planted-fact-rate", "0.9"), reused, {"planted_fact_answered": False}, "planted_fact_answered_rate is 0 "),
    (("--max-wrong-kv-pairs", "0"), reused, {"donor_fact_answered": True}, "wrong_kv_pairs is 42, wanted at most 0"),
    (("--max-hits-without-saving", "3"), reused, SLOW, "hits_without_saving is "),
    (("--max-faster-without-reuse", "0"), negative, {"ttft_ms": 1.0}, "faster_without_reuse is "),
    (("--min-backend-confirmed-lift", "0.1"), warm, {"backend_confirmed_blocks": 0}, "backend_confirmed_lift is 0 "),
    (("--min-semantic-eligible-lift", "0.1"), warm, {"semantic_eligible_blocks": 0}, "semantic_eligible_lift is -"),
    (
        ("--max-negative-control-eligible-rate", "0"), negative, {"semantic_eligible_blocks": 9},
        "negative_control_semantic_eligible_rate is ",
    ),
    (("--max-wrong-tokens", "0"), warm, {"wrong_tokens": 1}, "wrong_tokens is 48, wanted at most 0"),
    (("--max-error-rate", "0"), warm, {"error": "cut"}, "error_rate is 0.3333 "),
    (("--min-requests", "49"), warm, {}, "request_count is 48, wanted at least 49"),
]  # fmt: skip


@pytest.mark.parametrize(("gate", "where", "damage", "reason"), SPOILED)
def test_a_spoiled_result_fails_its_gate_with_one_reason_on_one_line(
    gate: tuple[str, ...], where: Any, damage: dict[str, Any], reason: str, tmp_path: Path, capsys: Capture
) -> None:
    bad = written(tmp_path / "bad.json", changed(live_records(), where, **damage), by_transform={}, paired=None)
    code, verdict, failed = judge(capsys, "--result", bad, "--only-requested", *gate)
    assert code == 1
    assert len(failed) == 1
    assert failed == verdict["failures"]
    assert failed[0].startswith(f"{gate[0]}: {reason}")


def test_every_numeric_gate_of_a_result_has_a_spoiled_example() -> None:
    from_elsewhere = {"materialization_events", "materialized_tokens", "materialized_units", "warm_vs_cold_rouge_drop"}
    tried = {gate[0] for gate, *_ in SPOILED}
    assert {gate.flag for gate in GATES if gate.unit != "flag" and gate.metric not in from_elsewhere} <= tried


GENEROUS = {"min": "0", "max": "1"}


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.flag)
def test_a_gate_whose_metric_nobody_observed_fails(gate: Any, tmp_path: Path, capsys: Capture) -> None:
    blank = changed(
        [record for record in live_records(2) if record.arm == "warm" and not record.negative_control],
        lambda record: True, arm="single", confirmation_sources=(), quality_pass=None, backend_confirmed_blocks=None,
        backend_confirmed_tokens=None, route_outcome=None, semantic_eligible_blocks=None,
    )  # fmt: skip
    if gate.metric in ("error_rate", "request_count"):
        return  # known of any result
    path = written(tmp_path / "blank.json", blank)
    flags = [gate.flag] if gate.unit == "flag" else [gate.flag, GENEROUS[gate.bound]]
    code, verdict, failed = judge(capsys, "--result", path, "--only-requested", *flags)
    assert (code, verdict["missing_metrics"]) == (1, [gate.metric])
    assert failed == [f"{gate.flag}: {gate.metric} was not observed; it needs {gate.needs}"]
    code, verdict, failed = judge(capsys, "--result", path, "--only-requested", *flags, "--allow-missing")
    assert (code, failed, verdict["allow_missing"]) == (0, [], True)


def test_an_engine_without_reuse_or_with_errors_fails(good: str, tmp_path: Path, capsys: Capture) -> None:
    quiet, log = tmp_path / "quiet.json", tmp_path / "vllm.log"
    lines = (FIXTURES / "vllm_semantic.log").read_text().splitlines(keepends=True)
    log.write_text("".join(line.replace("=cmpl-", f"={PREFIX}-") for line in lines if "materialized" not in line))
    quiet.write_text(json.dumps(summarize_file("vllm", str(log))))
    code, _, failed = judge(
        capsys, "--result", good, "--engine-summary", str(quiet), "--require-materialized-reuse",
        "--require-no-engine-errors", "--min-materialized-tokens", "1", "--min-materialized-units", "2",
        "--min-materialization-events", "2",
    )  # fmt: skip
    assert code == 1
    assert [line.partition(":")[0] for line in failed] == [
        "--min-materialization-events", "--min-materialized-tokens", "--min-materialized-units",
        "--require-materialized-reuse", "--require-no-engine-errors",
    ]  # fmt: skip


def test_an_empty_log_proves_no_absence_of_errors(good: str, tmp_path: Path, capsys: Capture) -> None:
    log, path = tmp_path / "empty.log", tmp_path / "empty.json"
    log.write_text("")
    path.write_text(json.dumps(summarize_file("vllm", str(log))))
    code, verdict, _ = judge(capsys, "--result", good, "--engine-summary", str(path), "--require-no-engine-errors")
    assert (code, verdict["missing_metrics"]) == (1, ["engine_errors"])


def test_an_aggregate_that_its_requests_contradict_fails(tmp_path: Path, capsys: Capture) -> None:
    records = live_records()
    flattering = {**result_of(records).aggregate, "quality_pass_rate": 0.99}
    bad = changed(records, warm, quality_pass=False)
    path = written(tmp_path / "forged.json", bad, aggregate=flattering)
    code, _, failed = judge(capsys, "--result", path, "--min-quality-pass-rate", "0.8")
    assert code == 1
    assert failed[-1] == "--min-quality-pass-rate: quality_pass_rate: the file states 0.99, its requests give 0"
    assert failed[0].startswith("edited_result: quality_pass_rate is 0.99 in the file and 0.0 by its requests")


def test_a_result_without_requests_is_refused(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path / "bare.json", [], aggregate={"quality_pass_rate": 0.9}, paired=None)
    code, verdict, failed = judge(capsys, "--result", path, "--min-quality-pass-rate", "0.8", "--only-requested")
    assert (code, verdict["doubts"][0]["name"]) == (1, "edited_result")
    assert failed[0].startswith("edited_result: the file holds no requests")


def test_the_pessimistic_judge_takes_the_worse_end(good: str, capsys: Capture) -> None:
    assert judge(capsys, "--result", good, "--min-quality-pass-rate", "0.99")[0] == 0
    code, _, failed = judge(capsys, "--result", good, "--min-quality-pass-rate", "0.99", "--pessimistic")
    assert code == 1
    assert "95 % 0.92" in failed[0]


def test_contamination_that_nobody_checked_fails(tmp_path: Path, good: str, capsys: Capture) -> None:
    assert judge(capsys, "--result", good, "--require-contamination-check")[0] == 0
    unchecked = changed(live_records(), lambda r: r.item_id == "rag_reorder-0", flush_contaminated=None)
    path = written(tmp_path / "unchecked.json", unchecked)
    assert judge(capsys, "--result", path, "--require-contamination-check")[2] == [
        "--require-contamination-check: contamination_checked is false"
    ]


def test_the_noise_floor_bounds_the_drop_of_rouge(tmp_path: Path, good: str, capsys: Capture) -> None:
    floor = tmp_path / "floor.json"
    made = {
        "calibration_version": "sembench.calibration.v1", "created_at_utc": "2026-11-01T00:00:00Z",
        "model": "smollm2-135m", "n_pairs": 20, "rouge_l_mean": 1.0,
    }  # fmt: skip
    floor.write_text(json.dumps(made))
    flags = ["--result", good, "--noise-floor-calibration", str(floor), "--max-warm-vs-cold-rouge-drop"]
    assert judge(capsys, *flags, "0.2")[0] == 0
    code, _, failed = judge(capsys, *flags, "0.001")
    assert code == 1
    assert failed[0].startswith("--max-warm-vs-cold-rouge-drop: warm_vs_cold_rouge_drop is 0.0")
    for change, reason in (
        ({"model": "other"}, "it was measured with 'other', the run with 'smollm2-135m'"),
        ({"created_at_utc": "2026-08-01T00:00:00Z"}, "days away; 30 days are allowed"),
        ({"n_pairs": 0}, "it holds no pair"),
        ({"calibration_version": "mine"}, "it is no sembench.calibration.v1"),
    ):
        floor.write_text(json.dumps(made | change))
        code, verdict, failed = judge(capsys, *flags, "0.2")
        assert (code, verdict["doubts"][0]["name"]) == (1, "evidence_of_another_run")
        assert reason in failed[0]


@pytest.mark.parametrize(
    "flags",
    [
        ["--min-quality-pass-rate", "80"],
        ["--min-quality-pass-rate", "nan"],
        ["--min-materialized-tokens", "1.5"],
        ["--min-blended-ttft-speedup", "-1"],
        ["--engine-summary", "GOOD", "--require-no-engine-errors"],
        ["--noise-floor-calibration", "GOOD", "--min-requests", "1"],
    ],
)
def test_a_wrong_request_is_a_usage_error(flags: list[str], good: str, capsys: Capture) -> None:
    words = [good if word == "GOOD" else word for word in flags]
    assert main(["assert-result-gates", "--result", good, *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert "hint: " in said.err


def test_a_truncated_result_is_a_usage_error(good: str, tmp_path: Path, capsys: Capture) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(Path(good).read_text()[:-500])
    assert main(["assert-result-gates", "--result", str(cut), "--min-requests", "1"]) == 2
    assert "not a whole JSON file" in capsys.readouterr().err


def test_every_gate_has_help_and_a_name_of_its_own() -> None:
    assert len({gate.flag for gate in GATES}) == len({gate.name for gate in GATES}) == len(GATES)
    assert all(gate.help and gate.needs for gate in GATES)
    assert build_parser("assert_result_gates") is not None


GOOD = result_of(live_records())
SEEN = observe(GOOD, examine(GOOD))


@given(st.sampled_from([gate for gate in GATES if gate.unit != "flag"]), st.floats(0, 1), st.floats(0, 1))
def test_a_stricter_bound_never_turns_a_failure_into_a_pass(gate: Any, one: float, other: float) -> None:
    loose, strict = (min(one, other), max(one, other)) if gate.bound == "min" else (max(one, other), min(one, other))
    failed_loose, failed_strict = (bool(check(SEEN, {gate.name: bound})[0]) for bound in (loose, strict))
    assert failed_strict >= failed_loose
