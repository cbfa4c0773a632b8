"""The seam between the server and an engine: what one asks, what the other promises, and several streams as one.

The server knows nothing of tensors and the engine nothing of HTTP. In tests, `FakeEngine` (tests/fakes) stands on the
engine's side of this seam.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from semblend.discover.donor import Donor
from semblend.prompt import Namespace
from semblend.session.trial import Comparison
from semblend.text.token_budget import TokenBudget
from semblend.wire.answer import Chunk
from semblend.wire.request import Request

T = TypeVar("T")
MAX_UNREAD = 256
"""Items that are kept for a slow reader; then the streams wait for it."""


class ServingEngine(Protocol):
    """What `create_app` needs. Every method but `submit` may be called from any thread."""

    @property
    def model(self) -> str:
        """Name under which the model is served."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def vocab(self) -> int:
        """Token ids are below this."""

    @property
    def longest_token_chars(self) -> int:
        """Most characters of text that one token stands for. Longer texts than ``max_context`` times this are refused
        before they are tokenized."""

    def namespace(self, tenant: str, salt: str) -> Namespace:
        """The wall around this tenant's donors of this model."""

    def encode(self, text: str, *, control: bool = False, budget: TokenBudget | None = None) -> Sequence[int]:
        """Token ids of a plain text, with what the model wants in front of it.

        Text that spells a control token such as ``<|im_end|>`` becomes that token only with ``control``. A ``budget``
        raises `TooManyTokensError` for a longer text, and its check is called now and then: it raises to end the work.
        """

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, budget: TokenBudget | None = None) -> Sequence[int]:
        """Token ids of a conversation under the model's template, ready for the assistant to speak.

        Control tokens come from the template alone. The ``budget`` works as for `encode`.
        """

    def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """The answer, piece by piece: for each of the ``sampling.n`` answers one chunk has a finish reason, and by the
        last chunk of all the receipt has come. Closing the generator early gives up the request."""

    def cancel(self, request_id: str) -> None:
        """Stop a request and free all that it holds; nothing happens where it is unknown or done."""

    def on_evicted(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with the id of every donor that goes: the id of the request that it came from."""

    def donors(self) -> Sequence[Donor]:
        """All donors, least recently used first."""

    def count_donors(self, tenant: str | None) -> tuple[int, int]:
        """Donors and their tokens, of one tenant or, with None, of all. Cheap: pages ask for it again and again."""

    def stats(self) -> Mapping[str, Any]:
        """Flat numbers and words for people: blocks in use, running requests, bytes of donor KV."""

    def compare_reuse(self) -> Sequence[Comparison]:
        """First tokens with reuse and without, by kind of prompt, those of which enough is known."""

    def reset(self) -> int:
        """Forget the prefix cache and every donor; returns how many donors went."""


# -- the answers to a prompt, and the prompts of a request -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _End:
    """One stream has ended, with an error or without."""

    error: Exception | None = None


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all streams in the order in which they come; the first error ends all of them.

    However this ends, every stream is closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    items: asyncio.Queue[T | _End] = asyncio.Queue(MAX_UNREAD)
    tasks = [asyncio.create_task(_follow(stream, items)) for stream in streams]
    open_streams = len(tasks)
    try:
        while open_streams:
            got = await items.get()
            if not isinstance(got, _End):
                yield got
            elif got.error is not None:
                raise got.error
            else:
                open_streams -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(stream: AsyncGenerator[T, None], items: asyncio.Queue[T | _End]) -> None:
    end = _End()
    try:
        async with aclosing(stream):
            async for item in stream:
                await items.put(item)
    except Exception as error:  # raised again where the items are read
        end = _End(error)
    await items.put(end)
