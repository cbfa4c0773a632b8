"""Aggregates records into rates. Every rate X has ``X_n`` (requests that observed it) and ``X_ci`` (95 % interval).

None means that no record observed the metric; it is never written as 0. Rates over blocks and tokens are ratios of
sums with a bootstrap over documents, shares of requests have Wilson's interval. Cold and rerun arms are
references: if a result has other arms too, only those are aggregated. Pairs across tenants are counted apart, in
``cross_tenant_*``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sembench.result import RequestRecord
from sembench.scoring.statistics import Estimate, bootstrap_ratio, compute_wilson_interval, estimate_mean, group_by

SEMANTIC_PLACEMENT = "semantic_placement"
PROPAGATION_PROBE = "propagation_probe"
FALSE_SAFE_KL = 0.1
FALSE_SAFE_F1 = 0.5
REFERENCE_ARMS = frozenset({"cold", "rerun"})

Records = Sequence[RequestRecord]

SUMS = (
    "prompt_tokens", "total_blocks", "exact_hit_blocks", "exact_hit_tokens", "exact_prefix_hit_blocks",
    "exact_prefix_hit_tokens", "semantic_candidate_blocks", "semantic_candidate_tokens", "semantic_eligible_blocks",
    "semantic_eligible_tokens", "backend_confirmed_blocks", "backend_confirmed_tokens", "external_confirmed_tokens",
    "fuzzy_confirmed_tokens", "exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens", "wrong_tokens",
)  # fmt: skip
BLOCK_RATES = {
    "exact_block_hit_rate": ("exact_hit_blocks", "total_blocks"),
    "exact_prefix_block_hit_rate": ("exact_prefix_hit_blocks", "total_blocks"),
    "semantic_candidate_block_rate": ("semantic_candidate_blocks", "total_blocks"),
    "semantic_eligible_block_rate": ("semantic_eligible_blocks", "total_blocks"),
    "backend_confirmed_block_rate": ("backend_confirmed_blocks", "total_blocks"),
    "exact_token_weighted_reuse_rate": ("exact_hit_tokens", "prompt_tokens"),
    "semantic_candidate_token_weighted_reuse_rate": ("semantic_candidate_tokens", "prompt_tokens"),
    "semantic_eligible_token_weighted_reuse_rate": ("semantic_eligible_tokens", "prompt_tokens"),
    "backend_confirmed_token_weighted_reuse_rate": ("backend_confirmed_tokens", "prompt_tokens"),
    "external_confirmed_token_weighted_reuse_rate": ("external_confirmed_tokens", "prompt_tokens"),
}
# What is eligible may be an exact hit too, so exact hits are subtracted. What a backend confirms lies beyond the exact
# prefix already, so there is nothing to subtract.
LIFTS: dict[str, tuple[str, str | None]] = {
    "semantic_eligible_lift": ("semantic_eligible_blocks", "exact_hit_blocks"),
    "backend_confirmed_lift": ("backend_confirmed_blocks", None),
}
MEANS = {
    "mean_semblend_latency_ms": "semblend_latency_ms",
    "mean_ttft_ms": "ttft_ms",
    "mean_latency_ms": "latency_ms",
    "mean_quality_score": "quality_score",
    "mean_quality_f1": "quality_f1",
    "mean_quality_rouge_l": "quality_rouge_l",
    "mean_exact_match": "exact_match",
    "mean_judge_score": "judge_score",
    "mean_edit_similarity": "edit_similarity",
    "mean_cold_f1": "cold_f1",
    "mean_cold_rouge_l": "cold_rouge_l",
    "mean_cold_kl_topk": "cold_kl_topk",
    "mean_ppl_ratio": "ppl_ratio",
    "mean_risk": "risk",
}


def select_measured(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Return the requests that are judged: all arms but cold and rerun, or those if there are no others.

    Pairs across tenants are left out: reuse there is a leak, and their answers say nothing about quality.
    """
    kept = [record for record in records if not record.cross_tenant]
    return [record for record in kept if record.arm not in REFERENCE_ARMS] or kept


