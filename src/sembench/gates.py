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
from sembench.scoring.statistics import Estimate, estimate_mean
from sembench.trust import SAME, Examination, is_same
from semblend.errors import InputError


@dataclass(frozen=True, slots=True)
class ResultGate:
    """One flag, the metric it reads and its unit (share, count, ratio, number, flag), and what the metric needs."""

    flag: str
    metric: str
    unit: str
    help: str
    needs: str = "a run that observes it"

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def bound(self) -> Literal["min", "max", "true"]:
        """Which side is good. A flag without a value requires that the metric is true, or (``no``) that it is 0."""
        if self.flag.startswith("--require-"):
            return "max" if self.flag.startswith("--require-no-") else "true"
        return "min" if self.flag.startswith("--min-") else "max"


_PAIRED = "a live run with --paired"
_ENGINE = "--engine-summary"
_COLD = "a live run with --paired; KL also needs --capture-logprobs"

# fmt: off
GATES: tuple[ResultGate, ...] = tuple(ResultGate(*row) for row in (
    ("--min-quality-pass-rate", "quality_pass_rate", "share", "share of answers that pass against the gold answer"),
    ("--min-semantic-placement-rate", "semantic_placement_rate_by_request", "share",
     "share of requests routed by semantic placement", "a gateway that answers with route metadata"),
    ("--min-backend-confirmed-block-rate", "backend_confirmed_block_rate", "share",
     "share of full blocks whose reuse the backend confirmed", "a live run whose backend confirms reuse"),
    ("--min-materialization-events", "materialization_events", "count",
     "materializations in the engine summaries", _ENGINE),
    ("--min-materialized-tokens", "materialized_tokens", "count",
     "materialized tokens in the engine summaries", _ENGINE),
    ("--min-materialized-units", "materialized_units", "count",
     "materialized units (segments, spans) in the engine summaries", _ENGINE),
    ("--max-negative-control-confirmed-rate", "negative_control_backend_confirmed_rate", "share",
     "confirmed reuse on unrelated pairs", "a live run with negative controls"),
    ("--max-negative-control-semantic-placement-rate", "negative_control_semantic_placement_rate", "share",
     "semantic placements of unrelated pairs", "negative controls through a gateway with route metadata"),
    ("--require-materialized-reuse", "materialized_semantic_kv_reuse", "flag",
     "an engine summary proves materialized semantic reuse", _ENGINE),
    ("--require-no-engine-errors", "engine_errors", "flag", "the engine summaries hold no error", _ENGINE),
    ("--min-blended-ttft-speedup", "blended_ttft_speedup_median", "ratio",
     "median of cold over warm TTFT, all positive pairs", _PAIRED),
    ("--min-hit-only-ttft-speedup", "hit_only_ttft_speedup_median", "ratio",
     "the same over pairs with confirmed reuse", _PAIRED),
    ("--max-negative-control-speedup-deviation", "negative_control_speedup_deviation", "number",
     "distance from 1 of the median speed-up of unrelated pairs", _PAIRED + " and negative controls"),
    ("--require-contamination-check", "contamination_checked", "flag",
     "every pair was checked for a cold arm that was not cold", _PAIRED),
    ("--max-contaminated-pair-rate", "contaminated_pair_rate", "share",
     "share of pairs whose cold arm was not cold", _PAIRED),
    ("--max-warm-vs-cold-rouge-drop", "warm_vs_cold_rouge_drop", "number",
     "ROUGE-L of warm against cold below the noise floor's", "--noise-floor-calibration and " + _PAIRED),
    ("--max-cold-kl", "confirmed_cold_kl_mean", "number",
     "mean KL from the cold answer over confirmed reuse, in nats", _COLD),
    ("--min-cold-f1", "confirmed_cold_f1_mean", "share",
     "mean token F1 against the cold answer over confirmed reuse", _COLD),
    ("--max-false-safe-rate", "false_safe_rate", "share",
     "confirmed reuse with KL above .1 or F1 against cold below .5", _COLD),
    ("--require-no-contradictions", "contradiction_count", "flag",
     "receipts, usage, counters and audit agree", "a live run with at least one source of confirmation"),
    ("--max-cross-tenant-confirmed-rate", "cross_tenant_backend_confirmed_rate", "share",
     "confirmed reuse across tenants", "a live run with tenant pairs"),
    ("--max-donor-fact-rate", "donor_fact_answered_rate", "share",
     "answers that state the donor's fact instead of their own prompt's", "cases with planted facts"),
    ("--min-planted-fact-rate", "planted_fact_answered_rate", "share",
     "answers that state the fact of their own prompt", "cases with planted facts"),
    ("--max-wrong-kv-pairs", "wrong_kv_pairs", "count",
     "pairs where only the warm answer states the donor's fact", _PAIRED),
    ("--max-hits-without-saving", "hits_without_saving", "count",
     "confirmed hits no faster than the noise", _PAIRED + " and a rerun arm"),
    ("--max-faster-without-reuse", "faster_without_reuse", "count",
     "pairs faster than the noise without confirmed reuse", _PAIRED + " and a rerun arm"),
    ("--min-semantic-eligible-lift", "semantic_eligible_lift", "number",
     "eligible minus exact block rate", "an offline run with a planner"),
    ("--min-backend-confirmed-lift", "backend_confirmed_lift", "number",
     "confirmed minus exact block rate", "a live run whose backend confirms reuse"),
    ("--max-negative-control-eligible-rate", "negative_control_semantic_eligible_rate", "share",
     "blocks of unrelated pairs that a planner calls eligible", "an offline run with negative controls"),
    ("--max-wrong-tokens", "wrong_tokens", "count",
     "tokens that a planner calls equal and that are not", "an offline run with a planner"),
    ("--max-error-rate", "error_rate", "share", "share of requests that failed"),
    ("--min-requests", "request_count", "count", "requests in the result"),
))
_LOAD = "a load result (sembench run-load)"
_SLO = "a load result with --slo"
LOAD_GATES: tuple[ResultGate, ...] = tuple(ResultGate(*row) for row in (
    ("--min-request-throughput", "request_throughput", "ratio", "answers a second", _LOAD),
    ("--min-output-throughput", "output_throughput", "ratio", "output tokens a second", _LOAD),
    ("--min-goodput-share", "goodput_share", "share", "requests within the promises", _SLO),
    ("--max-failed-share", "failed_share", "share", "requests that failed", _LOAD),
    ("--max-median-ttft-ms", "median_ttft_ms", "number", "median time to first token", _LOAD),
    ("--max-p99-ttft-ms", "p99_ttft_ms", "number", "99th percentile of it", _LOAD),
    ("--max-p99-tpot-ms", "p99_tpot_ms", "number", "99th percentile of time a token", _LOAD),
    ("--max-p99-e2el-ms", "p99_e2el_ms", "number", "99th percentile of the whole time", _LOAD),
))
# fmt: on
_BY_NAME = {gate.name: gate for gate in (*GATES, *LOAD_GATES)}


