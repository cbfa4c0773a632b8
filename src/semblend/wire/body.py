"""A request's body as a pydantic model: strict types, null counts as absent, one error with a hint.

The models of the endpoints are also what /openapi.json publishes. Fields that nobody knows are ignored, as OpenAI's
clients expect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from semblend.wire.errors import ApiError

LONGEST_NAME = 256
SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are read at once; an error names the wrong value only in those."""


class StrictBody(BaseModel):
    """One JSON object; no type is turned into another."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def read(cls, body: str | bytes | bytearray, *, most_n: int = 1) -> Self:
        """The body as checked data; `ApiError` 400 that names the first wrong field, its value and a way out."""
        try:
            return cls.model_validate_json(body, context={"most_n": most_n})
        except ValidationError as caught:
            small = len(body) <= SMALL_BODY_BYTES  # a value is turned into Python's objects to be shown
            raise _translate(_choose(caught.errors(include_url=False, include_input=small))) from None


class ClosedBody(StrictBody):
    """An object of our own. A field that nobody knows is refused: a misspelt wish must not be dropped."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        """One error, however many there are: extra="forbid" alone would make one for each."""
        known = tuple(cls.model_fields)
        unknown = next((name for name in given if name not in known), None) if isinstance(given, dict) else None
        if unknown is not None:
            raise refuse("is unknown", "known are " + ", ".join(known), name=unknown[:60])
        return given


def refuse(what: str, hint: str, *, name: str = "") -> PydanticCustomError:
    """An error in the words of this project; ``name`` is the field where a whole object is checked."""
    return PydanticCustomError("refused", "refused", {"what": what, "hint": hint, "name": name})


def show(value: Any) -> str:
    """A value for an error line: short, on one line.

    >>> show("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value[:60] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Within:
    """Refuses numbers outside [low, high], and says so in the schema."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {"minimum": self.low, "maximum": self.high}

    def check(self, value: float) -> float:
        if not self.low <= value <= self.high:
            limits = f"[{self.low}, {self.high}]"
            raise refuse(f"is {show(value)}, outside {limits}", "send a value in that range, or leave it out")
        return value


class InOrder:
    """Tries the types of a union from left to right, and marks the errors of each with ~ for `_choose`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "union"
        plain = [choice[0] if isinstance(choice, tuple) else choice for choice in schema["choices"]]
        return core_schema.union_schema([(one, f"~{at}") for at, one in enumerate(plain)], mode="left_to_right")


Name = Annotated[str, Field(max_length=LONGEST_NAME)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _choose(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first error; of a union's errors, that of the type which came furthest before it failed."""
    first = errors[0]
    at = next((at for at, one in enumerate(first["loc"]) if _is_mark(one)), None)
    if at is None:
        return first

    def rank(error: ErrorDetails) -> tuple[list[float], bool]:
        steps: list[float] = [one for one in error["loc"][at:] if isinstance(one, int)]
        if error["type"].endswith("too_long"):  # all that was looked at is right
            steps.append(math.inf)
        return steps, error["type"] not in _WANTED

    return max((one for one in errors if one["loc"][:at] == first["loc"][:at]), key=rank)


def _is_mark(part: str | int) -> bool:
    return isinstance(part, str) and part.startswith("~")


def _translate(error: ErrorDetails) -> ApiError:
    context, parts = error.get("ctx", {}), [one for one in error["loc"] if not _is_mark(one)]
    if error["type"] == "json_invalid":
        pair = " (half a surrogate pair)" * ("hex escape" in context["error"])
        return ApiError(400, f"the body is not JSON: {context['error']}{pair}", hint="send a JSON object in UTF-8")
    if "what" in context:
        where, what, hint = write_path((*parts, context["name"])), context["what"], context["hint"]
    else:
        what, hint = _describe(error, context, parts)
        where = write_path(parts[:-1] if what.startswith("holds") else parts)
    return ApiError(400, f"{where or 'the body'} {what}", hint=hint, param=where or None)


def write_path(parts: Sequence[str | int]) -> str:
    """
    >>> write_path(("messages", 0, "content"))
    'messages[0].content'
    """
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one[:LONGEST_NAME]}" for one in parts if one != "")[1:]


_WANTED = {
    "string_type": "a string",
    "bool_type": "true or false",
    "float_type": "a number",
    "finite_number": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a JSON object",
    "model_type": "a JSON object",
    "greater_than_equal": "a token id",
    "less_than": "a token id",
}
_HINTS = {
    "": 'send an object such as {"model": "..."}',
    "messages": 'each message is an object such as {"role": "user", "content": "..."}',
    "content": 'send a string, or parts such as {"type": "text", "text": "..."}',
    "prompt": "send a non-empty string, a list of token ids, or several of them",
    "text": "send one string; several prompts are several requests, which are batched here",
    "input_ids": "send one flat list of token ids; several prompts are several requests, which are batched here",
    "stop_token_ids": "ids are integers, 0 or more",
}


def _describe(error: ErrorDetails, context: Mapping[str, Any], parts: Sequence[str | int]) -> tuple[str, str]:
    """What is wrong and a way out, for an error of pydantic's own."""
    kind, value = error["type"], show(error["input"]) if "input" in error else "something"
    name = next((one for one in reversed(parts) if isinstance(one, str)), "")
    hint = _HINTS.get(name, "send another value, or leave it out")
    if kind == "missing":
        return "is missing", hint
    if kind in ("too_long", "string_too_long"):
        unit = "characters" if kind == "string_too_long" else "prompts" if name == "prompt" else "entries"
        count = context.get("actual_length") or len(error.get("input") or ())
        return f"has {f'{count} {unit}, ' * bool(count)}more than {context['max_length']}", "send fewer"
    if kind in ("too_short", "string_too_short"):
        return "is empty", hint
    if kind == "literal_error":
        return f"is {value}", f"send {context['expected']}"
    wanted = "a token id" if "int" in kind and name in _ID_LISTS else _WANTED.get(kind, "allowed here")
    if isinstance(parts[-1] if parts else "", int) and name in (*_ID_LISTS, "stop"):
        return f"holds {value} at index {parts[-1]}, not {wanted}", hint
    return f"is {value}, not {wanted}", hint


_ID_LISTS = ("prompt", "input_ids", "stop_token_ids")
