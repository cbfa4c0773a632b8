"""The embedded engine behind the server's seam: translates, and does not think."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from semblend.discover.donor import Donor
from semblend.engine.core.async_engine import AsyncEngine
from semblend.engine.core.engine import Engine
from semblend.engine.core.request import Chunk as EngineChunk
from semblend.engine.core.request import FinishReason, QueueFull, Request
from semblend.engine.model.sampling import Logprobs, Sampling
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.engine.server.serving import ServingRequest
from semblend.errors import SemBlendError
from semblend.prompt import Namespace
from semblend.wire.answer import Chunk, Logprob
from semblend.wire.errors import ApiError


class LocalEngine:
    """A `ServingEngine` around an `Engine` and its model's tokenizer; `start` it, and `close` it in the end."""

    def __init__(self, engine: Engine, tokenizer: ModelTokenizer, *, model: str = "") -> None:
        self.engine = AsyncEngine(engine)
        self.model = model or engine.config.model_name or "semblend"
        self._inner = engine
        self._tokenizer = tokenizer

    def start(self) -> None:
        self.engine.start()

    def close(self) -> None:
        self.engine.close()

    @property
    def max_context(self) -> int:
        return self._inner.max_length

    @property
    def vocab(self) -> int:
        return self._inner.model.spec.vocab

    @property
    def longest_token_chars(self) -> int:
        return self._tokenizer.longest_token_chars

    def namespace(self, tenant: str, salt: str) -> Namespace:
        return Namespace(tenant=tenant, model=self.model, salt=salt)

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        return self._tokenizer.encode_chat(messages)

    async def submit(self, request: ServingRequest) -> AsyncIterator[Chunk]:
        """The first answer runs ahead until it speaks; the others then find its prompt in the exact cache."""
        copies = _request(request).copies(request.sampling.n)
        first = self._stream(copies[0])
        pump: _Pump = _Pump()
        try:
            opening = await anext(first)
            yield self._translated(0, opening)
            if opening.finish is None:
                pump.follow(0, first)
            for index, copy in enumerate(copies[1:], start=1):
                pump.follow(index, self._stream(copy))
            async for index, chunk in pump:
                yield self._translated(index, chunk)
        finally:
            await pump.stop()
            for copy in copies:
                self.engine.cancel(copy.request_id)

    def cancel(self, request_id: str) -> None:
        """Copies for several answers end with the stream that brought them."""
        self.engine.cancel(request_id)

    def donors(self) -> Sequence[Donor]:
        library = self._inner.reuse.semblend
        return () if library is None else library.donors()

    def stats(self) -> Mapping[str, Any]:
        donor_kv = self._inner.reuse.donor_kv
        tiers = {} if donor_kv is None else {f"donor_{tier}_bytes": used for tier, used in donor_kv.used_bytes.items()}
        return asdict(self._inner.load) | tiers

    def reset(self) -> int:
        """In the engine's thread, between two steps; the caller's own thread waits, in an event loop or not."""
        with ThreadPoolExecutor(1) as beside:
            return beside.submit(asyncio.run, self.engine.call(_forget_all)).result()

    def _stream(self, request: Request) -> AsyncIterator[EngineChunk]:
        try:
            return self.engine.stream(request)
        except QueueFull as error:
            raise ApiError(429, error.message, hint=error.hint, code="queue_full", retry_after_s=1) from None

    def _translated(self, index: int, chunk: EngineChunk) -> Chunk:
        if chunk.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise SemBlendError("the engine failed on this request", hint="the server's log has the reason; try again")
        tokens = () if chunk.token is None else (chunk.token,)
        logprobs = (
            () if chunk.logprobs is None or chunk.token is None else (self._logprob(chunk.token, chunk.logprobs),)
        )
        return Chunk(
            index=index,
            text=chunk.text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=None if chunk.finish is None else str(chunk.finish),
            matched=chunk.matched,
            receipt=chunk.receipt if index == 0 else None,
            recomputed=chunk.recomputed if index == 0 else (),
        )

    def _logprob(self, token: int, found: Logprobs) -> Logprob:
        text = self._tokenizer.token_text
        top = tuple(Logprob(text(other), other, value) for other, value in found.top)
        return Logprob(text(token), token, found.chosen, top)


class _Pump:
    """Several answers as one stream, in the order in which their chunks come."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, EngineChunk | None, Exception | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def follow(self, index: int, chunks: AsyncIterator[EngineChunk]) -> None:
        self._tasks.append(asyncio.create_task(self._run(index, chunks)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[tuple[int, EngineChunk]]:
        ended = 0
        while ended < len(self._tasks):
            index, chunk, error = await self._queue.get()
            if error is not None:
                raise error
            if chunk is None:
                ended += 1
            else:
                yield index, chunk

    async def _run(self, index: int, chunks: AsyncIterator[EngineChunk]) -> None:
        failure: Exception | None = None
        try:
            async for chunk in chunks:
                self._queue.put_nowait((index, chunk, None))
        except Exception as error:  # handed to whoever reads
            failure = error
        self._queue.put_nowait((index, None, failure))


def _forget_all(engine: Engine) -> int:
    engine.reset_prefix_cache()
    return engine.reuse.forget_donors()


def _request(request: ServingRequest) -> Request:
    wanted = request.sampling
    return Request(
        request.request_id,
        request.prompt,
        Sampling(
            max_tokens=wanted.max_tokens or 1,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty,
            frequency_penalty=wanted.frequency_penalty,
            presence_penalty=wanted.presence_penalty,
            logit_bias=wanted.logit_bias,
            seed=wanted.seed,
            logprobs=wanted.logprobs,
            ignore_eos=wanted.ignore_eos,
        ),
        stop=wanted.stop,
        stop_ids=wanted.stop_token_ids,
        quality=request.quality if request.reuse else "exact",
        opt_out=not request.reuse,
    )