# -- the check -------------------------------------------------------------------------------------------------------
# A gate names one metric and one bound. A requested gate whose metric nobody observed fails: silence proves nothing.
# The numbers are computed again from the requests, with reuse only as far as it is witnessed (`sembench.trust`); a file
# whose own aggregate says something else fails as well.


@dataclass
class MetricObservations:
    """Every metric that a gate may read, as far as it is believed, and where the file itself says something else."""

    values: dict[str, Estimate] = field(default_factory=dict)
    disagreements: dict[str, str] = field(default_factory=dict)
    paired: Mapping[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: Any, ci: Any = None, n: Any = None) -> None:
        finite = not isinstance(value, float) or math.isfinite(value)
        self.values[name] = Estimate(value if finite else None, ci, n)


def observe(result: Result, examined: Examination, calibration: Mapping[str, Any] | None = None) -> MetricObservations:
    """Return all metrics of a result, as far as its examination believes them."""
    records = examined.records
    believed = summarize_pairs(records) or {}
    seen = MetricObservations({gate.metric: Estimate(None) for gate in GATES}, paired=believed)
    _take_metrics(seen, result.aggregate, aggregate(result.requests), aggregate(records))
    _take_metrics(seen, result.paired or {}, summarize_pairs(result.requests) or {}, believed)
    _derive_paired(seen, records, believed, calibration)
    reused = [record for record in select_measured(records) if record.backend_confirmed_tokens]
    for name in (
        "cold_kl_topk",
        "cold_f1",
    ):  # over confirmed reuse only: requests that ran cold would hide the distance
        samples = ((getattr(record, name), record.cluster) for record in reused)
        seen.values[f"confirmed_{name.removesuffix('_topk')}_mean"] = estimate_mean(samples)
    if examined.summaries:  # without an engine's log nothing is known, not even the absence of errors
        logs = examined.summaries
        seen.put("materialization_events", sum(one.events for one in logs))
        seen.put("materialized_tokens", sum(one.tokens for one in logs))
        seen.put("materialized_units", sum(one.units for one in logs))
        seen.put("engine_errors", sum(one.errors for one in logs))
        seen.put("materialized_semantic_kv_reuse", any(one.proves_reuse for one in logs))
    if not any(record.confirmation_sources for record in result.requests) and result.requests:
        seen.put("contradiction_count", None)  # without a witness, zero contradictions prove nothing
    return seen


