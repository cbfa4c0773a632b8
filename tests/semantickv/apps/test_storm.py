"""Many clients at once, some of whom leave, over engines of which some fail: each gets its own answer or none."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest
from asgi_client import AsgiClient

from semantickv.apps.build import build_router
from semantickv.settings import EdgeSettings
from tests.fakes.scripted_engine import EngineSide, ScriptedEngine

CHAT = "/v1/chat/completions"


async def echo(side: EngineSide) -> None:
    """Stream the request's own number back, five times; fail now and then, in every way."""
    number = json.loads(side.request.body)["number"]
    fate = number % 23
    if fate == 1:
        side.writer.transport.abort()
        return
    if fate == 2:
        await side.say(b"\x00garbage\r\n\r\n")
        side.writer.close()
        return
    await side.begin_stream()
    for at in range(5):
        if fate == 3 and at == 2:
            side.writer.close()
            return
        await side.send_chunk(f"<{number}>".encode())
        await asyncio.sleep(0)
    await side.send_chunk(b"")


async def send_one(app, number: int, seen: Counter[str]) -> None:
    body = json.dumps(
        {"model": "m", "number": number, "messages": [{"role": "user", "content": f"Q{number}"}]}
    ).encode()
    leaves = random.Random(number).random() < 0.3
    async with AsgiClient(app, "POST", CHAT, body=body, headers={"Authorization": f"Bearer {number % 7}"}) as client:
        if leaves and number % 2:
            client.leave()
        status = await client.start()
        if status != 200:
            seen[f"status {status}"] += 1
            return
        if leaves:
            client.leave()
        got = (await client.finish()).decode()
        assert got == f"<{number}>" * got.count("<"), f"client {number} got {got!r}"
        assert client.is_whole <= (got.count("<") == 5)
        seen["whole" if client.is_whole else "left" if leaves else "cut"] += 1


async def storm(clients: int, at_once: int) -> None:
    engines = [ScriptedEngine(default=echo) for _ in range(3)]
    for engine in engines:
        await engine.start()
    app = build_router(EdgeSettings(replicas=tuple(one.url for one in engines), trace=False))
    seen: Counter[str] = Counter()
    places = asyncio.Semaphore(at_once)

    async def take_turn(number: int) -> None:
        async with places:
            await send_one(app, number, seen)

    await asyncio.gather(*map(take_turn, range(clients)))
    assert sum(seen.values()) == clients
    assert seen["whole"] > clients / 3
    assert app.intake.running == app.intake.held_bytes == 0
    assert all(one.running == one.waiting_tokens == one.pool.open == 0 for one in app.router.replicas)
    counted = app.metrics.write().decode()
    total = sum(
        float(line.rpartition(" ")[2]) for line in counted.splitlines() if line.startswith("semantickv_requests_total{")
    )
    assert total == clients  # every request is accounted for
    for engine in engines:
        await engine.stop()


def test_in_a_storm_everyone_gets_their_own_answer_or_none():
    asyncio.run(asyncio.wait_for(storm(150, at_once=50), 600))


@pytest.mark.slow
def test_a_thousand_streams_are_held_at_once():
    async def test():
        gate = asyncio.Event()

        async def hold(side: EngineSide) -> None:
            number = json.loads(side.request.body)["number"]
            await side.begin_stream()
            await side.send_chunk(f"<{number}".encode())
            await gate.wait()
            await side.send_chunk(f"{number}>".encode())
            await side.send_chunk(b"")

        async with ScriptedEngine(default=hold) as engine:
            patient = EdgeSettings(replicas=(engine.url,), trace=False, connect_timeout_s=300)  # a thousand at once
            app = build_router(patient)
            clients = []
            for number in range(1000):
                body = json.dumps({"number": number}).encode()
                clients.append(await AsgiClient(app, "POST", CHAT, body=body).__aenter__())
            for client in clients:
                assert await client.start() == 200
                assert (await client.read()).startswith(b"<")
            assert app.intake.running == 1000
            gate.set()
            for number, client in enumerate(clients):
                assert await client.finish() == f"{number}>".encode()
                assert client.is_whole
            assert app.intake.running == 0

    asyncio.run(asyncio.wait_for(test(), 600))


@pytest.mark.slow
def test_thousands_of_clients_come_and_many_leave():
    asyncio.run(asyncio.wait_for(storm(3000, at_once=200), 900))
