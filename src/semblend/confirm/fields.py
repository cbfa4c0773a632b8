"""The shape of one JSON field: one row of a table from which a JSON Schema and a docs page are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from semblend.confirm.outcome import Outcome
from semblend.plan.reuse_plan import DeclineReason

JsonObject = dict[str, Any]

TEXT_LIMIT = 500
"""Longest free text in an event, in characters: room for a reason, too little for a prompt."""

EVICTION_REASONS = ("capacity", "expired", "forgotten", "replaced", "engine")

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
