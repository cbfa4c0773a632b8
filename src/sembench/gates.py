"""The gates of ``sembench assert-result-gates``: tables of flag, metric, good side and need; and the check of a result.

The parser, the check and docs/METRICS.md are made from the tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sembench.files import read_json_object
from sembench.result import LoadResult, RequestRecord, Result
from sembench.scoring.aggregate import aggregate, pair_records, select_measured, summarize_load, summarize_pairs
from sembench.scoring.statistics import estimate_mean
from sembench.trust import SAME, BoundSummary, Examination, is_same
from semblend.errors import InputError

Bound = Literal["min", "max", "true"]
Unit = Literal["share", "count", "ratio", "number", "flag"]


@dataclass(frozen=True, slots=True)
class ResultGate:
    """One flag, the metric it reads and which side is good."""

    flag: str
    metric: str
    bound: Bound
    unit: Unit
    help: str
    # What to do when the metric is missing.
    needs: str = "a run that observes it"

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


_PAIRED = "a live run with --paired"
_ENGINE = "--engine-summary"
_COLD = "a live run with --paired; KL also needs --capture-logprobs"

# fmt: off
GATES: tuple[ResultGate, ...] = (
    ResultGate(
        "--min-quality-pass-rate", "quality_pass_rate", "min", "share",
        "share of answers that pass against the gold answer",
    ),
    ResultGate(
        "--min-semantic-placement-rate", "semantic_placement_rate_by_request", "min", "share",
        "share of requests routed by semantic placement", "a gateway that answers with route metadata",
    ),
    ResultGate(
        "--min-backend-confirmed-block-rate", "backend_confirmed_block_rate", "min", "share",
        "share of full blocks whose reuse the backend confirmed", "a live run whose backend confirms reuse",
    ),
    ResultGate(
        "--min-materialization-events", "materialization_events", "min", "count",
        "materializations in the engine summaries", _ENGINE,
    ),
    ResultGate(
        "--min-materialized-tokens", "materialized_tokens", "min", "count",
        "materialized tokens in the engine summaries", _ENGINE,
    ),
    ResultGate(
        "--min-materialized-units", "materialized_units", "min", "count",
        "materialized units (segments, spans) in the engine summaries", _ENGINE,
    ),
    ResultGate(
        "--max-negative-control-confirmed-rate", "negative_control_backend_confirmed_rate", "max", "share",
        "confirmed reuse on unrelated pairs", "a live run with negative controls",
    ),
    ResultGate(
        "--max-negative-control-semantic-placement-rate", "negative_control_semantic_placement_rate", "max", "share",
        "semantic placements of unrelated pairs", "negative controls through a gateway with route metadata",
    ),
    ResultGate(
        "--require-materialized-reuse", "materialized_semantic_kv_reuse", "true", "flag",
        "an engine summary proves materialized semantic reuse", _ENGINE,
    ),
    ResultGate(
        "--require-no-engine-errors", "engine_errors", "max", "flag",
        "the engine summaries hold no error", _ENGINE,
    ),
    ResultGate(
        "--min-blended-ttft-speedup", "blended_ttft_speedup_median", "min", "ratio",
        "median of cold over warm TTFT, all positive pairs", _PAIRED,
    ),
    ResultGate(
        "--min-hit-only-ttft-speedup", "hit_only_ttft_speedup_median", "min", "ratio",
        "the same over pairs with confirmed reuse", _PAIRED,
    ),
    ResultGate(
        "--max-negative-control-speedup-deviation", "negative_control_speedup_deviation", "max", "number",
        "distance from 1 of the median speed-up of unrelated pairs", _PAIRED + " and negative controls",
    ),
    ResultGate(
        "--require-contamination-check", "contamination_checked", "true", "flag",
        "every pair was checked for a cold arm that was not cold", _PAIRED,
    ),
    ResultGate(
        "--max-contaminated-pair-rate", "contaminated_pair_rate", "max", "share",
        "share of pairs whose cold arm was not cold", _PAIRED,
    ),
    ResultGate(
        "--max-warm-vs-cold-rouge-drop", "warm_vs_cold_rouge_drop", "max", "number",
        "ROUGE-L of warm against cold below the noise floor's", "--noise-floor-calibration and " + _PAIRED,
    ),
    ResultGate(
        "--max-cold-kl", "confirmed_cold_kl_mean", "max", "number",
        "mean KL from the cold answer over confirmed reuse, in nats", _COLD,
    ),
    ResultGate(
        "--min-cold-f1", "confirmed_cold_f1_mean", "min", "share",
        "mean token F1 against the cold answer over confirmed reuse", _COLD,
    ),
    ResultGate(
        "--max-false-safe-rate", "false_safe_rate", "max", "share",
        "confirmed reuse with KL above .1 or F1 against cold below .5", _COLD,
    ),
    ResultGate(
        "--require-no-contradictions", "contradiction_count", "max", "flag",
        "receipts, usage, counters and audit agree", "a live run with at least one source of confirmation",
    ),
    ResultGate(
        "--max-cross-tenant-confirmed-rate", "cross_tenant_backend_confirmed_rate", "max", "share",
        "confirmed reuse across tenants", "a live run with tenant pairs",
    ),
    ResultGate(
        "--max-donor-fact-rate", "donor_fact_answered_rate", "max", "share",
        "answers that state the donor's fact instead of their own prompt's", "cases with planted facts",
    ),
    ResultGate(
        "--min-planted-fact-rate", "planted_fact_answered_rate", "min", "share",
        "answers that state the fact of their own prompt", "cases with planted facts",
    ),
    ResultGate(
        "--max-wrong-kv-pairs", "wrong_kv_pairs", "max", "count",
        "pairs where only the warm answer states the donor's fact", _PAIRED,
    ),
    ResultGate(
        "--max-hits-without-saving", "hits_without_saving", "max", "count",
        "confirmed hits no faster than the noise", _PAIRED + " and a rerun arm",
    ),
    ResultGate(
        "--max-faster-without-reuse", "faster_without_reuse", "max", "count",
        "pairs faster than the noise without confirmed reuse", _PAIRED + " and a rerun arm",
    ),
    ResultGate(
        "--min-semantic-eligible-lift", "semantic_eligible_lift", "min", "number",
        "eligible minus exact block rate", "an offline run with a planner",
    ),
    ResultGate(
        "--min-backend-confirmed-lift", "backend_confirmed_lift", "min", "number",
        "confirmed minus exact block rate", "a live run whose backend confirms reuse",
    ),
    ResultGate(
        "--max-negative-control-eligible-rate", "negative_control_semantic_eligible_rate", "max", "share",
        "blocks of unrelated pairs that a planner calls eligible", "an offline run with negative controls",
    ),
    ResultGate(
        "--max-wrong-tokens", "wrong_tokens", "max", "count",
        "tokens that a planner calls equal and that are not", "an offline run with a planner",
    ),
    ResultGate("--max-error-rate", "error_rate", "max", "share", "share of requests that failed"),
    ResultGate("--min-requests", "request_count", "min", "count", "requests in the result"),
)
# fmt: on


# -- the check -------------------------------------------------------------------------------------------------------
# Checks gates: what a result must show before anybody may call it good.
#
# A gate names one metric and one bound. A requested gate whose metric nobody observed fails: silence proves nothing.
# The numbers are computed again from the requests, with reuse only as far as it is witnessed (`sembench.trust`); a file
# whose own aggregate says something else fails as well.


@dataclass
class MetricObservations:
    """Every metric that a gate may read: its value, its interval and n where known, and where the value comes from."""

    values: dict[str, Any] = field(default_factory=dict)
    intervals: dict[str, Sequence[float] | None] = field(default_factory=dict)
    counts: dict[str, int | None] = field(default_factory=dict)
    disagreements: dict[str, str] = field(default_factory=dict)
    paired: Mapping[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: Any, ci: Any = None, n: Any = None) -> None:
        self.values[name], self.intervals[name], self.counts[name] = _drop_non_finite(value), ci, n


def observe(result: Result, examined: Examination, calibration: Mapping[str, Any] | None = None) -> MetricObservations:
    """Return all metrics of a result, as far as its examination believes them."""
    records = examined.records
    believed = summarize_pairs(records) or {}
    seen = MetricObservations(paired=believed)
    _take_metrics(seen, result.aggregate, aggregate(result.requests), aggregate(records))
    _take_metrics(seen, result.paired or {}, summarize_pairs(result.requests) or {}, believed)
    _derive_paired(seen, records, believed, calibration)
    _derive_confirmed(seen, records)
    _derive_engine(seen, examined.summaries)
    if not any(record.confirmation_sources for record in result.requests) and result.requests:
        seen.put("contradiction_count", None)  # without a witness, zero contradictions prove nothing
    return seen


def _take_metrics(
    seen: MetricObservations, stated: Mapping[str, Any], computed: Mapping[str, Any], believed: Mapping[str, Any]
) -> None:
    """Take the values that are believed; what the file states must be equal to what its requests give."""
    for name in {gate.metric for gate in GATES}:
        if name not in believed and name not in stated:
            seen.values.setdefault(name, None)
            continue
        seen.put(name, believed.get(name), believed.get(f"{name}_ci"), believed.get(f"{name}_n"))
        own, file_says = computed.get(name), stated.get(name)
        if isinstance(file_says, (int, float)) and not is_same(own, file_says):
            said = f"the file states {_format_value(file_says)}, its requests give {_format_value(own)}"
            seen.disagreements[name] = said


def _derive_paired(
    seen: MetricObservations,
    records: Sequence[RequestRecord],
    pairs: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
) -> None:
    speed = pairs.get("negative_control_ttft_speedup_median")
    seen.put("negative_control_speedup_deviation", None if speed is None else abs(speed - 1.0))
    total, dirty = pairs.get("pairs_total"), pairs.get("pairs_contaminated")
    seen.put("contaminated_pair_rate", dirty / total if total and dirty is not None else None, n=total)
    whole = pair_records(records)
    seen.put("contamination_checked", all(p.cold.flush_contaminated is not None for p in whole) if whole else None)
    floor = None if calibration is None else calibration.get("rouge_l_mean")
    rouge = pairs.get("warm_vs_cold_output_rouge_l_mean")
    seen.put("warm_vs_cold_rouge_drop", None if floor is None or rouge is None else floor - rouge)


def _derive_confirmed(seen: MetricObservations, records: Sequence[RequestRecord]) -> None:
    """Add the distance from the cold answer, over requests with confirmed reuse only: cold ones would hide it."""
    reused = [record for record in select_measured(records) if record.backend_confirmed_tokens]
    for name, attribute in (("confirmed_cold_kl_mean", "cold_kl_topk"), ("confirmed_cold_f1_mean", "cold_f1")):
        found = estimate_mean((getattr(record, attribute), record.cluster) for record in reused)
        seen.put(name, found.value, found.ci, found.n)


def _derive_engine(seen: MetricObservations, bound: Sequence[BoundSummary]) -> None:
    """Add the engine logs that belong to the run; without one nothing is known, not even the absence of errors."""
    seen.put("materialization_events", sum(one.events for one in bound) if bound else None)
    seen.put("materialized_tokens", sum(one.tokens for one in bound) if bound else None)
    seen.put("materialized_units", sum(one.units for one in bound) if bound else None)
    seen.put("engine_errors", sum(one.errors for one in bound) if bound else None)
    seen.put("materialized_semantic_kv_reuse", any(one.proves_reuse for one in bound) if bound else None)


def check(
    seen: MetricObservations,
    requested: Mapping[str, float | bool],
    *,
    allow_missing: bool = False,
    pessimistic: bool = False,
) -> tuple[list[str], list[str]]:
    """Return why gates fail, one line each, and the metrics that are missing."""
    failures, missing = [], []
    by_name = {gate.name: gate for gate in GATES}
    for name, bound in requested.items():
        gate = by_name[name]
        if gate.metric in seen.disagreements:
            failures.append(f"{gate.flag}: {gate.metric}: {seen.disagreements[gate.metric]}")
        elif seen.values.get(gate.metric) is None:
            missing.append(gate.metric)
            if not allow_missing:
                failures.append(f"{gate.flag}: {gate.metric} was not observed; {_explain_missing(gate, seen)}")
        elif reason := _explain_failure(gate, seen, bound, pessimistic):
            failures.append(f"{gate.flag}: {reason}")
    return failures, missing


def _explain_missing(gate: ResultGate, seen: MetricObservations) -> str:
    """Say what a metric needs; of a paired run, what its pairs lack."""
    total, used = seen.paired.get("pairs_total"), seen.paired.get("pairs_used")
    if not total or "--paired" not in gate.needs:
        return f"it needs {gate.needs}"
    if not used:
        bad, failed = seen.paired.get("pairs_contaminated"), seen.paired.get("pairs_errored")
        return f"none of {total} pairs counts: {bad} had a cold arm that was not cold, {failed} failed"
    if "rerun" in gate.needs and not seen.paired.get("rerun_pairs"):
        return "it needs the rerun arm: leave --no-rerun out"
    if "negative" in gate.metric and not seen.paired.get("negative_control_pairs"):
        return f"none of {used} pairs is a negative control"
    if gate.metric.startswith(("hit_only", "confirmed_cold", "false_safe")) and not seen.paired.get("hit_rate"):
        return f"none of {used} pairs has confirmed reuse"
    return f"it needs {gate.needs}"


def _explain_failure(gate: ResultGate, seen: MetricObservations, bound: float | bool, pessimistic: bool) -> str | None:
    value = seen.values[gate.metric]
    if gate.bound == "true":
        return None if value else f"{gate.metric} is false"
    limit = 0.0 if isinstance(bound, bool) else bound
    ci = seen.intervals.get(gate.metric)
    judged = value
    if pessimistic and ci:
        judged = ci[0] if gate.bound == "min" else ci[1]
    if (judged >= limit - SAME * 1e-3) if gate.bound == "min" else (judged <= limit + SAME * 1e-3):
        return None
    n = seen.counts.get(gate.metric)
    notes = [f"95 % {_format_value(ci[0])} to {_format_value(ci[1])}" if ci else "", f"n={n}" if n is not None else ""]
    note = ", ".join(part for part in notes if part)
    word = "at least" if gate.bound == "min" else "at most"
    return (
        f"{gate.metric} is {_format_value(value)}{f' ({note})' if note else ''}, wanted {word} {_format_value(limit)}"
    )


def read_summary(path: str | Path) -> dict[str, Any]:
    """Read an engine summary; one that another tool wrote is accepted if it has the counters."""
    value = read_json_object(path, hint="make it again")
    if "materialization_events" not in value or "errors" not in value:
        raise InputError(f"{path} is no engine summary", hint="make one with sembench summarize-engine-events --output")
    return value


def _drop_non_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- gates of a load result ------------------------------------------------------------------------------------------
# Gates of a load result: bounds that every point of the sweep must keep.

_LOAD = "a load result (sembench run-load)"
_SLO = "a load result with --slo"

LOAD_GATES: tuple[ResultGate, ...] = (
    ResultGate("--min-request-throughput", "request_throughput", "min", "ratio", "answers a second", _LOAD),
    ResultGate("--min-output-throughput", "output_throughput", "min", "ratio", "output tokens a second", _LOAD),
    ResultGate("--min-goodput-share", "goodput_share", "min", "share", "requests within the promises", _SLO),
    ResultGate("--max-failed-share", "failed_share", "max", "share", "requests that failed", _LOAD),
    ResultGate("--max-median-ttft-ms", "median_ttft_ms", "max", "number", "median time to first token", _LOAD),
    ResultGate("--max-p99-ttft-ms", "p99_ttft_ms", "max", "number", "99th percentile of it", _LOAD),
    ResultGate("--max-p99-tpot-ms", "p99_tpot_ms", "max", "number", "99th percentile of time a token", _LOAD),
    ResultGate("--max-p99-e2el-ms", "p99_e2el_ms", "max", "number", "99th percentile of the whole time", _LOAD),
)


def check_load(result: LoadResult, requested: Mapping[str, float | bool]) -> tuple[list[str], list[str]]:
    """Return why gates fail, one line for each gate and point, and the metrics that are missing."""
    failures, missing = [], []
    by_name = {gate.name: gate for gate in LOAD_GATES}
    for name, bound in requested.items():
        gate = by_name[name]
        for point in result.points:
            value = summarize_load(point.requests, point.duration_s, result.slo)[gate.metric]
            if value is None:
                missing.append(gate.metric)
                failures.append(f"{gate.flag}: {point.name}: {gate.metric} was not observed; it needs {gate.needs}")
            elif value < bound if gate.bound == "min" else value > bound:
                word = "at least" if gate.bound == "min" else "at most"
                failures.append(f"{gate.flag}: {point.name}: {gate.metric} is {value:.4g}, wanted {word} {bound:g}")
    return failures, sorted(set(missing))
