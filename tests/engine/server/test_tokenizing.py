"""Texts become tokens in threads of their own: tenants take turns, what waits is bounded, who leaves is let go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")

from semblend.engine.server.admission import TokenizerPool
from semblend.wire.errors import ApiError

WAIT_S = 120.0


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 600))


class Doors:
    """Work that stops at a door until it is opened, and remembers who came in."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.open = threading.Event()
        self.stopped = threading.Event()

    def work(self, name: str) -> Callable[[Callable[[], None]], str]:
        def work(check: Callable[[], None]) -> str:
            self.entered.append(name)
            while not self.open.wait(0.01):
                try:
                    check()
                except Exception:
                    self.stopped.set()
                    raise
            return name

        return work

    async def wait_for(self, *names: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not set(names) <= set(self.entered):
                await asyncio.sleep(0.005)


def start(pool: TokenizerPool, doors: Doors, tenant: str, name: str, chars: int = 10) -> asyncio.Task[Any]:
    return asyncio.create_task(pool.run(tenant, chars, doors.work(name)))


def test_work_comes_back_with_its_result_or_its_error() -> None:
    async def test() -> None:
        pool = TokenizerPool(100)
        assert await pool.run("a", 3, lambda check: [1, 2, 3]) == [1, 2, 3]
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", 3, lambda check: 1 // 0)
        assert (pool.waiting, pool.chars) == (0, 0)

    run(test)


def test_tenants_take_turns_however_many_texts_one_has_in_line() -> None:
    async def test() -> None:
        pool, doors = TokenizerPool(1000), Doors()
        tasks = [start(pool, doors, "greedy", "g0")]
        await doors.wait_for("g0")
        tasks += [start(pool, doors, "greedy", f"g{n}") for n in range(1, 5)]
        tasks += [
            start(pool, doors, "victim", "v0"),
            start(pool, doors, "other", "o0"),
            start(pool, doors, "victim", "v1"),
        ]
        await asyncio.sleep(0)
        assert pool.waiting == 7
        doors.open.set()
        await asyncio.gather(*tasks)
        assert doors.entered == ["g0", "g1", "v0", "o0", "g2", "v1", "g3", "g4"]

    run(test)


def test_a_long_text_never_stands_in_front_of_a_short_one() -> None:
    async def test() -> None:
        pool, doors = TokenizerPool(10_000, short_chars=100), Doors()
        long = [start(pool, doors, "a", f"long {n}", chars=101) for n in range(3)]
        await doors.wait_for("long 0")
        assert await pool.run("a", 100, lambda check: "short") == "short"
        assert doors.entered == ["long 0"]
        doors.open.set()
        await asyncio.gather(*long)

    run(test)


def test_two_texts_are_in_work_at_most() -> None:
    async def test() -> None:
        pool, doors = TokenizerPool(10_000, short_chars=100), Doors()
        tasks = [start(pool, doors, f"t{n}", f"{n}", chars=10 + 200 * (n % 2)) for n in range(12)]
        await doors.wait_for("0", "1")
        await asyncio.sleep(0.05)
        assert sorted(doors.entered) == ["0", "1"]
        assert pool.waiting == 10
        doors.open.set()
        assert await asyncio.gather(*tasks) == [str(n) for n in range(12)]

    run(test)


def test_what_waits_is_bounded_and_a_tenant_that_holds_nothing_is_let_in() -> None:
    async def test() -> None:
        pool, doors = TokenizerPool(100, short_chars=1000), Doors()
        tasks = [start(pool, doors, "greedy", f"g{n}", chars=30) for n in range(3)]
        await doors.wait_for("g0")
        with pytest.raises(ApiError) as refused:
            await pool.run("greedy", 30, lambda check: None)
        assert refused.value.status == 429
        assert refused.value.headers()["Retry-After"] == "1"
        assert (pool.refused, pool.chars) == (1, 90)
        tasks.append(start(pool, doors, "victim", "v0", chars=45))
        await asyncio.sleep(0)
        assert pool.chars == 135
        tasks.append(start(pool, doors, "victim", "v1", chars=5))  # still its half of the room
        await asyncio.sleep(0)
        with pytest.raises(ApiError):
            await pool.run("victim", 5, lambda check: None)
        doors.open.set()
        await asyncio.gather(*tasks)
        assert pool.chars == 0
        await pool.run("greedy", 10**9, lambda check: None)  # one text alone is bounded by the context, not here

    run(test)


def test_work_for_a_client_that_left_stops_and_what_was_not_begun_is_dropped() -> None:
    async def test() -> None:
        pool, doors = TokenizerPool(1000), Doors()
        begun = start(pool, doors, "a", "begun")
        await doors.wait_for("begun")
        waiting, after = start(pool, doors, "a", "waiting"), start(pool, doors, "b", "after")
        await asyncio.sleep(0)
        assert (pool.waiting, pool.chars) == (2, 30)
        for task in (begun, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(doors.stopped.wait, WAIT_S)
        await doors.wait_for("after")
        doors.open.set()
        assert await after == "after"
        assert doors.entered == ["begun", "after"]
        assert (pool.abandoned, pool.chars, pool.waiting) == (2, 0, 0)

    run(test)


def test_a_pool_serves_another_event_loop_after_one_ended_in_the_middle() -> None:
    pool, doors = TokenizerPool(1000), Doors()

    async def leave() -> None:
        start(pool, doors, "a", "left behind")
        await doors.wait_for("left behind")

    async def come() -> None:
        assert await pool.run("a", 1, lambda check: 7) == 7

    run(leave)
    run(come)
    assert pool.chars == 0
