"""What a report shows, computed from a result: plain numbers for the plots and pages.

Everything is computed again from the requests, as for the gates, with reuse only as far as it is witnessed. The reasons
not to believe the result come first. Without requests, nothing is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sembench.result import RequestRecord, Result
from sembench.scoring.aggregate import (
    FALSE_SAFE_F1,
    FALSE_SAFE_KL,
    ArmPair,
    aggregate,
    aggregate_by_transform,
    pair_records,
    select_measured,
    summarize_pairs,
)
from sembench.scoring.statistics import (
    Estimate,
    bootstrap_median,
    compute_median,
    compute_percentile,
    estimate_mean,
    group_by,
)
from sembench.trust import FASTER, Examination, Finding, examine

RUNGS: tuple[tuple[str, str], ...] = (
    ("exact", "exact_block_hit_rate"),
    ("candidate", "semantic_candidate_block_rate"),
    ("eligible", "semantic_eligible_block_rate"),
    ("confirmed", "backend_confirmed_block_rate"),
)
WORST = 15


@dataclass(frozen=True, slots=True)
class PairPoint:
    """One pair: the length of its prompt and its two times."""

    item_id: str
    transform: str
    prompt_tokens: int
    cold_ms: float
    warm_ms: float
    confirmed_tokens: int | None
    cluster: str

    @property
    def speedup(self) -> float:
        return self.cold_ms / self.warm_ms


@dataclass(frozen=True, slots=True)
class Closeness:
    """How close the warm answers of a transform are to the cold ones, and both to the gold answer."""

    transform: str
    f1: Estimate
    gold_cold: float | None
    gold_warm: float | None


@dataclass(frozen=True, slots=True)
class NotableRequest:
    """A request that a person should look at, and why."""

    record: RequestRecord
    cold: RequestRecord | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportView:
    """Everything that the page, the Markdown and the plots read."""

    result: Result
    aggregate: Mapping[str, Any]
    by_transform: Mapping[str, Mapping[str, Any]]
    paired: Mapping[str, Any]
    points: tuple[PairPoint, ...]
    negatives: tuple[PairPoint, ...]
    negative_records: tuple[RequestRecord, ...]
    closeness: tuple[Closeness, ...]
    kl: tuple[tuple[str, str, float], ...]
    rerun_f1: Estimate
    worst: tuple[NotableRequest, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def grave(self) -> tuple[Finding, ...]:
        """Findings that show something wrong; the others only name what was not shown."""
        return tuple(finding for finding in self.findings if not finding.is_open)

    def estimate(self, name: str) -> Estimate:
        """Return a metric of the aggregate, else of the pairs, with its interval."""
        for source in (self.aggregate, self.paired):
            if source.get(name) is not None:
                n = source.get(f"{name}_n", source.get(f"{name.removesuffix('_median')}_n"))
                return Estimate(source[name], source.get(f"{name}_ci"), n)
        return Estimate(None)


def build_view(result: Result, examined: Examination | None = None) -> ReportView:
    """Return the view of a result, as far as its examination believes it."""
    examined = examined or examine(result)
    records = examined.records
    pairs = [pair for pair in pair_records(records) if not pair.errored and not pair.contaminated]
    judged = select_measured(records)
    return ReportView(
        result=result,
        aggregate=aggregate(records),
        by_transform=aggregate_by_transform(records),
        paired=summarize_pairs(records) or {},
        points=tuple(point for pair in pairs if not pair.cold.negative_control for point in _make_points(pair)),
        negatives=tuple(point for pair in pairs if pair.cold.negative_control for point in _make_points(pair)),
        negative_records=tuple(record for record in judged if record.negative_control),
        closeness=_measure_closeness(pairs, judged),
        kl=tuple(
            (record.item_id, record.transform, record.cold_kl_topk)
            for record in judged
            if record.cold_kl_topk is not None and record.backend_confirmed_tokens
        ),
        rerun_f1=_estimate_mean([record for record in records if record.arm == "rerun"], "cold_f1"),
        worst=_rank_worst(_list_suspects(records), {pair.warm.item_id: pair.cold for pair in pairs}),
        findings=examined.findings,
    )


def estimate_speedup(points: Sequence[PairPoint]) -> Estimate:
    """Estimate the median speed-up of pairs, with an interval over documents."""
    values, clusters = [point.speedup for point in points], [point.cluster for point in points]
    return Estimate(compute_median(values), bootstrap_median(clusters, values), len(values))


def find_noise_band(view: ReportView) -> tuple[float, float] | None:
    """Return the 5th and 95th percentile of cold over cold again; a speed-up inside this band is noise."""
    low, high = view.paired.get("rerun_ttft_ratio_p05"), view.paired.get("rerun_ttft_ratio_p95")
    return None if low is None or high is None else (low, high)


def compute_quantile(values: Sequence[float], share: float) -> float:
    return compute_percentile(values, share) or 0.0


def _make_points(pair: ArmPair) -> list[PairPoint]:
    cold, warm = pair.cold, pair.warm
    if (
        cold.ttft_ms is None
        or warm.ttft_ms is None
        or cold.prompt_tokens is None
        or min(cold.ttft_ms, warm.ttft_ms) <= 0
    ):
        return []
    confirmed = warm.backend_confirmed_tokens
    return [
        PairPoint(cold.item_id, cold.transform, cold.prompt_tokens, cold.ttft_ms, warm.ttft_ms, confirmed, pair.cluster)
    ]


def _measure_closeness(pairs: Sequence[ArmPair], judged: Sequence[RequestRecord]) -> tuple[Closeness, ...]:
    """Return the closeness by transform; without pairs, only the gold scores."""
    colds = group_by((pair.cold for pair in pairs), lambda record: record.transform)
    warms = group_by(judged, lambda record: record.transform)
    found = [
        Closeness(
            name,
            _estimate_mean(group, "cold_f1"),
            _estimate_mean(colds.get(name, ()), "quality_score").value,
            _estimate_mean(group, "quality_score").value,
        )
        for name, group in warms.items()
    ]
    return tuple(row for row in found if row.f1.value is not None or row.gold_warm is not None)


def _estimate_mean(records: Sequence[RequestRecord], attribute: str) -> Estimate:
    return estimate_mean((getattr(record, attribute), record.cluster) for record in records)


def _list_suspects(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the requests that may stand out: the judged ones, those across tenants, and references that do not fit."""
    judged = select_measured(records)
    return judged + [
        record for record in records if record.cross_tenant or (record.contradictions and record not in judged)
    ]


