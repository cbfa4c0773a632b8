"""Several streams as one: everything arrives, the first error ends all, nothing stays open."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from semblend.engine.server.serving import MAX_UNREAD, merge


async def count(name, last, closed, *, fails=False):
    try:
        for number in range(last):
            await asyncio.sleep(0)
            yield f"{name}{number}"
        if fails:
            raise ValueError(name)
    finally:
        closed.append(name)


@pytest.mark.parametrize("streams", [0, 1, 3])
def test_every_item_comes_once_and_each_streams_order_is_kept(streams):
    closed: list[str] = []

    async def main():
        return [item async for item in merge([count(name, 4, closed) for name in "abc"[:streams]])]

    items = asyncio.run(main())
    for name in "abc"[:streams]:
        assert [item for item in items if item[0] == name] == [f"{name}{number}" for number in range(4)]
    assert len(items) == 4 * streams
    assert sorted(closed) == list("abc"[:streams])


@pytest.mark.parametrize("others", [0, 2])
def test_the_first_error_ends_all_and_closes_all(others):
    closed: list[str] = []

    async def main():
        streams = [count("x", 2, closed, fails=True), *(count(name, 10_000, closed) for name in "ab"[:others])]
        async with aclosing(merge(streams)) as merged:
            async for _ in merged:
                pass

    with pytest.raises(ValueError, match="x"):
        asyncio.run(main())
    assert sorted(closed) == sorted("x" + "ab"[:others])


@pytest.mark.parametrize("names", ["a", "abc"])
def test_who_leaves_early_closes_every_stream(names):
    closed: list[str] = []

    async def main():
        async with aclosing(merge([count(name, 10_000, closed) for name in names])) as merged:
            async for _ in merged:
                break
        assert sorted(closed) == list(names)

    asyncio.run(main())


def test_a_slow_reader_holds_the_streams_back():
    made = 0

    async def endless():
        nonlocal made
        while True:
            made += 1
            yield made

    async def main():
        async with aclosing(merge([endless(), endless()])) as merged:
            await anext(merged)
            for _ in range(4 * MAX_UNREAD):
                await asyncio.sleep(0)
        assert made <= MAX_UNREAD + 4

    asyncio.run(main())
