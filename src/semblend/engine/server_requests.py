"""One request from its first byte to its last token: read, admit, tokenize, submit, answer, let go.

Whatever ends a request (an answer, an error, a client that hangs up, a timeout, the server's own end), its place
at the gate is given back and the engine is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from semblend.engine.limits import Gate, ServerSettings, refuse_foreign_page
from semblend.engine.live import Entry, LiveBoard
from semblend.engine.serving import ServingEngine, ServingRequest
from semblend.engine.tenants import Identity, bearer
from semblend.prompt import Prompt
from semblend.wire.answer import Answer, Chunk, Head, Reply, Spent
from semblend.wire.chat import ChatReply, ChatRequest
from semblend.wire.completions import CompletionReply, CompletionRequest
from semblend.wire.errors import ApiError, as_api_error
from semblend.wire.generate import GenerateReply, GenerateRequest

log = logging.getLogger("semblend.server")
T = TypeVar("T")
Asked = ChatRequest | CompletionRequest | GenerateRequest
CLIENT_LEFT = 499
LAST_WORDS_S = 5.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path, how its body is read, and what its ids begin with."""

    path: str
    parse: Callable[..., Asked]
    prefix: str


ENDPOINTS = (
    Endpoint("/v1/chat/completions", ChatRequest.parse, "chatcmpl-"),
    Endpoint("/v1/completions", CompletionRequest.parse, "cmpl-"),
    Endpoint("/generate", GenerateRequest.parse, "gen-"),
)


@dataclass(slots=True)
class Service:
    """What all requests share."""

    engine: ServingEngine
    settings: ServerSettings
    gate: Gate
    board: LiveBoard = field(default_factory=LiveBoard)

    def identify(self, request: Request) -> Identity:
        headers = request.headers
        refuse_foreign_page(headers.get("host", ""), headers.get("origin"), self.settings)
        return self.settings.tenants.identify(
            bearer(headers.get("authorization"), headers.get("x-api-key")),
            address=request.client.host if request.client else "",
            claimed=headers.get("x-tenant-id"),
        )

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """The whole answer, or a stream of it. Raises `ApiError` for what ends before the first token."""
        identity = self.identify(request)
        asked = endpoint.parse(await read_json(request, self.settings), most_n=self.settings.max_n)
        self.check_model(asked.model)
        # Ids are ours, never the caller's: they name donors, and one tenant must not replace another's.
        call = Call(self, request, asked, identity, endpoint, f"{endpoint.prefix}{uuid.uuid4().hex}")
        if asked.stream:
            return EventStream(call)
        async with call.admitted() as chunks:
            answers = _answers(asked.sampling.n)
            async for chunk in chunks:
                answers[chunk.index].add(chunk)
            body = call.reply().whole(answers, call.spent(answers))
        return JSONResponse(body, headers={"X-Request-ID": call.id})

    def check_model(self, model: str) -> None:
        names = (self.engine.model, *self.settings.aliases)
        if model and model not in names:
            raise ApiError(
                404,
                f"no model {model[:200]!r} here",
                hint="ask for " + " or ".join(repr(name) for name in names),
                param="model",
                code="model_not_found",
            )


