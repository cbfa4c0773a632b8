"""The numbers of a load point, from its requests, under the names of ``vllm bench serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sembench.load_result import LoadRequest
from sembench.scoring.statistics import compute_mean, compute_median, compute_percentile

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)


def summarize_load(requests: Sequence[LoadRequest], duration_s: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of ``vllm bench serve``; times are None if nothing was answered."""
    good = [one for one in requests if one.ok]
    inputs = [one.prompt_tokens for one in good if one.prompt_tokens is not None]
    output = sum(one.output_tokens or 0 for one in good)
    met = sum(one.meets(slo) for one in good) if slo else None
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(requests) - len(good),
        "failed_share": (len(requests) - len(good)) / len(requests) if requests else None,
        "total_input_tokens": sum(inputs) if inputs else None,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None if met is None else met / duration_s,
        "goodput_share": met / len(requests) if met is not None and requests else None,
        "output_throughput": output / duration_s,
        "total_token_throughput": (sum(inputs) + output) / duration_s if inputs else None,
        "max_concurrent_requests": _count_most_at_once(requests),
        "mean_late_ms": compute_mean([one.late_ms for one in requests]),
        "p99_late_ms": compute_percentile([one.late_ms for one in requests], 99),
    }
    series = {
        "ttft": [one.ttft_ms for one in good if one.ttft_ms is not None],
        "tpot": [one.tpot_ms for one in good if one.tpot_ms is not None],
        "itl": [gap for one in good for gap in one.itl_ms],
        "e2el": [one.e2el_ms for one in good if one.e2el_ms is not None],
    }
    for name in METRICS:
        found |= _summarize_times(name, series[name])
    reused = [one.reused_tokens for one in good if one.reused_tokens is not None]
    cached = [one.cached_tokens for one in good if one.cached_tokens is not None]
    return found | {
        "reused_tokens": sum(reused) if reused else None,
        "cached_tokens": sum(cached) if cached else None,
        "receipts": len(reused),
    }


def _summarize_times(name: str, values: Sequence[float]) -> dict[str, float | None]:
    centre = compute_mean(values)
    found = {f"mean_{name}_ms": centre, f"median_{name}_ms": compute_median(values)}
    spread = None if centre is None else (sum((value - centre) ** 2 for value in values) / len(values)) ** 0.5
    return (
        found | {f"std_{name}_ms": spread} | {f"p{at}_{name}_ms": compute_percentile(values, at) for at in PERCENTILES}
    )


def _count_most_at_once(requests: Sequence[LoadRequest]) -> int:
    """Return the number of requests under way at the busiest moment."""
    moments = [(one.due_s + one.late_ms / 1000, 1) for one in requests] + [(one.finished_s, -1) for one in requests]
    now = most = 0
    for _, step in sorted(moments):
        now += step
        most = max(most, now)
    return most
