"""Aggregates of a result: rates with intervals, pairs of cold and warm, the numbers of a load point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sembench.result import LoadRequest, RequestRecord, Result, describe_environment, get_utc_time
from sembench.scoring.statistics import (
    Estimate,
    bootstrap_mean,
    bootstrap_median,
    bootstrap_ratio,
    compute_mean,
    compute_median,
    compute_percentile,
    compute_wilson_interval,
    estimate_mean,
    group_by,
)

# -- rates -----------------------------------------------------------------------------------------------------------
# Aggregates records into rates. Every rate X has ``X_n`` (requests that observed it) and ``X_ci`` (95 % interval).
#
# None means that no record observed the metric; it is never written as 0. Rates over blocks and tokens are ratios of
# sums with a bootstrap over documents, shares of requests have Wilson's interval. Cold and rerun arms are
# references: if a result has other arms too, only those are aggregated. Pairs across tenants are counted apart, in
# ``cross_tenant_*``.

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
    return _write_share(name, sum(seen), len(seen))


def _write_share(name: str, hits: int, n: int) -> dict[str, Any]:
    return Estimate(hits / n if n else None, compute_wilson_interval(hits, n), n).to_fields(name)


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


# -- pairs -----------------------------------------------------------------------------------------------------------
# Compares cold with warm, pair by pair, and cold with cold again to know the noise.
#
# A pair counts when both arms answered and the cold one was really cold. A hit is a warm request with at least 64
# confirmed tokens beyond its exact prefix; how fast it was has no part in that.

HIT_TOKENS = 64
HIT_DEFINITION = f"backend_confirmed_tokens >= {HIT_TOKENS} in the warm arm"
SEMANTIC_MECHANISMS = ("scatter", "external")


@dataclass(frozen=True, slots=True)
class ArmPair:
    """The arms of one case."""

    cold: RequestRecord
    warm: RequestRecord
    rerun: RequestRecord | None = None

    @property
    def cluster(self) -> str:
        return self.cold.cluster

    @property
    def errored(self) -> bool:
        return self.cold.error is not None or self.warm.error is not None

    @property
    def contaminated(self) -> bool:
        return bool(self.cold.flush_contaminated or self.warm.flush_contaminated)

    @property
    def speedup(self) -> float | None:
        return _divide(self.cold.ttft_ms, self.warm.ttft_ms)

    @property
    def hit(self) -> bool | None:
        """Whether the warm request reused enough; None if there was no witness."""
        tokens = self.warm.backend_confirmed_tokens
        return None if tokens is None else tokens >= HIT_TOKENS

    @property
    def mechanism(self) -> str:
        """Where the KV of the warm request came from: the engine's splice, a connector, an exact prefix, or nothing."""
        confirmed = self.warm.backend_confirmed_tokens or 0
        if confirmed > 0:
            return "scatter" if {"receipt", "usage"} & set(self.warm.confirmation_sources) else "external"
        return "exact" if self.warm.exact_tokens else "none"


def pair_records(records: Iterable[RequestRecord]) -> list[ArmPair]:
    """Join records by ``pair_id`` (else ``item_id``); arms without their counterpart are left out."""
    arms: dict[str, dict[str, RequestRecord]] = {}
    for record in records:
        if record.arm in ("cold", "warm", "rerun"):
            arms.setdefault(record.pair_id or record.item_id, {})[record.arm] = record
    whole = (found for found in arms.values() if "cold" in found and "warm" in found)
    return [ArmPair(found["cold"], found["warm"], found.get("rerun")) for found in whole]


def summarize_pairs(records: Iterable[RequestRecord]) -> dict[str, Any] | None:
    """Return the ``paired`` object of a result; None if nothing was paired."""
    everyone = pair_records(records)
    if not everyone:
        return None
    used = [pair for pair in everyone if not pair.errored and not pair.contaminated]
    positive = [pair for pair in used if not pair.cold.negative_control]
    negative = [pair for pair in used if pair.cold.negative_control]
    hits = [pair for pair in positive if pair.hit]
    found: dict[str, Any] = {
        "hit_definition": HIT_DEFINITION,
        "pairs_total": len(everyone),
        "pairs_used": len(used),
        "pairs_contaminated": sum(pair.contaminated for pair in everyone),
        "pairs_errored": sum(pair.errored for pair in everyone),
        **_count_mechanisms(positive),
        **_compute_times(positive),
        **_compute_speedup("blended_ttft_speedup", positive, lambda pair: pair.speedup),
        "ttft_speedup_mean": _divide(
            compute_mean(_drop_unknown(pair.cold.ttft_ms for pair in positive)),
            compute_mean(_drop_unknown(pair.warm.ttft_ms for pair in positive)),
        ),
        **_compute_hit_rates(positive, hits),
        **_compute_speedup("hit_only_ttft_speedup", hits, lambda pair: pair.speedup),
        "negative_control_pairs": len(negative),
        **_compute_speedup("negative_control_ttft_speedup", negative, lambda pair: pair.speedup),
        **_compute_engine_times(positive),
        **_measure_distances(positive),
        **_measure_noise(used),
    }
    return found | _count_doubts(positive, negative, hits, found)


def _count_mechanisms(pairs: Sequence[ArmPair]) -> dict[str, Any]:
    counts = Counter(pair.mechanism for pair in pairs)
    warm = [pair.warm for pair in pairs]
    external = sum_known(warm, "external_confirmed_tokens")
    sources = {pair.warm.external_confirmed_tokens_source for pair in pairs} - {None}
    return {
        # "head" is reuse from the first token on; a receipt in its short form has no positions, so it is unknown
        "reuse_mechanisms": {name: counts[name] for name in ("scatter", "external", "exact", "none")} | {"head": None},
        "semantic_mechanisms": list(SEMANTIC_MECHANISMS),
        "fuzzy_confirmed_tokens_warm": sum_known(warm, "fuzzy_confirmed_tokens"),
        "external_confirmed_tokens_warm": external,
        "external_confirmed_token_sources": sorted(str(source) for source in sources),
        "external_confirmed_is_per_request": None if external is None else True,
    }


def _compute_times(pairs: Sequence[ArmPair]) -> dict[str, Any]:
    cold, warm = _drop_unknown(pair.cold.ttft_ms for pair in pairs), _drop_unknown(pair.warm.ttft_ms for pair in pairs)
    return {
        f"ttft_{arm}_p{share}_ms": compute_percentile(values, share)
        for arm, values in (("cold", cold), ("warm", warm))
        for share in (50, 95)
    }


def _compute_speedup(name: str, pairs: Sequence[ArmPair], ratio: Callable[[ArmPair], float | None]) -> dict[str, Any]:
    known = [(value, pair.cluster) for pair in pairs if (value := ratio(pair)) is not None]
    values, clusters = [value for value, _ in known], [cluster for _, cluster in known]
    return {
        f"{name}_median": compute_median(values),
        f"{name}_median_ci": bootstrap_median(clusters, values),
        f"{name}_mean": compute_mean(values),
        f"{name}_ci": bootstrap_mean(clusters, values),
        f"{name}_n": len(values),
    }


def _compute_hit_rates(pairs: Sequence[ArmPair], hits: Sequence[ArmPair]) -> dict[str, Any]:
    observed = [pair for pair in pairs if pair.hit is not None]
    external = [pair for pair in pairs if pair.warm.external_confirmed_tokens is not None]
    confirmed = [pair for pair in external if (pair.warm.external_confirmed_tokens or 0) >= HIT_TOKENS]
    return {
        **_write_share("hit_rate", len(hits), len(observed)),
        **_write_share("hit_rate_external_confirmed", len(confirmed), len(external)),
        "pairs_external_confirmed": len(confirmed),
        "pairs_external_unconfirmed": len(pairs) - len(confirmed),
        "hits_unverified_external": sum(pair not in confirmed for pair in hits),
    }


def _compute_engine_times(pairs: Sequence[ArmPair]) -> dict[str, Any]:
    """Return the times that the engine reports itself, in the receipt or in the usage object."""

    def compute_ratio(pair: ArmPair) -> float | None:
        cold, warm = pair.cold, pair.warm
        return _divide(cold.engine_ttft_ms or cold.server_ttft_ms, warm.engine_ttft_ms or warm.server_ttft_ms)

    found = _compute_speedup("engine_ttft_speedup", pairs, compute_ratio)
    return {
        "engine_ttft_pairs": found["engine_ttft_speedup_n"],
        "engine_ttft_speedup_median": found["engine_ttft_speedup_median"],
        "engine_ttft_speedup_median_ci": found["engine_ttft_speedup_median_ci"],
        "queue_time_cold_p50_ms": compute_median(_drop_unknown(pair.cold.queue_time_ms for pair in pairs)),
        "queue_time_warm_p50_ms": compute_median(_drop_unknown(pair.warm.queue_time_ms for pair in pairs)),
    }


def _measure_distances(pairs: Sequence[ArmPair]) -> dict[str, Any]:
    """Return how far warm answers are from cold ones. Pairs with equal answers have no position and are counted."""
    kl = _drop_unknown(pair.warm.cold_kl_topk for pair in pairs)
    compared = [pair for pair in pairs if pair.warm.cold_f1 is not None]
    return {
        **_measure_from_cold("warm", pairs),
        "kl_pairs": len(kl),
        "first_token_divergence_median": compute_median(_drop_unknown(pair.warm.first_divergence for pair in pairs)),
        "pairs_identical_output": sum(pair.warm.first_divergence is None for pair in compared),
        "pairs_compared": len(compared),
    }


def _measure_noise(pairs: Sequence[ArmPair]) -> dict[str, Any]:
    """Compare cold with cold again: reuse must agree as well as that, and must save more than that."""
    reruns = [pair for pair in pairs if pair.rerun is not None and pair.rerun.error is None]
    ratios = _drop_unknown(_divide(pair.cold.ttft_ms, pair.rerun.ttft_ms) for pair in reruns if pair.rerun)
    return {
        "rerun_pairs": len(reruns),
        "rerun_ttft_ratio_median": compute_median(ratios),
        "rerun_ttft_ratio_p05": compute_percentile(ratios, 5),
        "rerun_ttft_ratio_p95": compute_percentile(ratios, 95),
        **_measure_from_cold("rerun", reruns),
    }


def _measure_from_cold(arm: str, pairs: Sequence[ArmPair]) -> dict[str, Any]:
    """Return the mean distances of an arm's answers from the cold ones."""
    found: dict[str, Any] = {}
    names = {"output_rouge_l_mean": "cold_rouge_l", "f1_mean": "cold_f1", "mean_kl_topk": "cold_kl_topk"}
    for name, attribute in names.items():
        samples = ((getattr(getattr(pair, arm), attribute), pair.cluster) for pair in pairs)
        found |= estimate_mean(samples).to_fields(f"{arm}_vs_cold_{name}")
    return found


def _count_doubts(
    positive: Sequence[ArmPair], negative: Sequence[ArmPair], hits: Sequence[ArmPair], found: dict[str, Any]
) -> dict[str, Any]:
    """Count what an honest server keeps at zero, or near it."""
    noise = found["rerun_ttft_ratio_p95"]
    both = [*positive, *negative]
    timed_hits = [pair for pair in hits if pair.speedup is not None]
    misses = [pair for pair in both if pair.mechanism == "none" and pair.speedup is not None]
    return {
        # a claim of reuse that saves no time is doubtful
        "hits_without_saving": None if noise is None else sum((p.speedup or 0) <= noise for p in timed_hits),
        "faster_without_reuse": None if noise is None else sum((p.speedup or 0) > noise for p in misses),
        "wrong_kv_pairs": sum(bool(p.warm.donor_fact_answered and not p.cold.donor_fact_answered) for p in both),
        "planted_fact_lost_pairs": sum(
            bool(p.cold.planted_fact_answered and p.warm.planted_fact_answered is False) for p in both
        ),
        "pairs_contradicted": sum(bool(p.warm.contradictions or p.cold.contradictions) for p in both),
    }


def _drop_unknown(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def _divide(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom


# -- the whole result ------------------------------------------------------------------------------------------------


def build_result(
    records: Sequence[RequestRecord],
    *,
    run: Mapping[str, Any],
    config: Mapping[str, Any],
    engine: Mapping[str, Any] | None = None,
) -> Result:
    """Return the result of these records, with aggregates, and with pairs where there are both arms."""
    return Result(
        created_at_utc=get_utc_time(),
        run=run,
        config=config,
        engine=engine,
        environment=describe_environment(),
        aggregate=aggregate(records),
        paired=summarize_pairs(records),
        by_transform=aggregate_by_transform(records),
        requests=tuple(records),
    )


# -- load ------------------------------------------------------------------------------------------------------------
# The numbers of a load point, from its requests, under the names of ``vllm bench serve``.

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