def _rank_worst(judged: Sequence[RequestRecord], colds: Mapping[str, RequestRecord]) -> tuple[NotableRequest, ...]:
    """Return the requests with faults, the worst first."""
    ranked = []
    for record in judged:
        cold = colds.get(record.item_id) if record.arm == "warm" else None
        weight, reasons = _weigh_faults(record, cold)
        if reasons:
            ranked.append((weight, record.item_id, NotableRequest(record, cold, tuple(reasons))))
    return tuple(row for _, _, row in sorted(ranked, key=lambda row: (-row[0], row[1]))[:WORST])


def _weigh_faults(record: RequestRecord, cold: RequestRecord | None) -> tuple[float, list[str]]:
    confirmed = record.backend_confirmed_tokens or 0
    findings: list[tuple[float, str]] = []
    if record.cross_tenant and confirmed:
        findings.append((1000, "reuse across tenants"))
    if record.donor_fact_answered:
        findings.append((900, "states the donor's fact"))
    if record.negative_control and confirmed:
        findings.append((800, "reuse on an unrelated pair"))
    findings += [(700, line) for line in record.contradictions]
    if record.wrong_tokens:
        findings.append((600, f"{record.wrong_tokens} tokens called equal are not"))
    if record.error is not None:
        findings.append((500, f"error: {record.error}"))
    kl, f1 = record.cold_kl_topk, record.cold_f1
    if confirmed and kl is not None and kl > FALSE_SAFE_KL:
        findings.append((300 + min(kl, 50), f"false safe: KL {kl:.3f}"))
    if confirmed and f1 is not None and f1 < FALSE_SAFE_F1:
        findings.append((300 + 50 * (1 - f1), f"false safe: F1 {f1:.2f} against cold"))
    if record.quality_pass is False and (cold is None or cold.quality_pass):
        findings.append((100, "fails against the gold answer" + (", cold passed" if cold else "")))
    if cold is not None and cold.ttft_ms and record.ttft_ms:
        slower = record.ttft_ms / cold.ttft_ms
        if slower < FASTER and not confirmed and not record.exact_tokens:
            findings.append((200, f"{1 / slower:.2f}× faster than cold without confirmed reuse"))
        if slower > 1.1:
            findings.append((10 + min(slower, 80), f"{slower:.2f}× slower than cold"))
    return sum(weight for weight, _ in findings), [words for _, words in findings]
