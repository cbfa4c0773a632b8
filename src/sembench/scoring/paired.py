"""Cold against warm, pair by pair, with cold against cold beside it: what is left when the noise is taken away.

A pair counts when both arms answered and the cold one was really cold. A hit is a warm request with at least 64
confirmed tokens beyond its exact prefix; how fast it was has no part in that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sembench.result import RequestRecord
from sembench.scoring.statistics import bootstrap_mean, bootstrap_median, mean, median, percentile, wilson

HIT_TOKENS = 64
HIT_DEFINITION = f"backend_confirmed_tokens >= {HIT_TOKENS} in the warm arm"
SEMANTIC_MECHANISMS = ("scatter", "external")


@dataclass(frozen=True, slots=True)
class Pair:
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
        return _ratio(self.cold.ttft_ms, self.warm.ttft_ms)

    @property
    def hit(self) -> bool | None:
        """None where no witness spoke."""
        tokens = self.warm.backend_confirmed_tokens
        return None if tokens is None else tokens >= HIT_TOKENS

    @property
    def mechanism(self) -> str:
        """How the warm request got its KV: donor KV put in place by the engine, by a connector, an exact prefix."""
        confirmed = self.warm.backend_confirmed_tokens or 0
        if confirmed > 0:
            return "scatter" if {"receipt", "usage"} & set(self.warm.confirmation_sources) else "external"
        return "exact" if self.warm.exact_tokens else "none"


def pairs_of(records: Iterable[RequestRecord]) -> list[Pair]:
    """Records joined by ``pair_id`` (else ``item_id``); arms without their counterpart are left out."""
    arms: dict[str, dict[str, RequestRecord]] = {}
    for record in records:
        if record.arm in ("cold", "warm", "rerun"):
            arms.setdefault(record.pair_id or record.item_id, {})[record.arm] = record
    whole = (found for found in arms.values() if "cold" in found and "warm" in found)
    return [Pair(found["cold"], found["warm"], found.get("rerun")) for found in whole]


def paired(records: Iterable[RequestRecord]) -> dict[str, Any] | None:
    """The ``paired`` object of a result; None where nothing was paired."""
    everyone = pairs_of(records)
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
        **_mechanisms(positive),
        **_times(positive),
        **_speedup("blended_ttft_speedup", positive, lambda pair: pair.speedup),
        "ttft_speedup_mean": _ratio(
            mean(_known(pair.cold.ttft_ms for pair in positive)), mean(_known(pair.warm.ttft_ms for pair in positive))
        ),
        **_hit_rates(positive, hits),
        **_speedup("hit_only_ttft_speedup", hits, lambda pair: pair.speedup),
        "negative_control_pairs": len(negative),
        **_speedup("negative_control_ttft_speedup", negative, lambda pair: pair.speedup),
        **_engine_times(positive),
        **_distances(positive),
        **_noise(used),
    }
    return found | _doubts(positive, negative, hits, found)


def _mechanisms(pairs: Sequence[Pair]) -> dict[str, Any]:
    counts = Counter(pair.mechanism for pair in pairs)
    external = _known(pair.warm.external_confirmed_tokens for pair in pairs)
    fuzzy = _known(pair.warm.fuzzy_confirmed_tokens for pair in pairs)
    sources = {pair.warm.external_confirmed_tokens_source for pair in pairs} - {None}
    return {
        # "head" is reuse that begins at the first token; a receipt's short form does not tell positions
        "reuse_mechanisms": {name: counts[name] for name in ("scatter", "external", "exact", "none")} | {"head": None},
        "semantic_mechanisms": list(SEMANTIC_MECHANISMS),
        "fuzzy_confirmed_tokens_warm": int(sum(fuzzy)) if fuzzy else None,
        "external_confirmed_tokens_warm": int(sum(external)) if external else None,
        "external_confirmed_token_sources": sorted(str(source) for source in sources),
        "external_confirmed_is_per_request": True if external else None,
    }


def _times(pairs: Sequence[Pair]) -> dict[str, Any]:
    cold, warm = _known(pair.cold.ttft_ms for pair in pairs), _known(pair.warm.ttft_ms for pair in pairs)
    return {
        f"ttft_{arm}_p{share}_ms": percentile(values, share)
        for arm, values in (("cold", cold), ("warm", warm))
        for share in (50, 95)
    }


def _speedup(name: str, pairs: Sequence[Pair], ratio: Callable[[Pair], float | None]) -> dict[str, Any]:
    known = [(value, pair.cluster) for pair in pairs if (value := ratio(pair)) is not None]
    values, clusters = [value for value, _ in known], [cluster for _, cluster in known]
    return {
        f"{name}_median": median(values),
        f"{name}_median_ci": bootstrap_median(clusters, values),
        f"{name}_mean": mean(values),
        f"{name}_ci": bootstrap_mean(clusters, values),
        f"{name}_n": len(values),
    }


def _hit_rates(pairs: Sequence[Pair], hits: Sequence[Pair]) -> dict[str, Any]:
    told = [pair for pair in pairs if pair.hit is not None]
    external = [pair for pair in pairs if pair.warm.external_confirmed_tokens is not None]
    confirmed = [pair for pair in external if (pair.warm.external_confirmed_tokens or 0) >= HIT_TOKENS]
    return {
        "hit_rate": len(hits) / len(told) if told else None,
        "hit_rate_n": len(told),
        "hit_rate_ci": wilson(len(hits), len(told)),
        "hit_rate_external_confirmed": len(confirmed) / len(external) if external else None,
        "hit_rate_external_confirmed_n": len(external),
        "hit_rate_external_confirmed_ci": wilson(len(confirmed), len(external)),
        "pairs_external_confirmed": len(confirmed),
        "pairs_external_unconfirmed": len(pairs) - len(confirmed),
        "hits_unverified_external": sum(pair not in confirmed for pair in hits),
    }


def _engine_times(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The engine's own times: the receipt's, or those of the usage object."""

    def ratio(pair: Pair) -> float | None:
        cold, warm = pair.cold, pair.warm
        return _ratio(cold.engine_ttft_ms or cold.server_ttft_ms, warm.engine_ttft_ms or warm.server_ttft_ms)

    found = _speedup("engine_ttft_speedup", pairs, ratio)
    return {
        "engine_ttft_pairs": found["engine_ttft_speedup_n"],
        "engine_ttft_speedup_median": found["engine_ttft_speedup_median"],
        "engine_ttft_speedup_median_ci": found["engine_ttft_speedup_median_ci"],
        "queue_time_cold_p50_ms": median(_known(pair.cold.queue_time_ms for pair in pairs)),
        "queue_time_warm_p50_ms": median(_known(pair.warm.queue_time_ms for pair in pairs)),
    }


