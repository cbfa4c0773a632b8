"""One request from its first byte to its last token: read, admit, tokenize, submit, answer, let go.

Whatever ends a request (an answer, an error, a client that hangs up, a timeout, the server's own end), its place
in the queue is given back and the engine is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from semblend.arrange.arranger import CHARS_PER_TOKEN
from semblend.engine.server.dashboard import LiveRequest
from semblend.engine.server.service import ArrangedChat, ParsedBody, Service, read_digits
from semblend.engine.server.serving import merge
from semblend.engine.server.tenants import Identity
from semblend.prompt import Prompt
from semblend.quality import EDIT_HEADER, read_base
from semblend.text.token_budget import TokenBudget, TooManyTokensError
from semblend.wire.answer import Answer, Chunk, FinishReason, Head, Spent
from semblend.wire.body import SMALL_BODY_BYTES
from semblend.wire.chat import ChatReply, ChatRequest
from semblend.wire.completions import CompletionReply, CompletionRequest
from semblend.wire.errors import ApiError, as_api_error
from semblend.wire.generate import GenerateReply, GenerateRequest
from semblend.wire.json_limits import JsonMeter
from semblend.wire.request import Request

log = logging.getLogger("semblend.server")
T = TypeVar("T")
Reply = ChatReply | CompletionReply | GenerateReply
CLIENT_LEFT = 499
LAST_WORDS_S = 5.0
TEMPLATE_CHARS = 32  # <|im_start|>user and <|im_end|>, about
METERED_BYTES = 64 * 1024
"""A body is measured in pieces of this size, at most some ms each; others have their turn in between."""
_SEE_LOG = "the server's log has the reason; try again"


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


async def answer(service: Service, request: HttpRequest, endpoint: Endpoint) -> Response:
    """The whole answer, or a stream of it. Raises `ApiError` for what ends before the first token."""
    identity = service.identify(request)
    asked = await parse_body(await read_body(request, service), endpoint, service.config.max_n)
    service.check(asked)
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


async def read_body(request: HttpRequest, service: Service) -> bytearray:
    """The body, read no further and no longer than the configuration allows, and measured while it comes."""
    try:
        async with asyncio.timeout(service.config.body_timeout_s):
            return await _read(request, service.body_limit, JsonMeter(service.json_limits))
    except TimeoutError:
        raise ApiError(408, "the body did not come in time", hint="send it in one go", code="timeout") from None


async def _read(request: HttpRequest, limit: int, meter: JsonMeter) -> bytearray:
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


# -- between the queue and the engine --------------------------------------------------------------------------------


class Call:
    """One request on its way through the server."""

    def __init__(
        self, service: Service, request: HttpRequest, asked: ParsedBody, identity: Identity, path: str, id: str
    ) -> None:
        self.id = id
        self.asked = asked
        self.started = time.perf_counter()
        self._service = service
        self._request = request
        self._identity = identity
        self._created = int(time.time())
        self._entry = LiveRequest(id, identity.tenant, path, asked.reuse.quality)
        self._gone: asyncio.Task[None] | None = None
        self._arranged = ArrangedChat(asked) if isinstance(asked, ChatRequest) else None

    @asynccontextmanager
    async def admit(self, gone: asyncio.Task[None] | None = None) -> AsyncIterator[AsyncIterator[Chunk]]:
        """A place in the queue and the engine's chunks; both are given back however the block ends.

        ``gone`` ends when the client hangs up; who watches for that already hands it over and ends it.
        """
        service, entry = self._service, self._service.board.open(self._entry)
        self._gone = gone or asyncio.create_task(wait_until_gone(self._request.receive))
        tenant, expected, inside = self._identity.tenant, self._estimate_tokens(), False
        try:
            await self.run_unless_gone(service.admission.enter(tenant, expected))
            inside = True
            request = await self._prepare()
            service.admission.charge(tenant, len(request.prompt) - expected)
            service.board.admit(entry, len(request.prompt))
            async with aclosing(self._chunks(request)) as chunks:
                yield chunks
            service.board.close(entry, "done")
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            service.board.close(entry, "cancelled")
            raise
        except Exception as error:
            told = as_api_error(error)
            service.board.close(entry, "failed" if inside else "refused", str(told))
            if told.status >= 500 and not isinstance(error, ApiError):
                log.exception("request %s failed", self.id)
            raise told from error
        finally:
            if gone is None:
                self._gone.cancel()
            service.engine.cancel(self.id)
            if inside:
                service.admission.charge(tenant, entry.output_tokens)
                service.admission.leave(tenant)

    def _estimate_tokens(self) -> int:
        """Tokens of the prompt, before it is tokenized; the queue is told the truth afterwards."""
        ids = sum(len(prompt) for prompt in self.asked.prompts if not isinstance(prompt, str))
        return ids or 1 + sum(self._service.count_chars(self.asked)) // CHARS_PER_TOKEN

    async def _chunks(self, request: Request) -> AsyncGenerator[Chunk, None]:
        unfinished = set(range(self.asked.sampling.n))
        if self._arranged is not None:
            self._service.arranging.record(self.id, self._arranged.sent)
        async with aclosing(self._service.engine.submit(request)) as pieces:
            while (chunk := await self.run_unless_gone(_read_next(pieces))) is not None:
                if chunk.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                    log.error("the engine failed on request %s: %s %s", self.id, chunk.finish_reason, chunk.detail)
                    raise ApiError(500, "the engine failed on this request", hint=_SEE_LOG)
                if chunk.finish_reason is not None:
                    unfinished.discard(chunk.index)
                self._service.board.record_chunk(self._entry, chunk)
                yield chunk
        if unfinished:
            raise ApiError(500, "the engine ended before the answer did", hint="try again")

    async def _prepare(self) -> Request:
        asked, engine = self.asked, self._service.engine
        token_ids = await self._tokenize()
        if not isinstance(token_ids, tuple):
            token_ids = tuple(token_ids)
        prompt = Prompt(token_ids, namespace=engine.namespace(self._identity.tenant, asked.reuse.salt))
        limit = self._limit_output(len(prompt))
        return Request(
            self.id,
            prompt,
            replace(asked.sampling, max_tokens=limit),
            quality=asked.reuse.quality,
            opt_out=not asked.reuse.reuse,
            base=asked.reuse.base or read_base({"base": self._request.headers.get(EDIT_HEADER)}),
        )

    async def _tokenize(self) -> Sequence[int]:
        """The prompt's tokens. Text goes to the tokenizer's threads, and no further once it cannot fit."""
        asked, service = self.asked, self._service
        if not isinstance(asked, ChatRequest) and not isinstance(asked.prompt, str):
            return asked.prompt
        # A thousand empty messages are work, too: the template's.
        template = TEMPLATE_CHARS * len(asked.messages) if isinstance(asked, ChatRequest) else 0
        chars = sum(service.count_chars(asked)) + template
        try:
            return await self.run_unless_gone(service.tokenizing.run(self._identity.tenant, chars, self._encode))
        except TooManyTokensError as error:
            problem, param = f"{asked.text_field}: {error.message}", asked.text_field
            raise ApiError(400, problem, hint=error.hint, param=param, code="context_length_exceeded") from None

    def _encode(self, check: Callable[[], None]) -> Sequence[int]:
        asked, engine = self.asked, self._service.engine
        budget = TokenBudget(engine.max_context, check)
        if isinstance(asked, ChatRequest):
            namespace = engine.namespace(self._identity.tenant, asked.reuse.salt)
            self._arranged = self._service.arranging.arrange(asked, namespace)
            return engine.encode_chat(self._arranged.asked.messages, budget=budget)
        assert isinstance(asked.prompt, str)
        return engine.encode(asked.prompt, control=self._identity.trusted, budget=budget)

    def _limit_output(self, prompt_tokens: int) -> int:
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
                param=self.asked.text_field,
                code="context_length_exceeded",
            )
        return min(room, self._service.config.default_output_tokens) if wanted is None else wanted

    async def run_unless_gone(self, work: Awaitable[T]) -> T:
        """The work's result, unless the client hangs up or the time is over first; then the work is stopped."""
        assert self._gone is not None
        if self._gone.done():  # work that is always done at once would never let us look
            if asyncio.iscoroutine(work):
                work.close()
            raise ClientDisconnect
        left = self._service.config.request_timeout_s - (time.perf_counter() - self.started)
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

    def make_reply(self, id: str = "") -> Reply:
        asked, logprobs = self.asked, self.asked.sampling.logprobs is not None
        head = Head(id or self.id, self._created, self._service.engine.model)
        if isinstance(asked, ChatRequest):
            return ChatReply(head, logprobs, asked.include_usage)
        if isinstance(asked, CompletionRequest):
            return CompletionReply(head, logprobs, asked.include_usage)
        head = replace(head, id=asked.rid or head.id)
        return GenerateReply(head, self._entry.prompt_tokens, logprobs, self._identity.admin)

    def make_answers(self) -> list[Answer]:
        """Empty ones, to be filled by the chunks."""
        return [Answer(index) for index in range(self.asked.sampling.n)]

    def add_up(self, answers: Sequence[Answer]) -> Spent:
        output, entry = sum(len(answer.token_ids) for answer in answers), self._entry
        return Spent(
            entry.prompt_tokens,
            output,
            entry.receipt,
            time.perf_counter() - self.started,
            recomputed=entry.recomputed,
            operator=self._identity.admin,
            arranged=self._arranged.groups if self._arranged is not None else (),
        )


class CallGroup:
    """Several prompts in one request: a call for each, with a place of its own, and one answer for all.

    The answers to prompt i have the indices from ``i * n`` on. The first call that fails ends all of them.
    """

    def __init__(self, id: str, calls: Sequence[Call], receive: Receive) -> None:
        self.id = id
        self._calls = calls
        self._receive = receive

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[AsyncIterator[Chunk]]:
        gone = asyncio.create_task(wait_until_gone(self._receive))
        try:
            async with aclosing(merge([self._follow(number, gone) for number in range(len(self._calls))])) as chunks:
                yield chunks
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _follow(self, number: int, gone: asyncio.Task[None]) -> AsyncGenerator[Chunk, None]:
        call = self._calls[number]
        async with call.admit(gone) as chunks:
            async for chunk in chunks:
                yield replace(chunk, index=number * call.asked.sampling.n + chunk.index)

    async def run_unless_gone(self, work: Awaitable[T]) -> T:
        return await self._calls[0].run_unless_gone(work)

    def make_reply(self) -> Reply:
        return self._calls[0].make_reply(self.id)

    def make_answers(self) -> list[Answer]:
        return [Answer(index) for index in range(len(self._calls) * self._calls[0].asked.sampling.n)]

    def add_up(self, answers: Sequence[Answer]) -> Spent:
        n = self._calls[0].asked.sampling.n
        return Spent.add_up([call.add_up(answers[i * n : (i + 1) * n]) for i, call in enumerate(self._calls)])


async def _read_next(pieces: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(pieces, None)


async def wait_until_gone(receive: Receive) -> None:
    """Wait until the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