def aggregate_by_transform(records: Iterable[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Return the aggregate of each transform, in the order of first appearance."""
    groups = group_by(records, lambda record: record.transform)
    return {name: aggregate(group) for name, group in groups.items()}


def aggregate(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """Return all aggregate keys of a result file (docs/METRICS.md)."""
    everyone = list(records)
    kept = select_measured(everyone)
    found: dict[str, Any] = {"request_count": len(kept), "source_count": len({r.cluster for r in kept})}
    found |= {name: sum_known(kept, name) for name in SUMS}
    # These count every arm, since a cold arm that failed or contradicts itself makes the comparison worthless.
    found["error_count"] = sum(record.error is not None for record in everyone)
    found["contradiction_count"] = sum(len(record.contradictions) for record in everyone)
    found |= _compute_share("error_rate", everyone, lambda r: r.error is not None)
    found |= _compute_share("contradiction_rate", everyone, _is_contradicted)
    found["confirmation_sources"] = dict(Counter(s for record in kept for s in record.confirmation_sources))
    found["external_confirmed_token_sources"] = sorted(
        {r.external_confirmed_tokens_source for r in kept if r.external_confirmed_tokens_source}
    )
    for name, (top, bottom) in BLOCK_RATES.items():
        found |= _compute_ratio(name, kept, top, bottom)
    for name, (top, less) in LIFTS.items():
        found |= _compute_lift(name, kept, top, less)
    for name, attribute in MEANS.items():
        found |= _compute_mean(name, kept, attribute)
    found["quality_f1_ci"], found["quality_rouge_l_ci"] = found["mean_quality_f1_ci"], found["mean_quality_rouge_l_ci"]
    return (
        found
        | _compute_shares(kept)
        | _aggregate_negatives(kept)
        | _aggregate_cross_tenant(everyone)
        | _aggregate_connector_audit(kept)
    )


def sum_known(records: Records, attribute: str) -> int | None:
    """Return the sum over the records that observed the attribute; None if none did."""
    seen = [value for record in records if (value := getattr(record, attribute)) is not None]
    return sum(seen) if seen else None


# -- the parts -----------------------------------------------------------------------------------------------------


def _compute_ratio(name: str, records: Records, top: str, bottom: str) -> dict[str, Any]:
    seen = [r for r in records if getattr(r, top) is not None and getattr(r, bottom) is not None]
    return _compute_quotient(name, seen, [getattr(r, top) for r in seen], [getattr(r, bottom) for r in seen])


def _compute_quotient(name: str, seen: Records, tops: Sequence[int], bottoms: Sequence[int]) -> dict[str, Any]:
    """Return a ratio of sums with its interval; None if there is nothing to divide by."""
    if not sum(bottoms):
        return Estimate(None, None, 0).to_fields(name)
    ci = bootstrap_ratio([r.cluster for r in seen], tops, bottoms)
    return Estimate(sum(tops) / sum(bottoms), ci, len(seen)).to_fields(name)


def _compute_lift(name: str, records: Records, top: str, less: str | None) -> dict[str, Any]:
    """Return one rate minus another, over the requests that observed both."""
    parts = [(r, getattr(r, top), 0 if less is None else getattr(r, less)) for r in records]
    seen = [r for r, gain, loss in parts if None not in (gain, loss, r.total_blocks)]
    gains = [gain - loss for r, gain, loss in parts if None not in (gain, loss, r.total_blocks)]
    return _compute_quotient(name, seen, gains, [r.total_blocks or 0 for r in seen])


def _compute_mean(name: str, records: Records, attribute: str) -> dict[str, Any]:
    return estimate_mean((getattr(record, attribute), record.cluster) for record in records).to_fields(name)


def _compute_share(name: str, records: Records, observed: Callable[[RequestRecord], bool | None]) -> dict[str, Any]:
    seen = [value for record in records if (value := observed(record)) is not None]
    hits = sum(seen)
    rate = hits / len(seen) if seen else None
    return Estimate(rate, compute_wilson_interval(hits, len(seen)), len(seen)).to_fields(name)


def _compute_shares(records: Records) -> dict[str, Any]:
    outcomes = Counter(record.route_outcome for record in records if record.route_outcome is not None)
    return {
        "route_outcomes": dict(outcomes),
        **_compute_share("semantic_placement_rate_by_request", records, _is_placed),
        **_compute_share("semblend_hit_rate_by_request", records, lambda r: r.semblend_found),
        **_compute_share("backend_confirmed_rate_by_request", records, _is_confirmed),
        **_compute_share("quality_pass_rate", records, lambda r: r.quality_pass),
        **_compute_share("planted_fact_answered_rate", records, lambda r: r.planted_fact_answered),
        **_compute_share("donor_fact_answered_rate", records, lambda r: r.donor_fact_answered),
        **_compute_share("false_safe_rate", records, _is_false_safe),
    }


def _is_placed(record: RequestRecord) -> bool | None:
    return None if record.route_outcome is None else record.route_outcome == SEMANTIC_PLACEMENT


def _is_confirmed(record: RequestRecord) -> bool | None:
    tokens = record.backend_confirmed_tokens
    return None if tokens is None else tokens > 0


def _is_contradicted(record: RequestRecord) -> bool | None:
    """Return whether witnesses contradict each other; None if there was no witness."""
    return bool(record.contradictions) if record.confirmation_sources or record.contradictions else None


def _is_false_safe(record: RequestRecord) -> bool | None:
    """Return whether reuse changed the answer: KL above .1 or F1 below .5 against the cold answer."""
    if not record.backend_confirmed_tokens or (record.cold_kl_topk is None and record.cold_f1 is None):
        return None
    far = record.cold_kl_topk is not None and record.cold_kl_topk > FALSE_SAFE_KL
    return far or (record.cold_f1 is not None and record.cold_f1 < FALSE_SAFE_F1)


def _aggregate_negatives(records: Records) -> dict[str, Any]:
    """Aggregate unrelated pairs. A confirmed rate is the larger of its block and its token share."""
    own = [record for record in records if record.negative_control]
    found: dict[str, Any] = {
        "negative_control_count": len(own),
        "negative_control_blocks": sum_known(own, "total_blocks"),
        "negative_control_wrong_tokens": sum_known(own, "wrong_tokens"),
    }
    placements = [record for record in own if record.route_outcome is not None]
    found["negative_control_semantic_placements"] = sum(map(bool, map(_is_placed, placements))) if placements else None
    found |= _compute_share("negative_control_semantic_placement_rate", own, _is_placed)
    for stem in ("semantic_eligible", "backend_confirmed"):
        name = f"negative_control_{stem}"
        found[f"{name}_blocks"] = sum_known(own, f"{stem}_blocks")
        found[f"{name}_tokens"] = sum_known(own, f"{stem}_tokens")
        found |= _compute_larger_ratio(f"{name}_rate", own, stem)
    return found | _compute_share("negative_control_backend_confirmed_rate_by_request", own, _is_confirmed)


def _aggregate_cross_tenant(records: Records) -> dict[str, Any]:
    """Aggregate pairs whose donor belongs to another tenant: any confirmed token is a leak."""
    own = [record for record in records if record.cross_tenant]
    return {
        "cross_tenant_count": len(own),
        "cross_tenant_backend_confirmed_tokens": sum_known(own, "backend_confirmed_tokens"),
        **_compute_share("cross_tenant_backend_confirmed_rate", own, _is_confirmed),
    }


def _compute_larger_ratio(name: str, records: Records, stem: str) -> dict[str, Any]:
    blocks = _compute_ratio(name, records, f"{stem}_blocks", "total_blocks")
    tokens = _compute_ratio(name, records, f"{stem}_tokens", "prompt_tokens")
    return tokens if (tokens[name] or 0.0) > (blocks[name] or 0.0) or blocks[name] is None else blocks


def _aggregate_connector_audit(records: Records) -> dict[str, Any]:
    """Aggregate what the audit stream of a connector says about the requests it was joined to."""
    joined = [record for record in records if record.audit_joined]
    found: dict[str, Any] = {"connector_audit_present": bool(joined), "connector_audit_rows_joined": len(joined)}
    advertised = [record for record in joined if record.audit_advertised_tokens]
    probes = [record for record in records if record.traffic_class == PROPAGATION_PROBE]
    found |= _compute_counted_share("boundary_alignment", joined, lambda r: r.audit_boundary_at_span_start)
    found |= _compute_counted_share("materialized_reuse", advertised, lambda r: bool(r.audit_materialized))
    found |= _compute_counted_share("propagation_contamination", probes, _is_confirmed)
    moved = [(record.audit_advertised_tokens or 0) if record.audit_materialized else 0 for record in advertised]
    offered = [record.audit_advertised_tokens or 0 for record in advertised]
    found["materialized_reuse_tokens"] = sum(moved) if advertised else None
    found["materialized_reuse_advertised_tokens"] = sum(offered) if advertised else None
    return found | _compute_quotient("materialized_reuse_token_rate", advertised, moved, offered)


def _compute_counted_share(
    stem: str, records: Records, observed: Callable[[RequestRecord], bool | None]
) -> dict[str, Any]:
    seen = [value for record in records if (value := observed(record)) is not None]
    share = _compute_share(f"{stem}_rate", records, observed)
    return {**share, f"{stem}_numerator": sum(seen), f"{stem}_denominator": len(seen)}
