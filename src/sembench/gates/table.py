"""The table of gates of ``sembench assert-result-gates``: flag, metric, which side is good, what it needs.

The parser, the check and docs/METRICS.md are made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bound = Literal["min", "max", "true"]
Unit = Literal["share", "count", "ratio", "number", "flag"]


@dataclass(frozen=True, slots=True)
class ResultGate:
    """One flag, the metric it reads and which side is good."""

    flag: str
    metric: str
    bound: Bound
    unit: Unit
    help: str
    # What to do when the metric is missing.
    needs: str = "a run that observes it"

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


_PAIRED = "a live run with --paired"
_ENGINE = "--engine-summary"
_COLD = "a live run with --paired; KL also needs --capture-logprobs"

# fmt: off
GATES: tuple[ResultGate, ...] = (
    ResultGate(
        "--min-quality-pass-rate", "quality_pass_rate", "min", "share",
        "share of answers that pass against the gold answer",
    ),
    ResultGate(
        "--min-semantic-placement-rate", "semantic_placement_rate_by_request", "min", "share",
        "share of requests routed by semantic placement", "a gateway that answers with route metadata",
    ),
    ResultGate(
        "--min-backend-confirmed-block-rate", "backend_confirmed_block_rate", "min", "share",
        "share of full blocks whose reuse the backend confirmed", "a live run whose backend confirms reuse",
    ),
    ResultGate(
        "--min-materialization-events", "materialization_events", "min", "count",
        "materializations in the engine summaries", _ENGINE,
    ),
    ResultGate(
        "--min-materialized-tokens", "materialized_tokens", "min", "count",
        "materialized tokens in the engine summaries", _ENGINE,
    ),
    ResultGate(
        "--min-materialized-units", "materialized_units", "min", "count",
        "materialized units (segments, spans) in the engine summaries", _ENGINE,
    ),
    ResultGate(
        "--max-negative-control-confirmed-rate", "negative_control_backend_confirmed_rate", "max", "share",
        "confirmed reuse on unrelated pairs", "a live run with negative controls",
    ),
    ResultGate(
        "--max-negative-control-semantic-placement-rate", "negative_control_semantic_placement_rate", "max", "share",
        "semantic placements of unrelated pairs", "negative controls through a gateway with route metadata",
    ),
    ResultGate(
        "--require-materialized-reuse", "materialized_semantic_kv_reuse", "true", "flag",
        "an engine summary proves materialized semantic reuse", _ENGINE,
    ),
    ResultGate(
        "--require-no-engine-errors", "engine_errors", "max", "flag",
        "the engine summaries hold no error", _ENGINE,
    ),
    ResultGate(
        "--min-blended-ttft-speedup", "blended_ttft_speedup_median", "min", "ratio",
        "median of cold over warm TTFT, all positive pairs", _PAIRED,
    ),
    ResultGate(
        "--min-hit-only-ttft-speedup", "hit_only_ttft_speedup_median", "min", "ratio",
        "the same over pairs with confirmed reuse", _PAIRED,
    ),
    ResultGate(
        "--max-negative-control-speedup-deviation", "negative_control_speedup_deviation", "max", "number",
        "distance from 1 of the median speed-up of unrelated pairs", _PAIRED + " and negative controls",
    ),
    ResultGate(
        "--require-contamination-check", "contamination_checked", "true", "flag",
        "every pair was checked for a cold arm that was not cold", _PAIRED,
    ),
    ResultGate(
        "--max-contaminated-pair-rate", "contaminated_pair_rate", "max", "share",
        "share of pairs whose cold arm was not cold", _PAIRED,
    ),
    ResultGate(
        "--max-warm-vs-cold-rouge-drop", "warm_vs_cold_rouge_drop", "max", "number",
        "ROUGE-L of warm against cold below the noise floor's", "--noise-floor-calibration and " + _PAIRED,
    ),
    ResultGate(
        "--max-cold-kl", "confirmed_cold_kl_mean", "max", "number",
        "mean KL from the cold answer over confirmed reuse, in nats", _COLD,
    ),
    ResultGate(
        "--min-cold-f1", "confirmed_cold_f1_mean", "min", "share",
        "mean token F1 against the cold answer over confirmed reuse", _COLD,
    ),
    ResultGate(
        "--max-false-safe-rate", "false_safe_rate", "max", "share",
        "confirmed reuse with KL above .1 or F1 against cold below .5", _COLD,
    ),
    ResultGate(
        "--require-no-contradictions", "contradiction_count", "max", "flag",
        "receipts, usage, counters and audit agree", "a live run with at least one source of confirmation",
    ),
    ResultGate(
        "--max-cross-tenant-confirmed-rate", "cross_tenant_backend_confirmed_rate", "max", "share",
        "confirmed reuse across tenants", "a live run with tenant pairs",
    ),
    ResultGate(
        "--max-donor-fact-rate", "donor_fact_answered_rate", "max", "share",
        "answers that state the donor's fact instead of their own prompt's", "cases with planted facts",
    ),
    ResultGate(
        "--min-planted-fact-rate", "planted_fact_answered_rate", "min", "share",
        "answers that state the fact of their own prompt", "cases with planted facts",
    ),
    ResultGate(
        "--max-wrong-kv-pairs", "wrong_kv_pairs", "max", "count",
        "pairs where only the warm answer states the donor's fact", _PAIRED,
    ),
    ResultGate(
        "--max-hits-without-saving", "hits_without_saving", "max", "count",
        "confirmed hits no faster than the noise", _PAIRED + " and a rerun arm",
    ),
    ResultGate(
        "--max-faster-without-reuse", "faster_without_reuse", "max", "count",
        "pairs faster than the noise without confirmed reuse", _PAIRED + " and a rerun arm",
    ),
    ResultGate(
        "--min-semantic-eligible-lift", "semantic_eligible_lift", "min", "number",
        "eligible minus exact block rate", "an offline run with a planner",
    ),
    ResultGate(
        "--min-backend-confirmed-lift", "backend_confirmed_lift", "min", "number",
        "confirmed minus exact block rate", "a live run whose backend confirms reuse",
    ),
    ResultGate(
        "--max-negative-control-eligible-rate", "negative_control_semantic_eligible_rate", "max", "share",
        "blocks of unrelated pairs that a planner calls eligible", "an offline run with negative controls",
    ),
    ResultGate(
        "--max-wrong-tokens", "wrong_tokens", "max", "count",
        "tokens that a planner calls equal and that are not", "an offline run with a planner",
    ),
    ResultGate("--max-error-rate", "error_rate", "max", "share", "share of requests that failed"),
    ResultGate("--min-requests", "request_count", "min", "count", "requests in the result"),
)
# fmt: on
