"""The engine for asyncio: one thread steps it, and every request is a stream that can be left at any moment."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

import torch

from semblend.engine.core.engine import Engine
from semblend.engine.core.sequence import Completion
from semblend.engine.core.threads import ThreadGovernor
from semblend.errors import SemBlendError
from semblend.wire.answer import Chunk
from semblend.wire.request import Request

T = TypeVar("T")
log = logging.getLogger("semblend.engine")


class AsyncEngine:
    """Owns the thread that calls `Engine.step`. Use it as an async context manager, or call `start` and `close`.

    ``async for chunk in engine.stream(request)``; leaving the loop, or cancelling the task, cancels the request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Event()
        self._closing = False
        self._ended = False
        self._lock = threading.Lock()
        self._governor: ThreadGovernor | None = None  # made in the engine's thread: threads are set for each caller
        self._calls: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._loop, name="semblend-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every request and the thread. A step that is under way is finished first."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._ended = True  # also where it was never started

    def submit(self, request: Request, listener: Callable[[Chunk], None]) -> None:
        """Queue a request; ``listener`` is called in the running event loop with each chunk."""
        loop = asyncio.get_running_loop()
        self.engine.submit(request, lambda chunk: _hand_over(loop, listener, chunk))
        self._wake.set()

    def cancel(self, request_id: str) -> bool:
        """End a request; False where it is not under way."""
        known = self.engine.cancel(request_id)
        self._wake.set()
        return known

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Submit now (errors are raised here, not in the loop) and iterate over the chunks as they come."""
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self.submit(request, chunks.put_nowait)
        return self._chunks(request.request_id, chunks)

    async def complete(self, request: Request) -> Completion:
        """The whole answer at once."""
        return Completion.of([chunk async for chunk in self.stream(request)])

    async def call(self, verb: Callable[[Engine], T]) -> T:
        """Run something in the engine's thread, between two steps: ``await engine.call(Engine.check)``."""
        return await asyncio.wrap_future(self.call_soon(verb))

    def call_soon(self, verb: Callable[[Engine], T]) -> Future[T]:
        """`call` for threads without an event loop."""
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

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _chunks(self, request_id: str, chunks: asyncio.Queue[Chunk]) -> AsyncGenerator[Chunk, None]:
        ended = False
        try:
            while not ended:
                chunk = await chunks.get()
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            if not ended:  # the reader has gone
                self.cancel(request_id)

    def _loop(self) -> None:
        if self.engine.pool.device.type == "cpu":
            self._governor = ThreadGovernor(torch.get_num_threads())
        while not self._closing:
            self._wake.wait()
            self._wake.clear()
            self._run_calls()
            while self.engine.has_work and not self._closing:
                self._step()
                self._run_calls()
                if self._governor is not None:
                    self._governor.look()
        self.engine.close()
        if self._governor is not None:
            self._governor.close()
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


def _hand_over(loop: asyncio.AbstractEventLoop, listener: Callable[[Chunk], None], chunk: Chunk) -> None:
    if not loop.is_closed():  # a loop that ended took its readers with it
        loop.call_soon_threadsafe(listener, chunk)
