"""From what both halves know about a request to its receipt. Four kinds of tokens, and they add up to the prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semblend.confirm.receipt import Receipt, RequestFacts, build_receipt
from semblend.integration.vllm.scheduler.records import EngineFacts, Record
from semblend.integration.vllm.scheduler.requests import build_namespace, choose_mode
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan

ENGINE = "vllm"


def build_vllm_receipt(
    record: Record, decision: ReusePlan | Decline | None, engine_version: str, ttft_ms: float | None
) -> Receipt:
    """Build the receipt of a request whose first token is out; ``decision`` is what the worker was told to do.

    A load that failed counts no tokens.
    """
    facts = RequestFacts(
        request_id=record.request.request_id,
        engine=ENGINE,
        engine_version=engine_version,
        namespace=record.prompt.namespace,
        mode=record.mode,
        prompt_tokens=len(record.prompt),
        exact_tokens=record.local_tokens,
        decision=decision,
        lookup_ms=record.lookup_ms,
        ttft_ms=ttft_ms,
    )
    loaded = record.loaded
    if loaded is None:
        return build_receipt(facts)
    if loaded.failed:
        loaded = replace(loaded, reused_tokens=0, recomputed_tokens=0)
    declined = None if loaded.reason is None else Decline(loaded.reason, loaded.detail)
    return build_receipt(facts, loaded, declined)


def build_refused_receipt(request: Any, exact_tokens: int, engine: EngineFacts, settings: ConnectorSettings) -> Receipt:
    """Build the receipt of a request in an engine that we do not serve, without a look at its tokens."""
    namespace = build_namespace(request, engine.namespace)
    return build_receipt(
        RequestFacts(
            request_id=request.request_id,
            engine=ENGINE,
            engine_version=engine.version,
            namespace=namespace,
            mode=choose_mode(request, namespace, settings),
            prompt_tokens=len(request.prompt_token_ids),
            exact_tokens=exact_tokens,
            decision=Decline(DeclineReason.UNSUPPORTED_MODE, engine.refusal or ""),
        )
    )