class Call:
    """One request on its way through the server."""

    def __init__(
        self, service: Service, request: Request, asked: Asked, identity: Identity, endpoint: Endpoint, id: str
    ) -> None:
        self.id = id
        self.asked = asked
        self.started = time.perf_counter()
        self._service = service
        self._request = request
        self._identity = identity
        self._created = int(time.time())
        self._entry = Entry(id, identity.tenant, endpoint.path, asked.reuse.quality)
        self._gone: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[AsyncIterator[Chunk]]:
        """A place at the gate and the engine's chunks; both are given back however the block ends."""
        service, entry = self._service, self._service.board.opened(self._entry)
        self._gone = asyncio.create_task(_until_gone(self._request.receive))
        inside = False
        try:
            await self.unless_gone(service.gate.enter())
            inside = True
            request = await self._prepared()
            service.board.admitted(entry, len(request.prompt))
            async with aclosing(self._chunks(request)) as chunks:
                yield chunks
            service.board.closed(entry, "done")
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            service.board.closed(entry, "cancelled")
            raise
        except Exception as error:
            told = as_api_error(error)
            service.board.closed(entry, "failed", str(told))
            if told.status >= 500 and not isinstance(error, ApiError):
                log.exception("request %s failed", self.id)
            raise told from error
        finally:
            self._gone.cancel()
            service.engine.cancel(self.id)
            if inside:
                service.gate.leave()

    async def _chunks(self, request: ServingRequest) -> AsyncGenerator[Chunk, None]:
        pieces = self._service.engine.submit(request)
        unfinished = set(range(self.asked.sampling.n))
        try:
            while (chunk := await self.unless_gone(_next(pieces))) is not None:
                if chunk.finish_reason not in (None, "stop", "length"):
                    raise ApiError(500, f"the engine ended the answer: {chunk.finish_reason}", hint="try again")
                if chunk.finish_reason is not None:
                    unfinished.discard(chunk.index)
                self._service.board.heard(self._entry, chunk)
                yield chunk
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()
        if unfinished:
            raise ApiError(500, "the engine ended before the answer did", hint="try again")

    async def _prepared(self) -> ServingRequest:
        asked, engine = self.asked, self._service.engine
        token_ids = await self.unless_gone(asyncio.to_thread(self._token_ids))
        if not isinstance(token_ids, tuple):
            token_ids = tuple(token_ids)
        prompt = Prompt(token_ids, namespace=engine.namespace(self._identity.tenant, asked.reuse.salt))
        limit = self._output_limit(len(prompt))
        return ServingRequest(
            request_id=self.id,
            prompt=prompt,
            sampling=replace(asked.sampling, max_tokens=limit),
            quality=asked.reuse.quality,
            reuse=asked.reuse.reuse,
        )

    def _token_ids(self) -> Sequence[int]:
        """In a thread: a long text takes a tokenizer longer than other requests should wait."""
        asked, engine = self.asked, self._service.engine
        if isinstance(asked, ChatRequest):
            return engine.encode_chat(asked.messages)
        if isinstance(asked.prompt, str):
            return engine.encode(asked.prompt)
        highest = max(asked.prompt)
        if highest >= engine.vocab:
            raise ApiError(400, f"token id {highest} is not in the vocabulary", hint=f"ids are below {engine.vocab}")
        return asked.prompt

    def _output_limit(self, prompt_tokens: int) -> int:
        room = self._service.engine.max_context - prompt_tokens
        wanted = self.asked.sampling.max_tokens
        if prompt_tokens == 0:
            raise ApiError(400, "the prompt has no tokens", hint="send some text")
        if room < 1 or (wanted or 1) > room:
            asked = f"{prompt_tokens} tokens of prompt and {wanted or 1} of answer"
            raise ApiError(
                400,
                f"{asked} are more than the context of {self._service.engine.max_context}",
                hint=f"ask for at most {room} tokens" if room > 0 else "send a shorter prompt",
                param="messages" if isinstance(self.asked, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        return min(room, self._service.settings.default_output_tokens) if wanted is None else wanted

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """The work's result, unless the client hangs up or the time is over first; then the work is stopped."""
        assert self._gone is not None
        left = self._service.settings.request_timeout_s - (time.perf_counter() - self.started)
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._gone.done():
                raise ClientDisconnect
            raise ApiError(504, "the request took too long", hint="ask for fewer tokens", code="timeout")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def reply(self) -> Reply:
        asked, logprobs = self.asked, self.asked.sampling.logprobs is not None
        head = Head(self.id, self._created, self._service.engine.model)
        if isinstance(asked, ChatRequest):
            return ChatReply(head, logprobs, asked.include_usage)
        if isinstance(asked, CompletionRequest):
            return CompletionReply(head, logprobs, asked.include_usage)
        return GenerateReply(replace(head, id=asked.rid or head.id), self._entry.prompt_tokens, logprobs)

    def spent(self, answers: Sequence[Answer]) -> Spent:
        output = sum(len(answer.token_ids) for answer in answers)
        return Spent(self._entry.prompt_tokens, output, self._entry.receipt, time.perf_counter() - self.started)


class EventStream(Response):
    """Server-sent events. The first token decides the status, so that an early failure is a plain error answer."""

    def __init__(self, call: Call) -> None:
        super().__init__(media_type="text/event-stream")
        self._call = call
        self._open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._call.admitted() as chunks:
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
        answers = _answers(call.asked.sampling.n)
        async for chunk in chunks:
            if reply is None:
                reply = call.reply()
                await self._begin(send)
                await self._tell(send, reply.opening(len(answers)))
            answers[chunk.index].add(chunk)
            if chunk.text or chunk.token_ids:
                await self._tell(send, [reply.piece(chunk, answers[chunk.index])])
        if reply is not None:
            await self._tell(send, reply.closing(answers, call.spent(answers)))

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
            await self._call.unless_gone(send(_event_message(events)))


def _event_message(events: Sequence[Any]) -> Message:
    text = "".join(f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def read_json(request: Request, settings: ServerSettings) -> Any:
    """The body as JSON, read no further and no longer than the settings allow."""
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, "the body did not come in time", hint="send it in one go", code="timeout") from None
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}", hint="send a JSON object in UTF-8") from None


async def _read(request: Request, limit: int) -> bytearray:
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


def _answers(n: int) -> list[Answer]:
    return [Answer(index) for index in range(n)]


async def _next(pieces: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(pieces, None)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
