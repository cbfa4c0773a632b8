"""One request from its first byte to its last token: read, admit, tokenize, submit, answer, let go.

Whatever ends a request (an answer, an error, a client that hangs up, a timeout, the server's own end), its place
at the gate is given back and the engine is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from semblend.engine.server.call import Call, CallGroup
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.service import ParsedBody, Service
from semblend.wire.answer import Chunk
from semblend.wire.chat import ChatRequest
from semblend.wire.completions import CompletionRequest
from semblend.wire.errors import ApiError
from semblend.wire.generate import GenerateRequest

CLIENT_LEFT = 499
LAST_WORDS_S = 5.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path, how its body is read, and what its ids begin with."""

    path: str
    parse: Callable[..., ParsedBody]
    prefix: str


ENDPOINTS = (
    Endpoint("/v1/chat/completions", ChatRequest.parse, "chatcmpl-"),
    Endpoint("/v1/completions", CompletionRequest.parse, "cmpl-"),
    Endpoint("/generate", GenerateRequest.parse, "gen-"),
)


async def answer(service: Service, request: Request, endpoint: Endpoint) -> Response:
    """The whole answer, or a stream of it. Raises `ApiError` for what ends before the first token."""
    identity = service.identify(request)
    asked = endpoint.parse(await read_json(request, service.config), most_n=service.config.max_n)
    service.check_model(asked.model)
    service.check_length(asked)
    service.check_token_ids(asked)
    # Ids are ours, never the caller's: they name donors, and one tenant must not replace another's.
    id = f"{endpoint.prefix}{uuid.uuid4().hex}"
    call: Call | CallGroup
    if isinstance(asked, CompletionRequest) and len(asked.prompts) > 1:
        alone = [replace(asked, prompts=(prompt,)) for prompt in asked.prompts]
        calls = [Call(service, request, one, identity, endpoint.path, f"{id}.{n}") for n, one in enumerate(alone)]
        call = CallGroup(id, calls, request.receive)
    else:
        call = Call(service, request, asked, identity, endpoint.path, id)
    if asked.stream:
        return StreamedReply(call)
    async with call.admit() as chunks:
        answers = call.make_answers()
        async for chunk in chunks:
            answers[chunk.index].add(chunk)
        body = call.make_reply().write_whole(answers, call.add_up(answers))
    return JSONResponse(body, headers={"X-Request-ID": call.id})


class StreamedReply(Response):
    """Server-sent events. The first token decides the status, so that an early failure is a plain error answer."""

    def __init__(self, call: Call | CallGroup) -> None:
        super().__init__(media_type="text/event-stream")
        self._call = call
        self._open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._call.admit() as chunks:
                await self._stream(chunks, send)
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        except ApiError as error:
            if not self._open:
                await error_response(error)(scope, receive, send)
                return
            with suppress(TimeoutError):  # one who does not read must not hold us
                async with asyncio.timeout(LAST_WORDS_S):
                    await send(_event_message([error.body()]))
                    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        except (ClientDisconnect, OSError):
            self.status_code = CLIENT_LEFT  # nobody is there to read it

    async def _stream(self, chunks: AsyncIterator[Chunk], send: Send) -> None:
        call, reply = self._call, None
        answers = call.make_answers()
        async for chunk in chunks:
            if reply is None:
                reply = call.make_reply()
                await self._begin(send)
                await self._tell(send, reply.write_opening(len(answers)))
            answers[chunk.index].add(chunk)
            if chunk.text or chunk.token_ids:
                await self._tell(send, [reply.write_piece(chunk, answers[chunk.index])])
        if reply is not None:
            await self._tell(send, reply.write_closing(answers, call.add_up(answers)))

    async def _begin(self, send: Send) -> None:
        self._open = True
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-request-id": self._call.id,
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _tell(self, send: Send, events: Sequence[Any]) -> None:
        if events:  # a client that stops reading is held to the same time limit as an engine that stops talking
            await self._call.run_unless_gone(send(_event_message(events)))


def _event_message(events: Sequence[Any]) -> Message:
    text = "".join(f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def read_json(request: Request, config: ServeConfig) -> Any:
    """The body as JSON, read no further and no longer than the configuration allows."""
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await _read(request, config.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, "the body did not come in time", hint="send it in one go", code="timeout") from None
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}", hint="send a JSON object in UTF-8") from None


async def _read(request: Request, limit: int) -> bytearray:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"the body is encoded as {encoding[:40]!r}", hint="send it as it is")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", hint="send less", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return body


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
