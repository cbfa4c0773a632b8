"""Compares two results item by item, or two load runs point by point: what changed beyond noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sembench.result import LoadPoint, LoadRequest, LoadResult, RequestRecord, Result
from sembench.scoring.aggregate import pair_records, select_measured
from sembench.scoring.statistics import FAMILY_ERROR, bootstrap_mean, compute_p_value, group_by, select_significant
from semblend.errors import InputError

# -- results ---------------------------------------------------------------------------------------------------------
# Only items that both results hold are compared. The bootstrap of a difference draws whole documents, since cases cut
# from one document are not independent. A metric is called better or worse only if it would be so among all metrics of
# the comparison with an error of 1 % (`sembench.scoring.statistics`); else it is within noise.

Kind = Literal["difference", "ratio"]
Verdict = Literal["better", "worse", "within noise", "changed", "too few sources", "identical"]
Read = Callable[[Any], float | None]

_CONTEXT = ("manifest_sha256", "sembench_version", "engine", "engine_version", "backend_id")
_CONFIG = ("mode", "block_size", "tokenizer", "model", "planner", "quality_threshold")


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of one request or pair. Times are compared as ratios of geometric means, shares as differences."""

    name: str
    read: Read
    better: Literal["higher", "lower", "neither"]
    kind: Kind = "difference"


def _make_field_reader(name: str) -> Read:
    def read(record: Any) -> float | None:
        value = getattr(record, name)
        return None if value is None else float(value)

    return read


def _make_share_reader(top: str, bottom: str) -> Read:
    def read(record: Any) -> float | None:
        part, whole = getattr(record, top), getattr(record, bottom)
        return None if part is None or not whole else part / whole

    return read


METRICS: tuple[Metric, ...] = (
    Metric("ttft_ms", _make_field_reader("ttft_ms"), "lower", "ratio"),
    Metric("latency_ms", _make_field_reader("latency_ms"), "lower", "ratio"),
    Metric("semblend_latency_ms", _make_field_reader("semblend_latency_ms"), "lower", "ratio"),
    Metric("exact_block_hit_rate", _make_share_reader("exact_hit_blocks", "total_blocks"), "neither"),
    Metric("semantic_candidate_block_rate", _make_share_reader("semantic_candidate_blocks", "total_blocks"), "neither"),
    Metric("semantic_eligible_block_rate", _make_share_reader("semantic_eligible_blocks", "total_blocks"), "higher"),
    Metric("backend_confirmed_block_rate", _make_share_reader("backend_confirmed_blocks", "total_blocks"), "higher"),
    Metric("backend_confirmed_token_rate", _make_share_reader("backend_confirmed_tokens", "prompt_tokens"), "higher"),
    Metric("quality_pass_rate", _make_field_reader("quality_pass"), "higher"),
    Metric("quality_score", _make_field_reader("quality_score"), "higher"),
    Metric("quality_f1", _make_field_reader("quality_f1"), "higher"),
    Metric("quality_rouge_l", _make_field_reader("quality_rouge_l"), "higher"),
    Metric("cold_f1", _make_field_reader("cold_f1"), "higher"),
    Metric("cold_rouge_l", _make_field_reader("cold_rouge_l"), "higher"),
    Metric("cold_kl_topk", _make_field_reader("cold_kl_topk"), "lower"),
    Metric("donor_fact_answered_rate", _make_field_reader("donor_fact_answered"), "lower"),
    Metric("planted_fact_answered_rate", _make_field_reader("planted_fact_answered"), "higher"),
    Metric("wrong_tokens", _make_field_reader("wrong_tokens"), "lower"),
    Metric("error_rate", lambda record: float(record.error is not None), "lower"),
)
# Reuse on unrelated pairs is harmful, so a higher rate is worse there.
_HARM_ON_NEGATIVES = {
    "semantic_eligible_block_rate",
    "backend_confirmed_block_rate",
    "backend_confirmed_token_rate",
}


