"""/openapi.json: one `Operation` for each route, and the models that they name.

Nothing here answers a request. Bodies are the models of `semblend.wire`; answers are described here, and tests hold the
real ones to their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from semblend._version import __version__
from semblend.confirm.outcome import Outcome
from semblend.plan.reuse_plan import DeclineReason
from semblend.wire.chat import ChatBody
from semblend.wire.completions import CompletionBody
from semblend.wire.generate import GenerateBody

Count = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0)]
FinishWord = Literal["stop", "length"]
Ms = float | None


class Shape(BaseModel):
    """An answer's object: all fields are there, and no other."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Shape):
    """A mistake; ``message`` holds the hint too."""

    message: Annotated[str, Field(min_length=1)]
    type: str
    param: str | None
    code: str | None
    hint: str


class ErrorBody(Shape):
    """What every answer with a status from 400 on has."""

    error: ErrorDetail


class ArrangedShape(Shape):
    """The order of the passages of one group: ``order[i]`` is the number, in the request, of the one at place i."""

    message: Count
    group: str
    order: list[Count]


class ReceiptShape(Shape):
    """What was reused; ``recomputed`` and ``donors`` are shown to an admin only.

    ``arranged`` is there where passages were marked.
    """

    outcome: Outcome
    mode: str | None
    exact_tokens: Count
    reused_tokens: Count
    recomputed_tokens: Count
    prefill_tokens: Count
    risk: float | None
    escalations: Count | None
    ttft_ms: Milliseconds | None
    reason: DeclineReason | None
    detail: str
    recomputed: list[tuple[Count, Count]] | None = None
    donors: list[str] = Field(default=[])
    arranged: list[ArrangedShape] = Field(default=[])


class CachedTokens(Shape):
    cached_tokens: Count


class Usage(Shape):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class BareToken(Shape):
    token: str
    logprob: Annotated[float, Field(le=1e-3)]
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatToken(BareToken):
    top_logprobs: list[BareToken]


class ChatLogprobs(Shape):
    content: list[ChatToken]
    refusal: None


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


class ChatCompletion(Shape):
    """OpenAI's ``chat.completion``."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    system_fingerprint: None
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage
    semblend: ReceiptShape | None


class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class TextChoice(Shape):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishWord


class TextCompletion(Shape):
    """OpenAI's ``text_completion``; ``semblend`` is a list where several prompts were sent."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: None
    choices: Annotated[list[TextChoice], Field(min_length=1)]
    usage: Usage
    semblend: ReceiptShape | list[ReceiptShape | None] | None


class CacheDetails(Shape):
    exact: Count
    fuzzy: Count


class FinishedByLength(Shape):
    type: Literal["length"]
    length: Count


class FinishedByStop(Shape):
    type: Literal["stop"]
    matched: str | int | None


class MetaInfo(Shape):
    id: str
    finish_reason: FinishedByLength | FinishedByStop
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    cached_tokens_details: CacheDetails
    e2e_latency: Annotated[float, Field(ge=0)]
    output_token_logprobs: list[tuple[float, int, str]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str]]] | None = None


class Generated(Shape):
    """SGLang's answer."""

    text: str
    output_ids: list[Count]
    meta_info: MetaInfo
    semblend: ReceiptShape | None = None


# -- what the server says of itself -----------------------------------------------------------------------------------


