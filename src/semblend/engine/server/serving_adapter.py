"""The embedded engine behind the server's seam: translates, and does not think."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from semblend.discover.donor import Donor
from semblend.engine.core.async_engine import AsyncEngine
from semblend.engine.core.engine import Engine
from semblend.engine.core.sequence import QueueFull
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.engine.server.merge import merge
from semblend.materialize.gate.thresholds import ChosenTable
from semblend.prompt import Namespace
from semblend.text.token_budget import TokenBudget
from semblend.wire.answer import Chunk
from semblend.wire.errors import ApiError
from semblend.wire.request import Request


class LocalEngine:
    """A `ServingEngine` around an `Engine` and its model's tokenizer; `start` it, and `close` it in the end."""

    def __init__(
        self, engine: Engine, tokenizer: ModelTokenizer, *, model: str = "", gate: ChosenTable | None = None
    ) -> None:
        self.engine = AsyncEngine(engine)
        self.model = model or engine.config.model_name or "semblend"
        self._inner = engine
        self._tokenizer = tokenizer
        self.gate = gate

    def start(self) -> None:
        self.engine.start()

    def close(self) -> None:
        """End every request, remove donor KV from disk, and close the store of donors."""
        self.engine.close()
        self._inner.reuse.close()

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
            stream = self._stream(first)
            opening = await anext(stream)
            yield opening
            streams = [] if opening.finish_reason is not None else [stream]
            async with aclosing(merge([*streams, *(self._stream(other) for other in others)])) as chunks:
                async for chunk in chunks:
                    yield replace(chunk, receipt=None, recomputed=()) if chunk.index else chunk
        finally:
            for answer in answers:
                self.engine.cancel(answer.request_id)

    def cancel(self, request_id: str) -> None:
        """Copies for several answers end with the stream that brought them."""
        self.engine.cancel(request_id)

    def on_evicted(self, listener: Callable[[str], None]) -> None:
        library = self._inner.reuse.semblend
        if library is not None:
            library.on_evicted(lambda eviction: listener(eviction.donor.donor_id))

    def donors(self) -> Sequence[Donor]:
        library = self._inner.reuse.semblend
        return () if library is None else library.donors()

    def count_donors(self, tenant: str | None) -> tuple[int, int]:
        library = self._inner.reuse.semblend
        return (0, 0) if library is None else library.count_donors(tenant)

    def stats(self) -> Mapping[str, Any]:
        donor_kv = self._inner.reuse.donor_kv
        tiers = {} if donor_kv is None else {f"donor_{tier}_bytes": used for tier, used in donor_kv.used_bytes.items()}
        gate = {} if self.gate is None else {"quality_gate": self.gate.describe()}
        return asdict(self._inner.load) | tiers | gate

    def reset(self) -> int:
        """Forget the prefix cache and all donors, in the engine's thread; the calling thread waits until it is done."""
        return self.engine.call_soon(_forget_all).result()

    def _stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        try:
            return self.engine.stream(request)
        except QueueFull as error:
            # not the engine's own words: they count everybody's requests
            raise ApiError(429, "the queue is full", hint=error.hint, code="queue_full", retry_after_s=1) from None


def _forget_all(engine: Engine) -> int:
    engine.reset_prefix_cache()
    return engine.reuse.forget_donors()
