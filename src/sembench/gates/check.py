"""Checks gates: what a result must show before anybody may call it good.

A gate names one metric and one bound. A requested gate whose metric nobody observed fails: silence proves nothing.
The numbers are computed again from the requests; a file whose own aggregate says something else fails as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sembench.files import read_json_object
from sembench.gates.table import GATES, ResultGate
from sembench.result import Result
from sembench.scoring.aggregate import aggregate, select_measured
from sembench.scoring.paired import pair_records, summarize_pairs
from sembench.scoring.statistics import estimate_mean
from semblend.errors import InputError

_SAME = 1e-6


@dataclass
class MetricObservations:
    """Every metric that a gate may read: its value, its interval and n where known, and where the value comes from."""

    values: dict[str, Any] = field(default_factory=dict)
    intervals: dict[str, Sequence[float] | None] = field(default_factory=dict)
    counts: dict[str, int | None] = field(default_factory=dict)
    disagreements: dict[str, str] = field(default_factory=dict)
    unverified: set[str] = field(default_factory=set)

    def put(self, name: str, value: Any, ci: Any = None, n: Any = None) -> None:
        self.values[name], self.intervals[name], self.counts[name] = _drop_non_finite(value), ci, n


def observe(
    result: Result, summaries: Sequence[Mapping[str, Any]], calibration: Mapping[str, Any] | None = None
) -> MetricObservations:
    """Return all metrics of a result and of the engine summaries that belong to it."""
    seen = MetricObservations()
    again = aggregate(result.requests) if result.requests else {}
    again_paired = summarize_pairs(result.requests) or {}
    for gate in GATES:
        _take_metric(seen, gate.metric, result.aggregate, again)
        if seen.values.get(gate.metric) is None:
            _take_metric(seen, gate.metric, result.paired or {}, again_paired)
    _derive_paired(seen, result, {**(result.paired or {}), **again_paired}, calibration)
    _derive_confirmed(seen, result)
    _derive_engine(seen, summaries)
    if not any(record.confirmation_sources for record in result.requests) and result.requests:
        seen.put("contradiction_count", None)  # without a witness, zero contradictions prove nothing
    return seen


def _take_metric(seen: MetricObservations, name: str, stated: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
    """Take the value computed from the requests, where there is one; what the file states must be equal to it."""
    found = computed if computed.get(name) is not None else stated
    if name not in found and name in seen.values:
        return
    seen.put(name, found.get(name), found.get(f"{name}_ci"), found.get(f"{name}_n"))
    own, file_says = computed.get(name), stated.get(name)
    if computed and isinstance(file_says, (int, float)) and not _is_same(own, file_says):
        seen.disagreements[name] = f"the file states {_format_value(file_says)}, its requests give {_format_value(own)}"
        if own is None:
            seen.put(name, None)
    if not computed and file_says is not None:
        seen.unverified.add(name)


def _derive_paired(
    seen: MetricObservations, result: Result, pairs: Mapping[str, Any], calibration: Mapping[str, Any] | None
) -> None:
    speed = pairs.get("negative_control_ttft_speedup_median")
    seen.put("negative_control_speedup_deviation", None if speed is None else abs(speed - 1.0))
    total, dirty = pairs.get("pairs_total"), pairs.get("pairs_contaminated")
    seen.put("contaminated_pair_rate", dirty / total if total and dirty is not None else None, n=total)
    whole = pair_records(result.requests)
    seen.put("contamination_checked", all(p.cold.flush_contaminated is not None for p in whole) if whole else None)
    floor = None if calibration is None else calibration.get("rouge_l_mean")
    rouge = pairs.get("warm_vs_cold_output_rouge_l_mean")
    seen.put("warm_vs_cold_rouge_drop", None if floor is None or rouge is None else floor - rouge)


def _derive_confirmed(seen: MetricObservations, result: Result) -> None:
    """Add the distance from the cold answer, over requests with confirmed reuse only: cold ones would hide it."""
    reused = [record for record in select_measured(result.requests) if record.backend_confirmed_tokens]
    for name, attribute in (("confirmed_cold_kl_mean", "cold_kl_topk"), ("confirmed_cold_f1_mean", "cold_f1")):
        found = estimate_mean((getattr(record, attribute), record.cluster) for record in reused)
        seen.put(name, found.value, found.ci, found.n)


def _derive_engine(seen: MetricObservations, summaries: Sequence[Mapping[str, Any]]) -> None:
    # An empty log proves nothing, not even the absence of errors.
    spoken = [summary for summary in summaries if summary.get("lines", 1)]
    for name in ("materialization_events", "materialized_tokens", "materialized_units"):
        seen.put(name, sum(_read_count(summary, name) for summary in spoken) if spoken else None)
    seen.put("engine_errors", sum(_read_count(summary, "errors") for summary in spoken) if spoken else None)
    proofs = [bool(summary.get("materialized_semantic_kv_reuse")) for summary in spoken]
    seen.put("materialized_semantic_kv_reuse", any(proofs) if spoken else None)


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
                failures.append(f"{gate.flag}: {gate.metric} was not observed; it needs {gate.needs}")
        elif reason := _explain_failure(gate, seen, bound, pessimistic):
            failures.append(f"{gate.flag}: {reason}")
    return failures, missing


def _explain_failure(gate: ResultGate, seen: MetricObservations, bound: float | bool, pessimistic: bool) -> str | None:
    value = seen.values[gate.metric]
    if gate.bound == "true":
        return None if value else f"{gate.metric} is false"
    limit = 0.0 if isinstance(bound, bool) else bound
    ci = seen.intervals.get(gate.metric)
    judged = value
    if pessimistic and ci:
        judged = ci[0] if gate.bound == "min" else ci[1]
    if (judged >= limit - _SAME * 1e-3) if gate.bound == "min" else (judged <= limit + _SAME * 1e-3):
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


def _read_count(summary: Mapping[str, Any], name: str) -> int:
    """Return a counter of a summary; some tools write the list of what they counted instead."""
    value = summary.get(name, 0)
    if isinstance(value, (list, dict)):
        return len(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"engine summary: {name} is {value!r}, not a count", hint="make the summary again")
    return value


def _is_same(left: Any, right: float) -> bool:
    if not isinstance(left, (int, float)):
        return False
    return math.isclose(left, right, rel_tol=1e-6, abs_tol=_SAME)


def _drop_non_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
