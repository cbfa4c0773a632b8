"""Compares cold with warm, pair by pair, and cold with cold again to know the noise.

A pair counts when both arms answered and the cold one was really cold. A hit is a warm request with at least 64
confirmed tokens beyond its exact prefix; how fast it was has no part in that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sembench.result import RequestRecord
from sembench.scoring.statistics import (
    bootstrap_mean,
    bootstrap_median,
    compute_mean,
    compute_median,
    compute_percentile,
    compute_wilson_interval,
    estimate_mean,
)

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
    external = _drop_unknown(pair.warm.external_confirmed_tokens for pair in pairs)
    fuzzy = _drop_unknown(pair.warm.fuzzy_confirmed_tokens for pair in pairs)
    sources = {pair.warm.external_confirmed_tokens_source for pair in pairs} - {None}
    return {
        # "head" is reuse from the first token on; a receipt in its short form has no positions, so it is unknown
        "reuse_mechanisms": {name: counts[name] for name in ("scatter", "external", "exact", "none")} | {"head": None},
        "semantic_mechanisms": list(SEMANTIC_MECHANISMS),
        "fuzzy_confirmed_tokens_warm": int(sum(fuzzy)) if fuzzy else None,
        "external_confirmed_tokens_warm": int(sum(external)) if external else None,
        "external_confirmed_token_sources": sorted(str(source) for source in sources),
        "external_confirmed_is_per_request": True if external else None,
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
        "hit_rate": len(hits) / len(observed) if observed else None,
        "hit_rate_n": len(observed),
        "hit_rate_ci": compute_wilson_interval(len(hits), len(observed)),
        "hit_rate_external_confirmed": len(confirmed) / len(external) if external else None,
        "hit_rate_external_confirmed_n": len(external),
        "hit_rate_external_confirmed_ci": compute_wilson_interval(len(confirmed), len(external)),
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
        **_compute_mean("warm_vs_cold_output_rouge_l_mean", pairs, lambda pair: pair.warm.cold_rouge_l),
        **_compute_mean("warm_vs_cold_f1_mean", pairs, lambda pair: pair.warm.cold_f1),
        **_compute_mean("warm_vs_cold_mean_kl_topk", pairs, lambda pair: pair.warm.cold_kl_topk),
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
        **_compute_mean("rerun_vs_cold_output_rouge_l_mean", reruns, lambda pair: _read_rerun(pair, "cold_rouge_l")),
        **_compute_mean("rerun_vs_cold_f1_mean", reruns, lambda pair: _read_rerun(pair, "cold_f1")),
        **_compute_mean("rerun_vs_cold_mean_kl_topk", reruns, lambda pair: _read_rerun(pair, "cold_kl_topk")),
    }


def _read_rerun(pair: ArmPair, name: str) -> float | None:
    value: float | None = getattr(pair.rerun, name, None)
    return value


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


def _compute_mean(name: str, pairs: Sequence[ArmPair], value: Callable[[ArmPair], float | None]) -> dict[str, Any]:
    return estimate_mean((value(pair), pair.cluster) for pair in pairs).to_fields(name)


def _drop_unknown(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def _divide(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom
