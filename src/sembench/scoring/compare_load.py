"""Compares two load runs point by point: the same rate and concurrency, the same requests, request by request.

Requests of a load run are not independent: a queue that is long for one is long for the next. So the unit is a stretch
of consecutive requests, and each point has twenty of them at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sembench.load_result import LoadPoint, LoadRequest, LoadResult
from sembench.scoring.compare import Metric, compare_metric, judge_family
from sembench.scoring.significance import FAMILY_ERROR
from semblend.errors import InputError

STRETCHES = 20
_CONFIG = ("model", "workload_sha256", "max_tokens", "seed", "burstiness", "with_donors", "think_time_s", "isolation")
ReadRequest = Callable[[LoadRequest], float | None]

METRICS: tuple[tuple[Metric, ReadRequest], ...] = (
    (Metric("ttft_ms", lambda _: None, "lower", "ratio"), lambda one: one.ttft_ms),
    (Metric("tpot_ms", lambda _: None, "lower", "ratio"), lambda one: one.tpot_ms),
    (Metric("e2el_ms", lambda _: None, "lower", "ratio"), lambda one: one.e2el_ms),
    (Metric("failed_share", lambda _: None, "lower"), lambda one: float(not one.ok)),
)


def compare_loads(base: LoadResult, new: LoadResult) -> dict[str, Any]:
    """Return the comparison for JSON: the points that both runs have, and the change of every metric at each."""
    shared = [(old, young) for old in base.points for young in new.points if _is_same_point(old, young)]
    if not shared:
        raise InputError("the two load runs share no point", hint="compare runs of the same rates and concurrencies")
    slo = base.slo if base.slo == new.slo else {}
    points = [_compare_point(old, young, slo) for old, young in shared]
    judge_family([row for point in points for row in point["metrics"]])
    return {
        "points_shared": len(shared),
        "points_only_in_base": len(base.points) - len(shared),
        "points_only_in_new": len(new.points) - len(shared),
        "setup_differences": [
            f"config.{name}: {base.config.get(name)!r} → {new.config.get(name)!r}"
            for name in _CONFIG
            if base.config.get(name) != new.config.get(name)
        ],
        "family_error": FAMILY_ERROR,
        "points": points,
    }


def _is_same_point(old: LoadPoint, young: LoadPoint) -> bool:
    return (old.request_rate, old.max_concurrency) == (young.request_rate, young.max_concurrency)


def _compare_point(old: LoadPoint, young: LoadPoint, slo: dict[str, float]) -> dict[str, Any]:
    later = {one.number: one for one in young.requests}
    pairs = [(one, later[one.number]) for one in old.requests if one.number in later]
    metrics = list(METRICS)
    if slo:
        kept = Metric("goodput_share", lambda _: None, "higher")
        metrics.append((kept, lambda one: float(one.ok and one.meets(slo))))
    rows = [row for metric, read in metrics if (row := _compare_requests(metric, read, pairs))]
    return {
        "name": old.name,
        "request_rate": old.request_rate,
        "max_concurrency": old.max_concurrency,
        "requests": len(pairs),
        "metrics": rows,
    }


def _compare_requests(
    metric: Metric, read: ReadRequest, pairs: Sequence[tuple[LoadRequest, LoadRequest]]
) -> dict[str, Any]:
    known = [(a, b) for old, young in pairs if (a := read(old)) is not None and (b := read(young)) is not None]
    if not known:
        return {}
    stretches = [str(at * min(STRETCHES, len(known)) // len(known)) for at in range(len(known))]
    return compare_metric(metric, known, stretches)
