"""Is the file what was measured? Its digest, its aggregates, and numbers that a request can have at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sembench.result import RequestRecord, Result, compute_digest
from sembench.scoring.aggregate import aggregate
from sembench.scoring.paired import summarize_pairs
from sembench.trust.doubts import Doubt, Finding

SAME = 1e-6
_SHOWN = 3
_SHARES = (
    "quality_score",
    "quality_f1",
    "quality_rouge_l",
    "exact_match",
    "cold_f1",
    "cold_rouge_l",
    "edit_similarity",
)
_COUNTS = ("exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens", "backend_confirmed_tokens")
_BLOCKS = ("exact_hit_blocks", "semantic_candidate_blocks", "semantic_eligible_blocks", "backend_confirmed_blocks")
_TIMES = ("ttft_ms", "latency_ms", "server_ttft_ms", "engine_ttft_ms", "queue_time_ms", "cold_kl_topk", "ppl_ratio")
_ROUNDING_MS = 1.0


def check_integrity(result: Result) -> list[Finding]:
    """Return what is wrong with the file itself."""
    return [*_check_whole(result), *_check_aggregates(result), *_check_numbers(result), *_check_sessions(result)]


def _check_whole(result: Result) -> Iterator[Finding]:
    if not result.requests:
        yield Finding(Doubt.EDITED_RESULT, "the file holds no requests, so that nothing in it can be computed again")
    elif result.digest is None:
        yield Finding(
            Doubt.EDITED_RESULT, "the file has no digest: an older version wrote it, or a hand; run the benchmark again"
        )
    elif result.digest != compute_digest(result):
        yield Finding(Doubt.EDITED_RESULT, "the digest does not fit the requests, the settings and the run")


def _check_aggregates(result: Result) -> Iterator[Finding]:
    """Compute every aggregate again; an older version may have had other ones, which its missing digest tells."""
    if not result.requests or result.digest is None:
        return
    parts: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
        (result.aggregate, aggregate(result.requests)),
        (result.paired or {}, summarize_pairs(result.requests) or {}),
    )
    wrong = [
        f"{name} is {stated!r} in the file and {computed.get(name)!r} by its requests"
        for file_says, computed in parts
        for name, stated in file_says.items()
        if not name.endswith("_ci") and not is_same(stated, computed.get(name))
    ]
    if wrong:
        yield Finding(Doubt.EDITED_RESULT, _join(wrong))


def is_same(left: Any, right: Any) -> bool:
    """Return whether two values of JSON are equal, numbers to a part in a million."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return math.isclose(left, right, rel_tol=SAME, abs_tol=SAME)
    return bool(left == right)


def _check_numbers(result: Result) -> Iterator[Finding]:
    wrong = [
        f"{record.item_id} ({record.arm}): {line}" for record in result.requests for line in find_impossible(record)
    ]
    if wrong:
        yield Finding(Doubt.IMPOSSIBLE_NUMBERS, _join(wrong))


def find_impossible(record: RequestRecord) -> Iterator[str]:
    """Yield one line for each number that no request can have."""
    prompt, blocks = record.prompt_tokens, record.total_blocks
    for name in _COUNTS:
        value = getattr(record, name)
        if value is not None and (value < 0 or (prompt is not None and value > prompt)):
            yield f"{name} is {value}, the prompt has {prompt} tokens"
    for name in _BLOCKS:
        value = getattr(record, name)
        if value is not None and (value < 0 or (blocks is not None and value > blocks)):
            yield f"{name} is {value}, the prompt has {blocks} full blocks"
    held = (record.exact_tokens or 0) + (record.backend_confirmed_tokens or 0)
    if prompt is not None and held > prompt and not record.cross_tenant:
        yield f"{held} tokens exact or confirmed, the prompt has {prompt}"
    for name in _SHARES:
        value = getattr(record, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{name} is {value}, not between 0 and 1"
    for name in _TIMES:
        value = getattr(record, name)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            yield f"{name} is {value}"
    first, last = record.ttft_ms, record.latency_ms
    if first is not None and last is not None and first > last + _ROUNDING_MS:
        yield f"the first token came after {first:g} ms, the last after {last:g} ms"


def _check_sessions(result: Result) -> Iterator[Finding]:
    sessions = (result.run or {}).get("sessions")
    known = [one.get("servers") for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else []
    different = [one for one in known if one is not None and one != known[-1]]
    if different:
        yield Finding(
            Doubt.MIXED_SERVERS, f"{len(known)} sessions on different servers: {different[0]} and {known[-1]}"[:300]
        )


def _join(lines: Iterable[str]) -> str:
    found = list(lines)
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more
