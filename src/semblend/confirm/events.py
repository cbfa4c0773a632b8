"""The audit stream: one JSON object a line, nine kinds. ``events.schema.json`` beside it says what each carries.

An event is made on the lookup path, so making one copies a few references and no more; turning it into JSON
is the sink's work. No event holds prompt text or a namespace's salt: only counts, ids, digests and reasons.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import TEXT_LIMIT, JsonObject, Receipt, span_to_dict
from semblend.discover.donor import EvictionReason
from semblend.errors import ReceiptError
from semblend.plan.reuse_plan import DeclineReason
from semblend.span import Span

SCHEMA_VERSION = 1


class EventKind(StrEnum):
    """What can happen to a donor or to a request."""

    DONOR_REGISTERED = "donor_registered"
    DONOR_EVICTED = "donor_evicted"
    LOOKUP = "lookup"
    REUSE_PLANNED = "reuse_planned"
    REUSE_DECLINED = "reuse_declined"
    REUSE_CONFIRMED = "reuse_confirmed"
    REUSE_SWITCHED = "reuse_switched"
    FALLBACK = "fallback"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Make it with the function named after its kind.

    >>> print(Event(EventKind.ERROR, {"where": "store", "message": "full"}, time_unix_s=1.5).to_json_line())
    {"schema_version":1,"time_unix_s":1.5,"event":"error","request_id":null,"engine":"","where":"store","message":"full"}
    """

    kind: EventKind
    fields: Mapping[str, Any]
    request_id: str | None = None
    engine: str = ""
    time_unix_s: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", MappingProxyType(self.fields))

    def to_dict(self) -> JsonObject:
        """JSON values under the names of the table; a field that is unknown is left out."""
        record: JsonObject = {
            "schema_version": SCHEMA_VERSION,
            "time_unix_s": self.time_unix_s,
            "event": str(self.kind),
            "request_id": self.request_id,
            "engine": self.engine,
        }
        for name, value in self.fields.items():
            plain = json_value(value)
            if plain is not None:
                record[name] = plain
        return record

    def to_json_line(self) -> str:
        """ASCII JSON without a line break, so that a line is one event whatever an id contains."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)


def donor_registered(
    donor_id: str,
    namespace_digest: str,
    tokens: int,
    generation: int,
    *,
    blocks: int | None = None,
    bytes_: int | None = None,
    tier: str | None = None,
    request_id: str | None = None,
    engine: str = "",
) -> Event:
    """A donor can be found from now on."""
    fields = {
        "donor_id": donor_id,
        "namespace": namespace_digest,
        "tokens": tokens,
        "generation": generation,
        "blocks": blocks,
        "bytes": bytes_,
        "tier": tier,
    }
    return Event(EventKind.DONOR_REGISTERED, fields, request_id, engine)


def donor_evicted(
    donor_id: str,
    generation: int,
    reason: EvictionReason,
    *,
    request_id: str | None = None,
    engine: str = "",
) -> Event:
    """A donor is gone."""
    fields = {"donor_id": donor_id, "generation": generation, "reason": reason}
    return Event(EventKind.DONOR_EVICTED, fields, request_id, engine)


def lookup(
    request_id: str | None,
    prompt_tokens: int,
    seeds: int,
    candidates: int,
    lookup_ms: float,
    *,
    exact_tokens: int | None = None,
    reusable_tokens: int | None = None,
    donor_ids: tuple[str, ...] = (),
    similarity: float | None = None,
    reason: DeclineReason | None = None,
    engine: str = "",
) -> Event:
    """Donors were searched; ``reason`` is set when no plan came of it."""
    fields = {
        "prompt_tokens": prompt_tokens,
        "seeds": seeds,
        "candidates": candidates,
        "lookup_ms": lookup_ms,
        "exact_tokens": exact_tokens,
        "reusable_tokens": reusable_tokens,
        "donor_ids": donor_ids or None,
        "similarity": similarity,
        "reason": reason,
    }
    return Event(EventKind.LOOKUP, fields, request_id, engine)


def reuse_planned(
    request_id: str | None,
    spans: tuple[Span, ...],
    reused_tokens: int,
    *,
    prompt_tokens: int | None = None,
    exact_tokens: int | None = None,
    saving_ms: float | None = None,
    similarity: float | None = None,
    engine: str = "",
) -> Event:
    """A plan went to a backend."""
    fields = {
        "spans": spans,
        "reused_tokens": reused_tokens,
        "prompt_tokens": prompt_tokens,
        "exact_tokens": exact_tokens,
        "saving_ms": saving_ms,
        "similarity": similarity,
    }
    return Event(EventKind.REUSE_PLANNED, fields, request_id, engine)


def reuse_switched(
    request_id: str | None,
    kind: str,
    on: bool,
    *,
    expected_ms: float | None = None,
    expected_cold_ms: float | None = None,
    detail: str = "",
    engine: str = "",
) -> Event:
    """Prompts of a kind are reused no more, because it does not pay, or are again."""
    fields = {
        "kind": kind,
        "on": on,
        "expected_ms": expected_ms,
        "expected_cold_ms": expected_cold_ms,
        "detail": detail,
    }
    return Event(EventKind.REUSE_SWITCHED, fields, request_id, engine)


def reuse_declined(
    request_id: str | None,
    reason: DeclineReason,
    detail: str = "",
    *,
    receipt: Receipt | None = None,
    engine: str = "",
) -> Event:
    """The planner said no, or, where there is a ``receipt``, the backend did."""
    fields = {"reason": reason, "detail": detail[:TEXT_LIMIT] or None, "receipt": receipt}
    return Event(EventKind.REUSE_DECLINED, fields, request_id, engine)


def reuse_confirmed(receipt: Receipt) -> Event:
    """The backend ran the request on donor KV; a receipt without reuse is refused."""
    if receipt.outcome is not Outcome.BACKEND_MATERIALIZED_REUSE:
        raise ReceiptError(
            f"the receipt of {receipt.request_id!r} says {receipt.outcome}, which confirms no reuse",
            hint="from_receipt() picks the event that fits a receipt",
        )
    fields = {"receipt": receipt}
    return Event(EventKind.REUSE_CONFIRMED, fields, receipt.request_id, receipt.engine)


def fallback(
    request_id: str | None,
    reason: DeclineReason | None,
    detail: str = "",
    *,
    receipt: Receipt | None = None,
    engine: str = "",
) -> Event:
    """The request ran without semantic reuse."""
    fields = {"reason": reason, "detail": detail[:TEXT_LIMIT] or None, "receipt": receipt}
    return Event(EventKind.FALLBACK, fields, request_id, engine)


def error(
    where: str,
    message: str,
    request_id: str | None = None,
    *,
    engine: str = "",
) -> Event:
    """Something of ours failed; ``message`` must not quote a prompt."""
    fields = {"where": where, "message": message[:TEXT_LIMIT]}
    return Event(EventKind.ERROR, fields, request_id, engine)


def from_receipt(receipt: Receipt) -> Event:
    """The one event that a receipt stands for: confirmed, declined by the backend, or fallback."""
    if receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE:
        return reuse_confirmed(receipt)
    common: JsonObject = {"receipt": receipt, "engine": receipt.engine}
    if receipt.outcome is Outcome.BACKEND_DECLINED_REUSE and receipt.reason is not None:
        return reuse_declined(receipt.request_id, receipt.reason, receipt.detail, **common)
    return fallback(receipt.request_id, receipt.reason, receipt.detail, **common)


def json_value(value: Any) -> Any:
    """``value`` as JSON knows it; None for what JSON cannot say (infinite, not a number)."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)  # a member of an enum becomes its word
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Span):
        return span_to_dict(value)
    if isinstance(value, Receipt):
        return {**value.to_dict(), "detail": value.detail[:TEXT_LIMIT]}
    if isinstance(value, Iterable):
        return [json_value(item) for item in value]
    return json_value(value.item())  # a numpy number: counts often come from arrays
