"""The OpenAPI document of the server: one `Operation` for each route, and the models that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from semblend._version import __version__
from semblend.engine.server.openapi.pages import (
    DonorList,
    Flushed,
    Health,
    LiveNews,
    LiveRequestShape,
    ModelCard,
    ModelList,
    Stats,
)
from semblend.wire.chat import ChatBody
from semblend.wire.completions import CompletionBody
from semblend.wire.generate import GenerateBody
from semblend.wire.replies import ChatCompletion, ErrorBody, Generated, TextCompletion

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