def _take_metrics(
    seen: MetricObservations, stated: Mapping[str, Any], computed: Mapping[str, Any], believed: Mapping[str, Any]
) -> None:
    """Take the values that are believed; what the file states must be equal to what its requests give."""
    for name in seen.values.keys() & (believed.keys() | stated.keys()):
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
    floor, rouge = (calibration or {}).get("rouge_l_mean"), pairs.get("warm_vs_cold_output_rouge_l_mean")
    seen.put("warm_vs_cold_rouge_drop", None if floor is None or rouge is None else floor - rouge)


def check(
    seen: MetricObservations,
    requested: Mapping[str, float | bool],
    *,
    allow_missing: bool = False,
    pessimistic: bool = False,
    where: str = "",
) -> tuple[list[str], list[str]]:
    """Return why gates fail, one line each, and the metrics that are missing; ``where`` is said in each line."""
    failures, missing = [], []
    for name, bound in requested.items():
        gate = _BY_NAME[name]
        found = seen.values[gate.metric]
        if gate.metric in seen.disagreements:
            reason: str | None = f"{gate.metric}: {seen.disagreements[gate.metric]}"
        elif found.value is None:
            missing.append(gate.metric)
            reason = f"{gate.metric} was not observed; {_explain_missing(gate, seen)}"
            reason = None if allow_missing else reason
        else:
            reason = _explain_failure(gate, found, bound, pessimistic)
        if reason:
            failures.append(f"{gate.flag}: {where}{reason}")
    return failures, missing


def check_load(result: LoadResult, requested: Mapping[str, float | bool]) -> tuple[list[str], list[str]]:
    """Return why gates fail, one line for each gate and point, and the metrics that are missing."""
    failures, missing = [], set()
    for point in result.points:
        found = summarize_load(point.requests, point.duration_s, result.slo)
        seen = MetricObservations({name: Estimate(value) for name, value in found.items()})
        failed, absent = check(seen, requested, where=f"{point.name}: ")
        failures += failed
        missing |= set(absent)
    return failures, sorted(missing)


def _explain_missing(gate: ResultGate, seen: MetricObservations) -> str:
    """Say what a metric needs; of a paired run, what its pairs lack."""
    total, used = seen.paired.get("pairs_total"), seen.paired.get("pairs_used")
    if total and "--paired" in gate.needs:
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


def _explain_failure(gate: ResultGate, found: Estimate, bound: float | bool, pessimistic: bool) -> str | None:
    value, ci = found.value, found.ci
    if value is None or gate.bound == "true":
        return None if value else f"{gate.metric} is false"
    limit = 0.0 if isinstance(bound, bool) else bound
    at_least = gate.bound == "min"
    judged = (ci[0] if at_least else ci[1]) if pessimistic and ci else value
    if (judged >= limit - SAME * 1e-3) if at_least else (judged <= limit + SAME * 1e-3):
        return None
    notes = [f"95 % {_format_value(ci[0])} to {_format_value(ci[1])}"] if ci else []
    notes += [] if found.n is None else [f"n={found.n}"]
    note = f" ({', '.join(notes)})" if notes else ""
    wanted = f"wanted {'at least' if at_least else 'at most'} {_format_value(limit)}"
    return f"{gate.metric} is {_format_value(value)}{note}, {wanted}"


def read_summary(path: str | Path) -> dict[str, Any]:
    """Read an engine summary; one that another tool wrote is accepted if it has the counters."""
    value = read_json_object(path, hint="make it again")
    if "materialization_events" not in value or "errors" not in value:
        raise InputError(f"{path} is no engine summary", hint="make one with sembench summarize-engine-events --output")
    return value


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
