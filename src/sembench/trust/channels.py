"""Counts independent witnesses. Receipt and usage come in one answer, so they are one channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sembench.result import RequestRecord
from sembench.trust.doubts import Doubt, Finding
from sembench.witnesses.audit import strip_id

CHANNELS = {"receipt": "answer", "usage": "answer", "prometheus": "counters", "audit": "engine log"}
MIN_WITNESSES = 2


def list_channels(record: RequestRecord, logged: Mapping[str, int]) -> set[str]:
    """Return the channels that speak about a request: its answer, the counters, the engine's log."""
    found = {CHANNELS[source] for source in record.confirmation_sources if source in CHANNELS}
    return found | ({"engine log"} if _find_logged(record, logged) is not None else set())


def require_witnesses(
    records: Sequence[RequestRecord], count: int, logged: Mapping[str, int], block_size: int
) -> tuple[list[RequestRecord], list[Finding]]:
    """Return the records with reuse confirmed only where ``count`` channels state it, and what was taken away.

    ``logged`` are the materialized tokens by request of engine logs that belong to the run. Where reuse must not
    happen (negatives, other tenants), one claim is enough to count against the server.
    """
    kept, alone = [], []
    for record in records:
        tokens = record.backend_confirmed_tokens
        if not tokens or record.negative_control or record.cross_tenant:
            kept.append(record)
            continue
        said = _find_logged(record, logged)
        own = min(tokens, said) if said is not None else tokens
        if len(list_channels(record, logged)) < count:
            alone.append(record)
            own = 0
        if own == tokens:
            kept.append(record)
        else:
            kept.append(replace(record, backend_confirmed_tokens=own, backend_confirmed_blocks=own // block_size))
    return kept, _describe(alone, count, logged)


def _describe(alone: Sequence[RequestRecord], count: int, logged: Mapping[str, int]) -> list[Finding]:
    if not alone:
        return []
    who = sorted({channel for record in alone for channel in list_channels(record, logged)}) or ["nobody"]
    words = (
        f"{len(alone)} requests claim reuse in {len(who)} channel ({', '.join(who)}); {count} independent ones count"
    )
    hint = "give --metrics-url, --connector-audit or --engine-summary"
    return [Finding(Doubt.ONE_WITNESS, f"{words} ({hint})")]


def _find_logged(record: RequestRecord, logged: Mapping[str, int]) -> int | None:
    names = (*record.request_ids, record.engine_request_id)
    return next((logged[own] for name in names if name and (own := strip_id(name)) in logged), None)
