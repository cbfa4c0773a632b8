"""Makes a record of the result file from an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sembench.backends.base import PromptCall, Route, ServerAnswer
from sembench.live.settings import PAIRED_ARMS, LiveSettings
from sembench.manifests.cases import Case
from sembench.result import OUTPUT_TEXT_CHARS, RequestRecord
from sembench.scoring.record_scores import repeats_prompt, score_against_gold
from sembench.values import read_count, read_float, read_text
from sembench.witnesses.confirmation import Confirmation


def build_record(
    call: PromptCall,
    case: Case,
    arm: str,
    answer: ServerAnswer,
    verdict: Confirmation,
    settings: LiveSettings,
    donors: Sequence[ServerAnswer],
    window: tuple[float, float],
) -> RequestRecord:
    """Return the record of one request; ``window`` is when it was sent and when its answer ended, in Unix seconds.

    A donor that failed makes it an error: the test was not fair.
    """
    failed = next((f"a donor could not be primed: {donor.error}" for donor in donors if donor.error), None)
    prompt, meta = answer.prompt_tokens, case.metadata
    return RequestRecord(
        item_id=case.item_id,
        dataset=case.dataset,
        transform=case.transform,
        negative_control=case.negative_control,
        source_id=case.source_id,
        pair_id=case.item_id if arm in PAIRED_ARMS else None,
        arm=arm,
        tenant=call.tenant or None,
        traffic_class=read_text(meta.get("traffic_class")),
        donor_count=len(donors),
        prompt_tokens=prompt,
        total_blocks=_count_blocks(prompt, settings.block_size),
        expected_supplied_tokens=read_count(meta.get("expected_supplied_tokens")),
        expected_span_target_start=read_count(meta.get("expected_span_target_start")),
        donor_worker_ids=tuple(donor.route.worker_id for donor in donors if donor.route.worker_id),
        error=answer.error or failed,
        sent_unix_s=window[0],
        finished_unix_s=window[1],
        max_tokens=call.max_tokens,
        donor_request_ids=tuple(dict.fromkeys(name for donor in donors for name in donor.ids)),
        **_build_confirmation_fields(verdict, settings.block_size),
        **_build_answer_fields(answer),
        **_build_route_fields(answer.route),
        **({} if answer.error else _score(answer, case, settings)),
    )


def _score(answer: ServerAnswer, case: Case, settings: LiveSettings) -> dict[str, Any]:
    """Return the scores of an answer, and whether it is the prompt's own beginning."""
    scores = score_against_gold(answer.text, case, settings.quality_threshold, settings.quality_f1_floor)
    return scores | {"echoes_prompt": repeats_prompt(answer.text, case.recipient_prompt)}


def _build_confirmation_fields(verdict: Confirmation, block: int) -> dict[str, Any]:
    """Return the fields about reuse. In a live run, exact hits are what the engine's prefix cache served."""
    return {
        "exact_hit_blocks": _count_blocks(verdict.exact_tokens, block),
        "exact_hit_tokens": verdict.exact_tokens,
        "exact_prefix_hit_blocks": _count_blocks(verdict.exact_tokens, block),
        "exact_prefix_hit_tokens": verdict.exact_tokens,
        "backend_confirmed_blocks": _count_blocks(verdict.confirmed_tokens, block),
        "backend_confirmed_tokens": verdict.confirmed_tokens,
        "confirmation_sources": verdict.sources,
        "contradictions": verdict.contradictions,
        "exact_tokens": verdict.exact_tokens,
        "reused_tokens": verdict.reused_tokens,
        "recomputed_tokens": verdict.recomputed_tokens,
        "prefill_tokens": verdict.prefill_tokens,
        "risk": verdict.risk,
        "fuzzy_confirmed_tokens": verdict.fuzzy_tokens,
        "external_confirmed_tokens": verdict.external_tokens,
        "external_confirmed_tokens_source": None if verdict.external_tokens is None else "arm_prometheus_delta",
        "flush_contaminated": verdict.contaminated,
    }


def _build_answer_fields(answer: ServerAnswer) -> dict[str, Any]:
    receipt = answer.receipt or {}
    donors = receipt.get("donors")
    return {
        "donor_ids": tuple(str(one) for one in donors) if isinstance(donors, list) else (),
        "rejection_reason": read_text(receipt.get("reason")),
        "engine_request_id": next(iter(answer.ids[1:] or answer.ids), None),
        "request_ids": answer.ids,
        "malformed": answer.malformed,
        "ttft_ms": answer.ttft_ms,
        "latency_ms": answer.latency_ms,
        "server_ttft_ms": read_float(receipt.get("ttft_ms")),
        "engine_ttft_ms": answer.engine_ttft_ms,
        "queue_time_ms": answer.queue_time_ms,
        "output_text": answer.text[:OUTPUT_TEXT_CHARS],
        "output_tokens": answer.output_tokens,
        "output_token_ids": answer.token_ids or None,
        "output_top_logprobs": [dict(one) for one in answer.top_logprobs] or None,
        "finish_reason": answer.finish_reason,
    }


def _build_route_fields(route: Route) -> dict[str, Any]:
    return {
        "route_endpoint_id": route.endpoint_id,
        "route_outcome": route.outcome,
        "route_semantic_score": route.semantic_score,
        "route_total_score": route.total_score,
        "route_reason": route.reason,
        "gateway_route_header": route.header,
        "worker_id": route.worker_id,
    }


def _count_blocks(tokens: int | None, block: int) -> int | None:
    return None if tokens is None else tokens // block
