"""Checks gates: what a result must show before anybody may call it good.

A gate names one metric and one bound. A requested gate whose metric nobody observed fails: silence proves nothing.
The numbers are computed again from the requests, with reuse only as far as it is witnessed (`sembench.trust`); a file
whose own aggregate says something else fails as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sembench.files import read_json_object
from sembench.gates.table import GATES, ResultGate
from sembench.result import RequestRecord, Result
from sembench.scoring.aggregate import aggregate, select_measured
from sembench.scoring.paired import pair_records, summarize_pairs
from sembench.scoring.statistics import estimate_mean
from sembench.trust.binding import BoundSummary
from sembench.trust.examine import Examination
from sembench.trust.integrity import SAME, is_same
from semblend.errors import InputError


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
