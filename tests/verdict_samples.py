"""Results that no server produced: for tests of gates, comparison and report, every number known."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from sembench.result import RequestRecord, Result, compute_digest, write_result
from sembench.scoring.aggregate import aggregate, aggregate_by_transform, summarize_pairs

TRANSFORMS = (
    "exact_repeat",
    "instruction_variant",
    "same_evidence_new_task",
    "rag_reorder",
    "multi_donor_composite",
    "fuzzy_edit",
    "leading_evidence_new_task",
    "negative_control",
)
SHARE = dict(zip(TRANSFORMS, (0.02, 0.85, 0.8, 0.75, 0.7, 0.5, 0.6, 0.0), strict=True))
EXACT = dict(zip(TRANSFORMS, (0.97, 0.05, 0.1, 0.02, 0.03, 0.0, 0.35, 0.0), strict=True))
BLOCK = 16
PREFIX = "sb-5a3b1e00"


def result_of(records: list[RequestRecord], **changes: Any) -> Result:
    """A result whose aggregates follow from its records."""
    values: dict[str, Any] = {
        "created_at_utc": "2026-11-07T12:00:00Z",
        "run": {
            "run_id": "sample", "engine": "semblend", "engine_version": "0.4.0", "arm": "paired",
            "manifest_path": "manifests/sample.jsonl", "manifest_sha256": "37c8" * 16, "sembench_version": "0.4.0",
            "timestamp_utc": "2026-11-07T12:00:00Z", "request_prefix": PREFIX,
        },
        "config": {"mode": "live-sglang", "block_size": BLOCK, "model": "smollm2-135m", "quality_threshold": 0.6},
        "environment": {"python": "3.11.9", "platform": "Linux x86_64", "host": "sample"},
        "aggregate": aggregate(records),
        "by_transform": aggregate_by_transform(records),
        "paired": summarize_pairs(records),
        "requests": tuple(records),
    }  # fmt: skip
    result = Result(**{**values, **changes})
    return result if "digest" in changes else replace(result, digest=compute_digest(result))


def live_records(sources: int = 6, *, seed: int = 1, reuse: float = 1.0) -> list[RequestRecord]:
    """Cold, warm and rerun arms of every transform and source; ``reuse`` scales what the backend confirms."""
    rng = random.Random(seed)
    return [
        record
        for source in range(sources)
        for transform in TRANSFORMS
        for record in _arms(rng, source, transform, 1024 * 2 ** (source % 5), reuse)
    ]


def _arms(rng: random.Random, source: int, transform: str, length: int, reuse: float) -> list[RequestRecord]:
    name, tokens = f"{transform}-{source}", length + rng.randrange(200)
    blocks = tokens // BLOCK
    exact, confirmed = int(tokens * EXACT[transform]), int(tokens * SHARE[transform] * reuse)
    cold_ms = tokens * 0.25 * rng.uniform(0.95, 1.05)
    warm_ms = (tokens - exact - confirmed) * 0.25 * rng.uniform(0.95, 1.05) + confirmed * 0.02 + 8
    cold = RequestRecord(
        item_id=name, dataset="qasper", transform=transform, negative_control=transform == "negative_control",
        source_id=f"doc-{source}", pair_id=name, arm="cold", donor_count=1, prompt_tokens=tokens, total_blocks=blocks,
        exact_hit_blocks=exact // BLOCK, exact_hit_tokens=exact // BLOCK * BLOCK,
        semantic_candidate_blocks=min(blocks, (exact + int(tokens * SHARE[transform] * 1.05)) // BLOCK),
        semantic_eligible_blocks=min(blocks, (exact + int(tokens * SHARE[transform])) // BLOCK),
        backend_confirmed_blocks=0, backend_confirmed_tokens=0, confirmation_sources=("receipt", "usage", "prometheus"),
        exact_tokens=0, reused_tokens=0, recomputed_tokens=0, prefill_tokens=tokens, ttft_ms=cold_ms,
        latency_ms=cold_ms + 400, flush_contaminated=False, output_text="The ferry leaves at nine.", output_tokens=7,
        quality_pass=True, quality_score=0.9, quality_f1=0.8, quality_rouge_l=0.78,
    )  # fmt: skip
    close = rng.uniform(0.9, 1.0) if confirmed else 1.0
    warm = replace(
        cold, arm="warm", ttft_ms=warm_ms, latency_ms=warm_ms + 400, backend_confirmed_tokens=confirmed,
        backend_confirmed_blocks=confirmed // BLOCK, exact_tokens=exact, reused_tokens=confirmed, recomputed_tokens=0,
        prefill_tokens=tokens - exact - confirmed, risk=0.004 if confirmed else None, cold_f1=close,
        cold_rouge_l=close, cold_kl_topk=(1 - close) / 5, first_divergence=None if close == 1 else 5,
        quality_score=0.9 * close, quality_f1=0.8 * close, route_outcome="backend_materialized_reuse",
    )  # fmt: skip
    rerun = replace(
        cold, arm="rerun", ttft_ms=cold_ms * rng.uniform(0.97, 1.03), cold_f1=1.0, cold_rouge_l=1.0, cold_kl_topk=0.0
    )
    return [cold, warm, rerun]


def changed(records: list[RequestRecord], where: Any, **changes: Any) -> list[RequestRecord]:
    """The records with ``changes`` wherever ``where(record)`` holds."""
    return [replace(record, **changes) if where(record) else record for record in records]


def written(path: Path, records: list[RequestRecord], **changes: Any) -> str:
    write_result(path, result_of(records, **changes))
    return str(path)
