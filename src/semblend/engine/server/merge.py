"""Several streams as one: the answers to a prompt, and the prompts of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
MOST_UNREAD = 256
"""Items that are kept for a slow reader; then the streams wait for it."""


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
    items: asyncio.Queue[T | _End] = asyncio.Queue(MOST_UNREAD)
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
