"""From what both halves know about a request to its receipt. Four kinds of tokens, and they add up to the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.integration.vllm.orders import Loaded
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Namespace

ENGINE = "vllm"


@dataclass(slots=True)
class Facts:
    """What the scheduler half knows when the first token is out."""

    request_id: str
    namespace: Namespace
    prompt_tokens: int
    exact_tokens: int
    mode: str
    decision: ReusePlan | Decline | None
    claimed: bool
    lookup_ms: float | None
    ttft_ms: float | None


def receipt_of(facts: Facts, loaded: Loaded | None, engine_version: str) -> Receipt:
    """``loaded`` is the worker's word; without it no reuse is counted, whatever was planned."""
    reused = loaded.reused_tokens if loaded and not loaded.failed else 0
    recomputed = loaded.recomputed_tokens if loaded and not loaded.failed else 0
    outcome, why = _outcome(facts, loaded, reused)
    return Receipt(
        request_id=facts.request_id,
        engine=ENGINE,
        engine_version=engine_version,
        namespace=facts.namespace.digest,
        outcome=outcome,
        mode=facts.mode,
        prompt_tokens=facts.prompt_tokens,
        exact_tokens=facts.exact_tokens,
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        prefill_tokens=facts.prompt_tokens - facts.exact_tokens - reused - recomputed,
        spans=facts.decision.spans if reused and isinstance(facts.decision, ReusePlan) else (),
        risk=loaded.risk if loaded else None,
        escalations=loaded.escalations if loaded else 0,
        canary=loaded.canary if loaded else None,
        lookup_ms=facts.lookup_ms,
        load_ms=loaded.load_ms if loaded else None,
        compute_ms=loaded.compute_ms if loaded else None,
        ttft_ms=facts.ttft_ms,
        reason=why.reason if why else None,
        detail=why.detail if why else "",
    )


def _outcome(facts: Facts, loaded: Loaded | None, reused: int) -> tuple[Outcome, Decline | None]:
    if reused:
        return Outcome.BACKEND_MATERIALIZED_REUSE, None
    if facts.claimed and loaded is not None and loaded.reason is not None:
        return Outcome.BACKEND_DECLINED_REUSE, Decline(loaded.reason, loaded.detail)
    declined = facts.decision if isinstance(facts.decision, Decline) else None
    if facts.exact_tokens:
        return Outcome.EXACT_PREFIX_ROUTE, declined
    if declined is not None and declined.detail.startswith("discovery only"):
        return Outcome.SEMANTIC_DISCOVERY_ONLY, declined
    return Outcome.COLD_FALLBACK, declined