def _distances(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How far warm answers lie from the cold ones. A pair that never diverges has no position, and is counted."""
    kl = _known(pair.warm.cold_kl_topk for pair in pairs)
    compared = [pair for pair in pairs if pair.warm.cold_f1 is not None]
    return {
        **_mean("warm_vs_cold_output_rouge_l_mean", pairs, lambda pair: pair.warm.cold_rouge_l),
        **_mean("warm_vs_cold_f1_mean", pairs, lambda pair: pair.warm.cold_f1),
        **_mean("warm_vs_cold_mean_kl_topk", pairs, lambda pair: pair.warm.cold_kl_topk),
        "kl_pairs": len(kl),
        "first_token_divergence_median": median(_known(pair.warm.first_divergence for pair in pairs)),
        "pairs_identical_output": sum(pair.warm.first_divergence is None for pair in compared),
        "pairs_compared": len(compared),
    }


def _noise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Cold against cold again: the ceiling of agreement and the spread of times that reuse has to beat."""
    reruns = [pair for pair in pairs if pair.rerun is not None and pair.rerun.error is None]
    ratios = _known(_ratio(pair.cold.ttft_ms, pair.rerun.ttft_ms) for pair in reruns if pair.rerun)
    return {
        "rerun_pairs": len(reruns),
        "rerun_ttft_ratio_median": median(ratios),
        "rerun_ttft_ratio_p05": percentile(ratios, 5),
        "rerun_ttft_ratio_p95": percentile(ratios, 95),
        **_mean("rerun_vs_cold_output_rouge_l_mean", reruns, lambda pair: _of_rerun(pair, "cold_rouge_l")),
        **_mean("rerun_vs_cold_f1_mean", reruns, lambda pair: _of_rerun(pair, "cold_f1")),
        **_mean("rerun_vs_cold_mean_kl_topk", reruns, lambda pair: _of_rerun(pair, "cold_kl_topk")),
    }


def _of_rerun(pair: Pair, name: str) -> float | None:
    value: float | None = getattr(pair.rerun, name, None)
    return value


def _doubts(
    positive: Sequence[Pair], negative: Sequence[Pair], hits: Sequence[Pair], found: dict[str, Any]
) -> dict[str, Any]:
    """Counts that an honest server keeps at zero, or near it."""
    noise = found["rerun_ttft_ratio_p95"]
    both = [*positive, *negative]
    timed_hits = [pair for pair in hits if pair.speedup is not None]
    misses = [pair for pair in both if pair.mechanism == "none" and pair.speedup is not None]
    return {
        # reuse that saves no time was perhaps none: the claim is doubted, the time still confirms nothing
        "hits_without_saving": None if noise is None else sum((p.speedup or 0) <= noise for p in timed_hits),
        "faster_without_reuse": None if noise is None else sum((p.speedup or 0) > noise for p in misses),
        "wrong_kv_pairs": sum(bool(p.warm.donor_fact_answered and not p.cold.donor_fact_answered) for p in both),
        "planted_fact_lost_pairs": sum(
            bool(p.cold.planted_fact_answered and p.warm.planted_fact_answered is False) for p in both
        ),
        "pairs_contradicted": sum(bool(p.warm.contradictions or p.cold.contradictions) for p in both),
    }


def _mean(name: str, pairs: Sequence[Pair], value: Callable[[Pair], float | None]) -> dict[str, Any]:
    known = [(one, pair.cluster) for pair in pairs if (one := value(pair)) is not None]
    values = [one for one, _ in known]
    ci = bootstrap_mean([cluster for _, cluster in known], values)
    return {name: mean(values), f"{name}_n": len(values), f"{name}_ci": ci}


def _known(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom
