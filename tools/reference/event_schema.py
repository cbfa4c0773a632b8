"""The table of events: one row a field, from which the JSON Schema and the reference page are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from semblend.confirm.events import SCHEMA_VERSION, EventKind
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import TEXT_LIMIT, JsonObject, Receipt
from semblend.plan.reuse_plan import DeclineReason

EVICTION_REASONS = ("capacity", "expired", "forgotten", "replaced", "superseded", "engine")

# What the tables call a type -> its JSON Schema. A trailing "?" in a table means "or null".
TYPES: dict[str, JsonObject] = {
    "string": {"type": "string"},
    "name": {"type": "string", "minLength": 1},
    "text": {"type": "string", "maxLength": TEXT_LIMIT},
    "digest": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "count": {"type": "integer", "minimum": 0},
    "number": {"type": "number"},
    "measure": {"type": "number", "minimum": 0},
    "share": {"type": "number", "minimum": -1, "maximum": 1},
    "names": {"type": "array", "items": {"type": "string"}},
    "outcome": {"enum": [str(outcome) for outcome in Outcome]},
    "decline reason": {"enum": [str(reason) for reason in DeclineReason]},
    "eviction reason": {"enum": list(EVICTION_REASONS)},
    "spans": {"type": "array", "items": {"$ref": "#/$defs/span"}},
    "receipt": {"$ref": "#/$defs/receipt"},
}


@dataclass(frozen=True, slots=True)
class Field:
    """One row: ``type`` is a key of `TYPES`, with ``?`` behind it where null is allowed."""

    name: str
    type: str
    help: str
    required: bool = True

    @property
    def schema(self) -> JsonObject:
        """The field's JSON Schema.

        >>> Field("risk", "measure?", "Risk seen.").schema
        {'anyOf': [{'type': 'number', 'minimum': 0}, {'type': 'null'}], 'description': 'Risk seen.'}
        """
        plain = TYPES[self.type.removesuffix("?")]
        nullable = self.type.endswith("?")
        shape: JsonObject = {"anyOf": [plain, {"type": "null"}]} if nullable else dict(plain)
        return {**shape, "description": self.help}


def object_schema(fields: Iterable[Field], description: str) -> JsonObject:
    """The JSON Schema of an object with exactly these fields."""
    rows = tuple(fields)
    return {
        "type": "object",
        "description": description,
        "properties": {row.name: row.schema for row in rows},
        "required": [row.name for row in rows if row.required],
        "additionalProperties": False,
    }


SPAN_FIELDS: tuple[Field, ...] = (
    Field("donor_id", "name", "The donor that holds the tokens."),
    Field("generation", "count", "Which registration of the donor was seen."),
    Field("donor_start", "count", "First token in the donor."),
    Field("target_start", "count", "First token in the prompt."),
    Field("length", "count", "Tokens, all equal in donor and prompt."),
)

RECEIPT_FIELDS: tuple[Field, ...] = tuple(
    Field(f.name, f.metadata["type"], f.metadata["help"]) for f in fields(Receipt)
)


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
        EventKind.REUSE_SWITCHED: KindSpec(
            "Prompts of a kind are reused no more, because it was seen not to pay, or are again.",
            (
                Field("kind", "name", "The kind: order of passages, length, number of spans."),
                Field("on", "boolean", "Whether they are from now on."),
                Field("expected_ms", "measure", "What a reuse is expected to take.", required=False),
                Field("expected_cold_ms", "measure", "What a prefill is expected to take.", required=False),
                _DETAIL,
            ),
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
