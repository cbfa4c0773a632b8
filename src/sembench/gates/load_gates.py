"""Gates of a load result: bounds that every point of the sweep must keep."""

from __future__ import annotations

from collections.abc import Mapping

from sembench.gates.table import ResultGate
from sembench.load_result import LoadResult
from sembench.scoring.load_summary import summarize_load

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