class ModelCard(Shape):
    """OpenAI's ``model``."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    max_model_len: Annotated[int, Field(ge=1)]


class ModelList(Shape):
    object: Literal["list"]
    data: Annotated[list[ModelCard], Field(min_length=1)]


class Health(Shape):
    status: Literal["ok"]
    model: str
    version: str
    needs_key: bool


class Flushed(Shape):
    success: Literal[True]
    donors_forgotten: Count


class TokensByKind(Shape):
    exact: Count
    reused: Count
    recomputed: Count
    prefill: Count


class TotalsShape(Shape):
    """What receipts add up to."""

    requests: Count
    states: dict[str, Count]
    outcomes: dict[str, Count]
    declines: dict[str, Count]
    tokens: TokensByKind
    saved_ms: float
    cold_ms: float
    risks: list[float]


class LiveRequestShape(Shape):
    """One request; ``tenant`` is shown to an admin only."""

    id: str
    endpoint: str
    state: Literal["waiting", "running", "done", "failed", "refused", "cancelled"]
    opened_unix_s: float
    waited_ms: Ms
    total_ms: Ms
    ttft_ms: Ms
    cold_ttft_ms: Ms
    prompt_tokens: Count
    output_tokens: Count
    quality: str | None
    error: str
    semblend: ReceiptShape | None
    places_known: bool
    strip: list[tuple[Count, Count, Literal["exact", "reused", "recomputed", "prefill"], int | None]]
    tenant: str = ""


class ComparisonShape(Shape):
    """First tokens of a kind of prompt with reuse and without; ``ratio`` has an interval of 95 %."""

    kind: str
    with_count: Count
    without_count: Count
    with_ms: float
    without_ms: float
    ratio: float
    low: float
    high: float


class LiveNews(Shape):
    """What changed since ``after``; ``compared`` is shown to an admin only."""

    sequence: Count
    requests: list[LiveRequestShape]
    totals: TotalsShape
    cold_samples: Count
    model: str
    admin: bool
    tenant: str
    running: Count
    waiting: Count
    refused: Count
    max_running: Count
    donors: Count
    donor_tokens: Count
    compared: list[ComparisonShape]


class DonorShape(Shape):
    donor_id: str
    tokens: Count
    created_unix_s: float
    pinned: bool
    tenant: str


class DonorList(Shape):
    count: Count
    donors: list[DonorShape]


class Stats(Shape):
    """``engine`` and ``responses`` are shown to an admin only."""

    uptime_s: Annotated[float, Field(ge=0)]
    totals: TotalsShape
    engine: dict[str, Any] = Field(default={})
    responses: dict[str, Count] = Field(default={})


# -- the document -----------------------------------------------------------------------------------------------------

JsonObject = dict[str, Any]
_REF = "#/components/schemas/{model}"
_KEYED = (401, 403)
_STOPPING = 503
"""Every route may say that the server is about to stop."""
_ANSWERING = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_ERRORS = {
    400: "The request is wrong: the error names the field, the value and a way out.",
    401: "The API key is missing or unknown.",
    403: "The page or the key may not do this.",
    404: "There is no such thing here.",
    408: "The body did not come in time.",
    413: "The body is larger than the server takes.",
    415: "The body has a Content-Encoding.",
    429: "Too many requests are running and waiting.",
    500: "The server failed; its log has the reason.",
    503: "The server has no room, or is about to stop.",
    504: "The request took too long.",
}
_REQUEST_ID = {"X-Request-ID": {"description": "The server's id of the request.", "schema": {"type": "string"}}}
_ERROR_HEADERS = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    429: {"Retry-After": {"required": True, "schema": {"type": "string", "pattern": "^[0-9]+$"}}},
}

_EVENT = {
    "description": "One event of a stream; its data is a piece of the answer as JSON, an error, or [DONE].",
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"const": "message"}},
    "required": ["data"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route takes and gives. ``reply`` is a model, or a media type; ``errors`` are its statuses besides 200."""

    method: str
    path: str
    summary: str
    reply: type[BaseModel] | str
    body: type[BaseModel] | None = None
    errors: tuple[int, ...] = _KEYED
    parameters: tuple[JsonObject, ...] = ()
    keyed: bool = True
    streams: bool = False
    batches: bool = False

    def describe(self) -> JsonObject:
        """The operation object of OpenAPI."""
        found: JsonObject = {
            "operationId": f"{self.method.lower()}_{self.path.strip('/').translate(_PLAIN) or 'dashboard'}",
            "summary": self.summary,
            "responses": {"200": self._describe_success()}
            | {str(one): _describe_error(one) for one in self._statuses()},
            "security": [{"bearer": []}, {"apiKey": []}, {}] if self.keyed else [],
        }
        if self.parameters:
            found["parameters"] = list(self.parameters)
        if self.body is not None:
            schema = {"application/json": {"schema": refer(self.body)}}
            found["requestBody"] = {"required": True, "content": schema}
        return found

    def _statuses(self) -> tuple[int, ...]:
        return tuple(sorted({*self.errors, _STOPPING}))

    def _describe_success(self) -> JsonObject:
        if isinstance(self.reply, str):
            return {"description": "The page.", "content": {self.reply: {"schema": {"type": "string"}}}}
        schema = refer(self.reply)
        if self.batches:
            schema = {"anyOf": [schema, {"type": "array", "items": schema, "minItems": 2}]}
        content: JsonObject = {"application/json": {"schema": schema}}
        if self.streams:
            content["text/event-stream"] = {"schema": _EVENT}
        return {"description": "The answer.", "content": content} | ({"headers": _REQUEST_ID} if self.streams else {})


_PLAIN = str.maketrans("/{}.:", "_____")


