"""The audit stream: one JSON object a line, eight kinds, one table that the schema and the docs are made from.

An event is made on the lookup path, so making one copies a few references and no more; turning it into JSON
is the sink's work. No event holds prompt text or a namespace's salt: only counts, ids, digests and reasons.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import (
    RECEIPT_FIELDS,
    SPAN_FIELDS,
    TEXT_LIMIT,
    Field,
    JsonObject,
    Receipt,
    object_schema,
    span_to_dict,
)
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
    FALLBACK = "fallback"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class KindSpec:
    """What an event kind means and carries, besides the envelope."""

    help: str
    fields: tuple[Field, ...]
    needs_request: bool = False


ENVELOPE: tuple[Field, ...] = (
    Field("schema_version", "integer", "Version of this format."),
    Field("time_unix_s", "measure", "When it happened, in seconds since 1970."),
    Field("event", "name", "The kind."),
    Field("request_id", "string?", "The request it belongs to; null where there is none."),
    Field("engine", "string", "The engine; empty where the library is used without one."),
)

_DETAIL = Field("detail", "text", f"One line for people, at most {TEXT_LIMIT} characters.", required=False)
_SIMILARITY = Field("similarity", "share", "Best similarity seen: evidence, never permission.", required=False)
_RECEIPT = Field("receipt", "receipt", "The backend's receipt, where one exists.", required=False)

KINDS: Mapping[EventKind, KindSpec] = MappingProxyType(
    {
        EventKind.DONOR_REGISTERED: KindSpec(
            "A prompt's tokens can be found from now on.",
            (
                Field("donor_id", "name", "The donor."),
                Field("namespace", "digest", "Digest of its namespace."),
                Field("tokens", "count", "Its length."),
                Field("generation", "count", "Which registration this is; never the same twice in a store."),
                Field("blocks", "count", "KV blocks that the engine holds for it.", required=False),
                Field("bytes", "count", "Memory it takes.", required=False),
                Field("tier", "name", "Where its KV lies: device, host, disk, …", required=False),
            ),
        ),
        EventKind.DONOR_EVICTED: KindSpec(
            "A donor is gone and is never served again.",
            (
                Field("donor_id", "name", "The donor."),
                Field("generation", "count", "The registration that ended."),
                Field("reason", "eviction reason", "Why it went."),
            ),
        ),
        EventKind.LOOKUP: KindSpec(
            "Donors were searched for a prompt. What was found is evidence; nothing was reused yet.",
            (
                Field("prompt_tokens", "count", "Length of the prompt."),
                Field("seeds", "count", "K-grams that stand for the prompt in the search."),
                Field("candidates", "count", "Runs of donors that were compared token by token."),
                Field("lookup_ms", "measure", "Time it took."),
                Field("exact_tokens", "count", "Tokens the engine held already.", required=False),
                Field("reusable_tokens", "count", "Token-equal tokens that donors hold.", required=False),
                Field("donor_ids", "names", "The donors that hold them.", required=False),
                _SIMILARITY,
                Field("reason", "decline reason", "Why the lookup ended without a plan.", required=False),
            ),
        ),
        EventKind.REUSE_PLANNED: KindSpec(
            "A plan was handed to a backend. It is a proposal and never counts as reuse.",
            (
                Field("spans", "spans", "The spans, in target order."),
                Field("reused_tokens", "count", "Tokens inside the spans."),
                Field("prompt_tokens", "count", "Length of the prompt.", required=False),
                Field("exact_tokens", "count", "Tokens the engine held already.", required=False),
                Field("saving_ms", "number", "Expected saving, where the engine's rates are known.", required=False),
                _SIMILARITY,
            ),
        ),
        EventKind.REUSE_DECLINED: KindSpec(
            "Nothing is reused: the planner or the backend said no.",
            (Field("reason", "decline reason", "Why."), _DETAIL, _RECEIPT),
        ),
        EventKind.REUSE_CONFIRMED: KindSpec(
            "The backend confirms that the request ran on donor KV. The only event that counts as reuse.",
            (Field("receipt", "receipt", "The backend's receipt."),),
            needs_request=True,
        ),
        EventKind.FALLBACK: KindSpec(
            "The request ran without semantic reuse; expected behaviour, not a failure.",
            (Field("reason", "decline reason", "Why, where it is known.", required=False), _DETAIL, _RECEIPT),
        ),
        EventKind.ERROR: KindSpec(
            "Something of ours failed. The request ran cold.",
            (
                Field("where", "name", "The part that failed."),
                Field("message", "text", f"What it said, at most {TEXT_LIMIT} characters."),
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Make it with the function named after its kind.

    >>> print(error("store", "full", time_unix_s=1.5).to_json_line())
    {"schema_version":1,"time_unix_s":1.5,"event":"error","request_id":null,"engine":"","where":"store","message":"full"}
    """

    kind: EventKind
    time_unix_s: float
    request_id: str | None
    engine: str
    fields: Mapping[str, Any]

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
    time_unix_s: float | None = None,
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
    return _make_event(EventKind.DONOR_REGISTERED, request_id, engine, time_unix_s, fields)


