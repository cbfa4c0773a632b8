"""The embedded engine behind the server: one thread steps it, and every request is a stream that can be left."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from semblend.discover.donor import Donor
from semblend.engine.core.engine import Engine
from semblend.engine.core.sequence import QueueFull
from semblend.engine.core.threads import ThreadGovernor
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.engine.server.serving import merge
from semblend.errors import SemBlendError
from semblend.materialize.gate.thresholds import ChosenTable
from semblend.prompt import Namespace
from semblend.session.trial import Comparison
from semblend.text.token_budget import TokenBudget
from semblend.wire.answer import Chunk
from semblend.wire.errors import ApiError
from semblend.wire.request import Request

T = TypeVar("T")
log = logging.getLogger("semblend.engine")


class LocalEngine:
    """A `ServingEngine` around an `Engine` and its model's tokenizer; `start` it, and `close` it in the end.

    It owns the thread that calls `Engine.step`.
    """

    def __init__(
        self, engine: Engine, tokenizer: ModelTokenizer, *, model: str = "", gate: ChosenTable | None = None
    ) -> None:
        self.engine = engine
        self.model = model or engine.config.model_name or "semblend"
        self.gate = gate
        self._tokenizer = tokenizer
        self._wake = threading.Event()
        self._closing = False
        self._ended = False
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._loop, name="semblend-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every request, remove donor KV from disk, and close the store of donors.

        A step that is under way is finished first.
        """
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._ended = True  # also where it was never started
        self.engine.reuse.close()

    @property
    def max_context(self) -> int:
        return self.engine.max_length

    @property
    def vocab(self) -> int:
        return self.engine.model.spec.vocab

    @property
    def longest_token_chars(self) -> int:
        return self._tokenizer.longest_token_chars

    def namespace(self, tenant: str, salt: str) -> Namespace:
        return Namespace(tenant=tenant, model=self.model, salt=salt)

    def encode(self, text: str, *, control: bool = False, budget: TokenBudget | None = None) -> Sequence[int]:
        return self._tokenizer.encode(text, control=control, budget=budget)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, budget: TokenBudget | None = None) -> Sequence[int]:
        return self._tokenizer.encode_chat(messages, budget=budget)

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """The first answer runs ahead until it speaks; the others then find its prompt in the exact cache.

        Only the first answer's receipt is handed out: it says what the prompt took.
        """
        if request.opt_out:
            request = replace(request, quality="exact")  # then donors are not even looked for
        first, *others = answers = request.split_answers()
        try:
            stream = self.stream(first)
            opening = await anext(stream)
            yield opening
            streams = [] if opening.finish_reason is not None else [stream]
            async with aclosing(merge([*streams, *(self.stream(other) for other in others)])) as chunks:
                async for chunk in chunks:
                    yield replace(chunk, receipt=None, recomputed=()) if chunk.index else chunk
        finally:
            for answer in answers:
                self.cancel(answer.request_id)

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """One answer: submitted now, so that errors are raised here, and read chunk by chunk.

        Leaving the loop, or cancelling the task, cancels the request.
        """
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hand_over(chunk: Chunk) -> None:
            if not loop.is_closed():  # a loop that ended took its readers with it
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        try:
            self.engine.submit(request, hand_over)
        except QueueFull as error:
            # not the engine's own words: they count everybody's requests
            raise ApiError(429, "the queue is full", hint=error.hint, code="queue_full", retry_after_s=1) from None
        self._wake.set()
        return self._read(request.request_id, chunks)

    async def _read(self, request_id: str, chunks: asyncio.Queue[Chunk]) -> AsyncGenerator[Chunk, None]:
        ended = False
        try:
            while not ended:
                chunk = await chunks.get()
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            if not ended:  # the reader has gone
                self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Copies for several answers end with the stream that brought them."""
        self.engine.cancel(request_id)
        self._wake.set()

    def on_evicted(self, listener: Callable[[str], None]) -> None:
        self.engine.reuse.semblend.on_evicted(lambda eviction: listener(eviction.donor.donor_id))

    def donors(self) -> Sequence[Donor]:
        return self.engine.reuse.semblend.donors()

    def count_donors(self, tenant: str | None) -> tuple[int, int]:
        return self.engine.reuse.semblend.count_donors(tenant)

    def stats(self) -> Mapping[str, Any]:
        donor_kv = self.engine.reuse.donor_kv
        tiers = {} if donor_kv is None else {f"donor_{tier}_bytes": used for tier, used in donor_kv.used_bytes.items()}
        gate = {} if self.gate is None else {"quality_gate": self.gate.describe()}
        return asdict(self.engine.load) | tiers | gate

    def compare_reuse(self) -> Sequence[Comparison]:
        return tuple(self.engine.reuse.sessions.trial.compare().values())

    def reset(self) -> int:
        """Forget the prefix cache and all donors, in the engine's thread; the calling thread waits until it is done."""
        return self.call_soon(_forget_all).result()

    def call_soon(self, verb: Callable[[Engine], T]) -> Future[T]:
        """Run something in the engine's thread, between two steps: ``engine.call_soon(Engine.check).result()``."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(verb(self.engine))
            except BaseException as error:
                done.set_exception(error)

        with self._lock:  # what is appended here is run: the thread looks once more after it has set this
            if self._ended:
                raise SemBlendError("the engine is closed", hint="start a new one")
            self._calls.append(run)
        self._wake.set()
        return done

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        # made in this thread: torch counts threads for each caller
        governor = ThreadGovernor(torch.get_num_threads()) if self.engine.pool.device.type == "cpu" else None
        while not self._closing:
            self._wake.wait()
            self._wake.clear()
            self._run_calls()
            while self.engine.has_work and not self._closing:
                self._step()
                self._run_calls()
                if governor is not None:
                    governor.look()
        self.engine.close()
        if governor is not None:
            governor.close()
        with self._lock:
            self._ended = True
        self._run_calls()

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:  # a bug of ours: nobody may hang because of it
            log.exception("the engine's step failed; every request is ended")
            self.engine.abort(f"{type(error).__name__}: {error}")

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()


def _forget_all(engine: Engine) -> int:
    engine.reset_prefix_cache()
    return engine.reuse.forget_donors()
