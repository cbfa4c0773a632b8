"""The one place that turns what an engine knows about a request into its receipt.

The embedded engine, the vLLM adapter and the fake engine all call `build_receipt`, so the same facts give the same
outcome in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What an engine knows about a request when its first token is out, besides the work of a backend.

    ``decision`` is what the library handed out. ``compute_ms`` counts where no backend did any work.
    """

    request_id: str
    engine: str
    engine_version: str
    namespace: Namespace
    mode: str
    prompt_tokens: int
    exact_tokens: int
    decision: ReusePlan | Decline | None
    lookup_ms: float | None = None
    compute_ms: float | None = None
    ttft_ms: float | None = None


class BackendWork(Protocol):
    """What a backend did with a plan: tokens by kind, the gate's numbers, times in milliseconds."""

    @property
    def reused_tokens(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def risk(self) -> float | None: ...
    @property
    def escalations(self) -> int: ...
    @property
    def canary(self) -> float | None: ...
    @property
    def load_ms(self) -> float | None: ...
    @property
    def compute_ms(self) -> float | None: ...


def build_receipt(facts: RequestFacts, work: BackendWork | None = None, declined: Decline | None = None) -> Receipt:
    """Build the receipt from the facts, the backend's ``work`` and its reason to refuse, where there is one.

    Without ``work`` no reuse is counted, whatever was planned. Tokens that are neither exact, reused nor recomputed are
    prefill.

    >>> facts = RequestFacts(request_id="r", engine="semblend", engine_version="1", namespace=Namespace(), mode="fast",
    ...                      prompt_tokens=9, exact_tokens=4, decision=None)
    >>> receipt = build_receipt(facts)
    >>> str(receipt.outcome), receipt.prefill_tokens
    ('exact_prefix_route', 5)
    """
    reused = work.reused_tokens if work else 0
    recomputed = work.recomputed_tokens if work else 0
    outcome, why = _find_outcome(facts, reused, declined)
    return Receipt(
        request_id=facts.request_id,
        engine=facts.engine,
        engine_version=facts.engine_version,
        namespace=facts.namespace.digest,
        outcome=outcome,
        mode=facts.mode,
        prompt_tokens=facts.prompt_tokens,
        exact_tokens=facts.exact_tokens,
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        prefill_tokens=facts.prompt_tokens - facts.exact_tokens - reused - recomputed,
        spans=facts.decision.spans if reused + recomputed and isinstance(facts.decision, ReusePlan) else (),
        risk=work.risk if work else None,
        escalations=work.escalations if work else 0,
        canary=work.canary if work else None,
        lookup_ms=facts.lookup_ms,
        load_ms=work.load_ms if work else None,
        compute_ms=work.compute_ms if work else facts.compute_ms,
        ttft_ms=facts.ttft_ms,
        reason=why.reason if why else None,
        detail=why.detail if why else "",
    )


def _find_outcome(facts: RequestFacts, reused: int, declined: Decline | None) -> tuple[Outcome, Decline | None]:
    """What became of the request, and why nothing was reused."""
    if reused:
        return Outcome.BACKEND_MATERIALIZED_REUSE, None
    if declined is not None:
        return Outcome.BACKEND_DECLINED_REUSE, declined
    not_planned = facts.decision if isinstance(facts.decision, Decline) else None
    if facts.exact_tokens:
        return Outcome.EXACT_PREFIX_ROUTE, not_planned
    if not_planned is not None and not_planned.discovery_only:
        return Outcome.SEMANTIC_DISCOVERY_ONLY, not_planned
    return Outcome.COLD_FALLBACK, not_planned