def donor_evicted(
    donor_id: str,
    generation: int,
    reason: EvictionReason,
    *,
    request_id: str | None = None,
    engine: str = "",
    time_unix_s: float | None = None,
) -> Event:
    """A donor is gone."""
    fields = {"donor_id": donor_id, "generation": generation, "reason": reason}
    return _make_event(EventKind.DONOR_EVICTED, request_id, engine, time_unix_s, fields)


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
    time_unix_s: float | None = None,
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
    return _make_event(EventKind.LOOKUP, request_id, engine, time_unix_s, fields)


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
    time_unix_s: float | None = None,
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
    return _make_event(EventKind.REUSE_PLANNED, request_id, engine, time_unix_s, fields)


def reuse_declined(
    request_id: str | None,
    reason: DeclineReason,
    detail: str = "",
    *,
    receipt: Receipt | None = None,
    engine: str = "",
    time_unix_s: float | None = None,
) -> Event:
    """The planner said no, or, where there is a ``receipt``, the backend did."""
    fields = {"reason": reason, "detail": detail[:TEXT_LIMIT] or None, "receipt": receipt}
    return _make_event(EventKind.REUSE_DECLINED, request_id, engine, time_unix_s, fields)


def reuse_confirmed(receipt: Receipt, *, time_unix_s: float | None = None) -> Event:
    """The backend ran the request on donor KV; a receipt without reuse is refused."""
    if receipt.outcome is not Outcome.BACKEND_MATERIALIZED_REUSE:
        raise ReceiptError(
            f"the receipt of {receipt.request_id!r} says {receipt.outcome}, which confirms no reuse",
            hint="from_receipt() picks the event that fits a receipt",
        )
    fields = {"receipt": receipt}
    return _make_event(EventKind.REUSE_CONFIRMED, receipt.request_id, receipt.engine, time_unix_s, fields)


def fallback(
    request_id: str | None,
    reason: DeclineReason | None,
    detail: str = "",
    *,
    receipt: Receipt | None = None,
    engine: str = "",
    time_unix_s: float | None = None,
) -> Event:
    """The request ran without semantic reuse."""
    fields = {"reason": reason, "detail": detail[:TEXT_LIMIT] or None, "receipt": receipt}
    return _make_event(EventKind.FALLBACK, request_id, engine, time_unix_s, fields)


def error(
    where: str,
    message: str,
    request_id: str | None = None,
    *,
    engine: str = "",
    time_unix_s: float | None = None,
) -> Event:
    """Something of ours failed; ``message`` must not quote a prompt."""
    fields = {"where": where, "message": message[:TEXT_LIMIT]}
    return _make_event(EventKind.ERROR, request_id, engine, time_unix_s, fields)


def from_receipt(receipt: Receipt, *, time_unix_s: float | None = None) -> Event:
    """The one event that a receipt stands for: confirmed, declined by the backend, or fallback."""
    if receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE:
        return reuse_confirmed(receipt, time_unix_s=time_unix_s)
    common: JsonObject = {"receipt": receipt, "engine": receipt.engine, "time_unix_s": time_unix_s}
    if receipt.outcome is Outcome.BACKEND_DECLINED_REUSE and receipt.reason is not None:
        return reuse_declined(receipt.request_id, receipt.reason, receipt.detail, **common)
    return fallback(receipt.request_id, receipt.reason, receipt.detail, **common)


def event_schema() -> JsonObject:
    """JSON Schema (draft 2020-12) of one line of the stream, made from `KINDS`."""
    definitions: JsonObject = {
        "span": object_schema(SPAN_FIELDS, "Token-equal tokens of a donor and of the prompt; half-open, in tokens."),
        "receipt": object_schema(RECEIPT_FIELDS, "What a backend did with one request."),
    }
    for kind, spec in KINDS.items():
        shape = object_schema((*ENVELOPE, *spec.fields), spec.help)
        shape["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
        shape["properties"]["event"] = {"const": str(kind)}
        if spec.needs_request:
            shape["properties"]["request_id"] = {"type": "string", "minLength": 1}
        definitions[str(kind)] = shape
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:semblend:event:{SCHEMA_VERSION}",
        "title": "A line of the semblend audit stream",
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in KINDS],
        "$defs": definitions,
    }


def _make_event(
    kind: EventKind, request_id: str | None, engine: str, time_unix_s: float | None, fields: Mapping[str, Any]
) -> Event:
    now = time.time() if time_unix_s is None else time_unix_s
    return Event(kind, now, request_id, engine, MappingProxyType(fields))


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