def compare_results(base: Result, new: Result) -> dict[str, Any]:
    """Return the comparison for JSON: the items, the differences of the set-up, and the change of every metric."""
    left, right = _index_by_item(base), _index_by_item(new)
    shared = [key for key in left if key in right]
    if not shared:
        raise InputError("the two results share no item", hint="compare results of one manifest; item_id joins them")
    pairs = [(left[key], right[key]) for key in shared]
    positive = [pair for pair in pairs if not pair[0].negative_control]
    negative = [pair for pair in pairs if pair[0].negative_control]
    groups = group_by(positive, lambda pair: pair[0].transform)
    by_transform = {name: _compare_metrics(group) for name, group in groups.items()}
    metrics = _compare_metrics(positive) + _compare_speedups(base, new)
    negative_controls = _compare_metrics(negative, negatives=True)
    judge_family([*metrics, *negative_controls])
    for row in negative_controls:  # one token more is a violation, not a matter of chance
        if row["metric"] in _HARM_ON_NEGATIVES and row["change"] > 0:
            row["verdict"] = "worse"
    judge_family([row for rows in by_transform.values() for row in rows])
    return {
        "items_shared": len(shared),
        "items_only_in_base": len(left) - len(shared),
        "items_only_in_new": len(right) - len(shared),
        "sources": len({old.cluster for old, _ in pairs}),
        "setup_differences": find_setup_differences(base, new),
        "family_error": FAMILY_ERROR,
        "metrics": metrics,
        "negative_controls": negative_controls,
        "by_transform": by_transform,
    }


def find_setup_differences(base: Result, new: Result) -> list[str]:
    """Return one line for each setting in which the two runs differ."""
    lines: list[str] = []
    for part, names in (("run", _CONTEXT), ("config", _CONFIG)):
        old, young = getattr(base, part) or {}, getattr(new, part) or {}
        changed = (name for name in names if old.get(name) != young.get(name))
        lines += [f"{part}.{name}: {old.get(name)!r} → {young.get(name)!r}" for name in changed]
    return lines


def compare_metric(
    metric: Metric, values: Sequence[tuple[float, float]], clusters: Sequence[str], *, negatives: bool = False
) -> dict[str, Any]:
    """Compare one metric over paired values: both means, the change, its interval and its p-value.

    The verdict is that of the metric alone; `judge_family` judges it among others.
    """
    rows = np.asarray(values, dtype=np.float64)
    if metric.kind == "ratio":
        kept: list[bool] = np.all(rows > 0, axis=1).tolist()
        rows, clusters = rows[kept], [name for name, keep in zip(clusters, kept, strict=True) if keep]
        if not len(rows):
            return {}
        rows = np.log(rows)
    means = rows.mean(axis=0)
    change = float(means[1] - means[0])
    differences = (rows[:, 1] - rows[:, 0]).tolist()
    ci, p_value = bootstrap_mean(clusters, differences), compute_p_value(clusters, differences)
    shown = np.exp(means) if metric.kind == "ratio" else means
    better = "lower" if negatives and metric.name in _HARM_ON_NEGATIVES else metric.better
    row: dict[str, Any] = {
        "metric": metric.name,
        "kind": metric.kind,
        "better": better,
        "n": len(rows),
        "base": float(shown[0]),
        "new": float(shown[1]),
        "change": float(np.exp(change)) if metric.kind == "ratio" else change,
        "change_ci": [float(np.exp(end)) for end in ci] if ci and metric.kind == "ratio" else ci,
        "p_value": p_value,
        "identical": bool((rows[:, 0] == rows[:, 1]).all()),
    }
    judge_family([row])
    return row


def judge_family(rows: Sequence[dict[str, Any]]) -> None:
    """Write the verdict of every row, with one error for all rows together."""
    judged = [row for row in rows if not row["identical"]]
    significant = select_significant([row["p_value"] for row in judged])
    for row in rows:
        row["verdict"] = "identical"
    for row, shown in zip(judged, significant, strict=True):
        row["verdict"] = _judge_change(row, shown)


def _judge_change(row: Mapping[str, Any], shown: bool) -> Verdict:
    if row["p_value"] is None:
        return "too few sources"
    if not shown:
        return "within noise"
    if row["better"] == "neither":
        return "changed"
    higher = row["change"] > (1.0 if row["kind"] == "ratio" else 0.0)
    return "better" if higher == (row["better"] == "higher") else "worse"


def _compare_metrics(
    pairs: Sequence[tuple[Any, Any]],
    metrics: Sequence[Metric] = METRICS,
    *,
    negatives: bool = False,
    name_clusters: Callable[[list[Any]], list[str]] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each metric, over the pairs in which both sides have it."""
    found = []
    for metric in metrics:
        known = [(old, new, left) for left, right in pairs
                 if (old := metric.read(left)) is not None and (new := metric.read(right)) is not None]  # fmt: skip
        if known:
            kept = [left for _, _, left in known]
            clusters = name_clusters(kept) if name_clusters else [left.cluster for left in kept]
            row = compare_metric(metric, [(old, new) for old, new, _ in known], clusters, negatives=negatives)
            found += [row] if row else []
    return found


def _compare_speedups(base: Result, new: Result) -> list[dict[str, Any]]:
    """Compare the cold over warm TTFT of each pair, where both results have both arms."""
    left = {pair.cold.item_id: pair for pair in pair_records(base.requests) if not pair.cold.negative_control}
    right = {pair.cold.item_id: pair for pair in pair_records(new.requests)}
    shared = [(left[name], right[name]) for name in left if name in right]
    return _compare_metrics(shared, [Metric("ttft_speedup", lambda pair: pair.speedup, "higher", "ratio")])


def _index_by_item(result: Result) -> dict[str, RequestRecord]:
    """Return the judged record of every item by its id; failed requests are included."""
    found: dict[str, RequestRecord] = {}
    for record in select_measured(result.requests):
        if record.item_id in found:
            raise InputError(
                f"item {record.item_id} stands twice in one result", hint="compare results of one run each"
            )
        found[record.item_id] = record
    return found


# -- load runs -------------------------------------------------------------------------------------------------------
# Compares two load runs point by point: the same rate and concurrency, the same requests, request by request.
#
# Requests of a load run are not independent: a queue that is long for one is long for the next. So the unit is a
# stretch of consecutive requests, and each point has twenty of them at most.

STRETCHES = 20
_LOAD_CONFIG = (
    "model",
    "workload_sha256",
    "max_tokens",
    "seed",
    "burstiness",
    "with_donors",
    "think_time_s",
    "isolation",
)
LOAD_METRICS: tuple[Metric, ...] = (
    Metric("ttft_ms", _make_field_reader("ttft_ms"), "lower", "ratio"),
    Metric("tpot_ms", _make_field_reader("tpot_ms"), "lower", "ratio"),
    Metric("e2el_ms", _make_field_reader("e2el_ms"), "lower", "ratio"),
    Metric("failed_share", lambda one: float(not one.ok), "lower"),
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
            for name in _LOAD_CONFIG
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
    metrics = list(LOAD_METRICS)
    if slo:
        metrics.append(Metric("goodput_share", lambda one: float(one.ok and one.meets(slo)), "higher"))
    return {
        "name": old.name,
        "request_rate": old.request_rate,
        "max_concurrency": old.max_concurrency,
        "requests": len(pairs),
        "metrics": _compare_metrics(pairs, metrics, name_clusters=_name_stretches),
    }


def _name_stretches(requests: Sequence[LoadRequest]) -> list[str]:
    """Return the stretch of each request; consecutive ones share it."""
    count = len(requests)
    return [str(at * min(STRETCHES, count) // count) for at in range(count)]