def refer(model: type[BaseModel]) -> JsonObject:
    return {"$ref": _REF.format(model=model.__name__)}


def _describe_error(status: int) -> JsonObject:
    found: JsonObject = {
        "description": _ERRORS[status],
        "content": {"application/json": {"schema": refer(ErrorBody)}},
    }
    return found | ({"headers": _ERROR_HEADERS[status]} if status in _ERROR_HEADERS else {})


def _make_parameter(name: str, place: str, description: str, schema: JsonObject) -> JsonObject:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "description": description,
        "schema": schema,
    }


_AFTER = _make_parameter(
    "after", "query", "The last sequence that was seen.", {"type": "string", "pattern": "^[0-9]+$", "default": "0"}
)
_NAME = _make_parameter("name", "path", "A model's name; it may hold slashes.", {"type": "string", "minLength": 1})
_ID = _make_parameter("request_id", "path", "The id that an answer has.", {"type": "string", "minLength": 1})
_ASKING = (*_ANSWERING[:1], *_KEYED, *_ANSWERING[1:])

OPERATIONS = (
    Operation(
        "POST", "/v1/chat/completions", "Answer a chat", ChatCompletion, ChatBody, _ASKING, streams=True
    ),
    Operation(
        "POST", "/v1/completions", "Continue one or several prompts", TextCompletion, CompletionBody, _ASKING,
        streams=True,
    ),
    Operation(
        "POST", "/generate", "Continue a prompt, in SGLang's shape", Generated, GenerateBody, _ASKING,
        streams=True, batches=True,
    ),
    Operation("GET", "/v1/models", "The models that are served", ModelList),
    Operation("GET", "/v1/models/{name}", "One model", ModelCard, errors=(*_KEYED, 404), parameters=(_NAME,)),
    Operation("GET", "/health", "Whether the server works", Health, errors=(), keyed=False),
    Operation("GET", "/metrics", "Prometheus metrics", "text/plain", errors=(*_KEYED, 500)),
    Operation("POST", "/flush_cache", "Forget the prefix cache and every donor", Flushed),
    Operation("POST", "/reset_prefix_cache", "The same as /flush_cache", Flushed),
    Operation("GET", "/api/live", "News for the dashboard", LiveNews, errors=(400, *_KEYED), parameters=(_AFTER,)),
    Operation(
        "GET", "/api/requests/{request_id}", "One of the latest requests", LiveRequestShape, errors=(*_KEYED, 404),
        parameters=(_ID,),
    ),
    Operation("GET", "/api/donors", "How many donors there are", DonorList),
    Operation("GET", "/api/stats", "Totals since the start", Stats),
    Operation("GET", "/openapi.json", "This document", "application/json", errors=(), keyed=False),
    Operation("GET", "/", "The dashboard", "text/html", errors=(), keyed=False),
    Operation("GET", "/app.js", "The dashboard's script", "text/javascript", errors=(), keyed=False),
    Operation("GET", "/dom.js", "Helpers of the dashboard's script", "text/javascript", errors=(), keyed=False),
    Operation("GET", "/strip.js", "The dashboard's strips of tokens", "text/javascript", errors=(), keyed=False),
    Operation("GET", "/app.css", "The dashboard's style", "text/css", errors=(), keyed=False),
)  # fmt: skip


def write_document(*, most_n: int, need_key: bool) -> JsonObject:
    """The document as JSON; ``most_n`` answers may be asked for, and ``need_key`` says that a key must be sent."""
    paths: dict[str, JsonObject] = {}
    for operation in OPERATIONS:
        found = operation.describe()
        if need_key and operation.keyed:
            found["security"] = [{"bearer": []}, {"apiKey": []}]
        paths.setdefault(operation.path, {})[operation.method.lower()] = found
    schemas = _write_schemas()
    for name in ("ChatBody", "CompletionBody", "SamplingParams"):
        for field in ("n", "best_of"):
            schemas[name]["properties"][field]["maximum"] = most_n
    return {
        "openapi": "3.1.0",
        "info": {"title": "SemBlend", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _write_schemas() -> dict[str, Any]:
    bodies = {operation.body for operation in OPERATIONS if operation.body is not None}
    replies = {operation.reply for operation in OPERATIONS if not isinstance(operation.reply, str)} | {ErrorBody}
    named = sorted(bodies | replies, key=lambda model: model.__name__)
    modes = [(model, "validation") for model in named]
    _, document = models_json_schema(modes, ref_template=_REF)  # type: ignore[arg-type]
    found: Mapping[str, Any] = document["$defs"]
    return dict(found)
