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
from semblend.engine.server.limits import read_digits
from semblend.engine.server.service import ParsedBody, Service
from semblend.wire.answer import Chunk
from semblend.wire.body import SMALL_BODY_BYTES
from semblend.wire.chat import ChatRequest
from semblend.wire.completions import CompletionRequest
from semblend.wire.errors import ApiError
from semblend.wire.generate import GenerateRequest
from semblend.wire.json_limits import JsonMeter

CLIENT_LEFT = 499
LAST_WORDS_S = 5.0
METERED_BYTES = 64 * 1024
"""A body is measured in pieces of this size, at most some ms each; others have their turn in between."""


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
    asked = await parse_body(await read_body(request, service), endpoint, service.config.max_n)
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


async def read_body(request: Request, service: Service) -> bytearray:
    """The body, read no further and no longer than the configuration allows, and measured while it comes."""
    try:
        async with asyncio.timeout(service.config.body_timeout_s):
            return await _read(request, service.body_limit, JsonMeter(service.json_limits))
    except TimeoutError:
        raise ApiError(408, "the body did not come in time", hint="send it in one go", code="timeout") from None


async def _read(request: Request, limit: int, meter: JsonMeter) -> bytearray:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"the body is encoded as {encoding[:40]!r}", hint="send it as it is")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", hint="send less", code="body_too_large")
    if (read_digits(request.headers.get("content-length", "")) or 0) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > limit:
            raise too_large
        for start in range(0, len(part), METERED_BYTES):
            meter.feed(part[start : start + METERED_BYTES])
            await asyncio.sleep(0)
        body += part
    return body


async def parse_body(body: bytearray, endpoint: Endpoint, most_n: int) -> ParsedBody:
    """The request in a body. A long one is parsed in a thread: its text and ids take milliseconds to check."""
    if len(body) <= SMALL_BODY_BYTES:
        return endpoint.parse(body, most_n=most_n)
    return await asyncio.to_thread(endpoint.parse, body, most_n=most_n)


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())
