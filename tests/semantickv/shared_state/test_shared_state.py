"""Several routers over one real Redis: they share what they know, go on without it, and meet again."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from asgi_client import ask
from hypothesis import given
from hypothesis import strategies as st
from redis_server import RedisServer

from semantickv.apps.build import build_router
from semantickv.apps.gateway import Gateway
from semantickv.routing.fingerprint import cut_prompt
from semantickv.routing.prompt_view import read_prompt
from semantickv.settings import EdgeSettings
from semantickv.shared_state.messages import (
    Failing,
    Hello,
    Known,
    Load,
    Ordered,
    Placed,
    name_replica,
    read_messages,
    write_messages,
)
from semantickv.shared_state.sync import LOAD_LIFE_S, MOST_OUTGOING, SNAPSHOT_PAUSE_S, RouterSync
from semblend.errors import ConfigError
from tests.fakes.scripted_engine import ScriptedEngine, answer_json, hang

CHAT = "/v1/chat/completions"
KEY = "a secret of all routers"


def write_document(name: str) -> str:
    return " ".join(f"Clause {n} of {name}: pay {n * 37 % 1000} coins on day {n * 13 % 31}." for n in range(200))


def chat(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


def run(test: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


async def wait_until(is_so: Any) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def routers(url: str, count: int = 2, engines: int = 3, **settings: Any):
    """So many routers over the same engines, each with its link running."""
    async with AsyncExitStack() as stack:
        fleet = []
        for number in range(engines):
            engine = await stack.enter_async_context(ScriptedEngine())
            engine.default = answer_json({"served_by": number})
            fleet.append(engine)
        apps, tasks = [], []
        for at in range(count):
            urls = [one.url for one in fleet]
            given = EdgeSettings(
                replicas=tuple(urls[at:] + urls[:at]),  # every router counts them in another order
                trace=False, redis_url=url, hash_key=KEY, **settings,
            )  # fmt: skip
            apps.append(build_router(given))
            tasks.append(asyncio.ensure_future(apps[-1].link.run()))
        try:
            yield apps, fleet
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def send(app: Gateway, text: str, **headers: str) -> tuple[int, str, str]:
    """Send a prompt; return the engine that served it, the outcome and the reason of the placement."""
    client, body = await ask(app, "POST", CHAT, body=chat(text), headers=headers)
    assert client.status == 200
    return json.loads(body)["served_by"], client.headers["x-semantic-route"], client.headers["x-route-reason"]


def count_known(app: Gateway, text: str) -> list[int]:
    """Tokens of a prompt that each replica has, by address, as this router believes."""
    from semantickv.apps.callers import identify_caller

    pieces = cut_prompt(read_prompt(chat(text)).list_parts(), identify_caller([], KEY).namespace + b"m")
    replicas = sorted(app.router.replicas, key=lambda one: one.pool.address.url)
    return [one.memory.match(pieces).prefix_tokens for one in replicas]


async def wait_connected(*apps: Gateway) -> None:
    await wait_until(lambda: all(app.link.is_connected for app in apps))


def test_a_document_that_one_router_placed_is_known_to_the_other(tmp_path):
    async def test():
        with RedisServer(tmp_path) as redis:
            async with routers(redis.url) as ((first, second), _):
                await wait_connected(first, second)
                for name in ("a", "b", "c", "d"):
                    home, outcome, _ = await send(first, write_document(name))
                    assert outcome == "cold_fallback"
                    await wait_until(lambda name=name: any(count_known(second, write_document(name))))
                    assert (await send(second, write_document(name)))[:2] == (home, "exact_prefix_route")

    run(test())


def test_what_an_engine_refused_to_one_router_is_not_believed_by_the_other(tmp_path):
    async def test():
        with RedisServer(tmp_path) as redis:
            async with routers(redis.url) as ((first, second), engines):
                await wait_connected(first, second)
                kept = [engine.default for engine in engines]
                for engine in engines:
                    engine.default = answer_json({"error": {}}, status=400)
                client, _ = await ask(first, "POST", CHAT, body=chat(write_document("a")))
                assert client.status == 400
                for engine, default in zip(engines, kept, strict=True):
                    engine.default = default
                await send(first, write_document("b"))  # comes after the refusal
                await wait_until(lambda: any(count_known(second, write_document("b"))))
                assert count_known(second, write_document("a")) == [0, 0, 0]

    run(test())


async def send_passages(app: Gateway, names: str) -> tuple[int, list[int]]:
    """Send passages that may change places; return the engine that served them, and the order in which it got them."""
    passages = [write_document(name) for name in names]
    fields = {"model": "m", "messages": [{"role": "user", "content": "Compare."}], "semblend": {"passages": passages}}
    client, body = await ask(app, "POST", CHAT, body=json.dumps(fields).encode())
    assert client.status == 200
    return json.loads(body)["served_by"], json.loads(client.headers["x-semantic-order"])[0]["order"]


def count_orders(app: Gateway) -> int:
    return sum(len(one.arranger) for one in app.router.replicas)


def test_passages_go_in_the_order_in_which_another_router_sent_them(tmp_path):
    async def test():
        with RedisServer(tmp_path) as redis:
            async with routers(redis.url) as ((first, second), _):
                await wait_connected(first, second)
                home, order = await send_passages(first, "abc")
                assert order == [0, 1, 2]
                await wait_until(lambda: count_orders(second))
                assert await send_passages(second, "cab") == (home, [1, 2, 0])

    run(test())


def test_a_router_that_comes_later_is_told_the_orders_too(tmp_path):
    async def test():
        with RedisServer(tmp_path) as redis:
            async with routers(redis.url, count=1) as ((first,), engines):
                await wait_connected(first)
                home, _ = await send_passages(first, "abcd")
                first.link.sync._snapshot_at = float("-inf")
                urls = tuple(one.url for one in engines)
                late = build_router(EdgeSettings(replicas=urls, trace=False, redis_url=redis.url, hash_key=KEY))
                link = asyncio.ensure_future(late.link.run())
                await wait_until(lambda: count_orders(late))
                assert await send_passages(late, "dbca") == (home, [3, 1, 2, 0])
                link.cancel()
                await asyncio.gather(link, return_exceptions=True)

    run(test())


def test_a_session_keeps_its_replica_across_routers(tmp_path):
    async def test():
        with RedisServer(tmp_path) as redis:
            async with routers(redis.url) as ((first, second), _):
                await wait_connected(first, second)
                for session in ("s1", "s2", "s3"):
                    home, _, _ = await send(first, "Hi", **{"X-Session-ID": session})
                    await wait_until(lambda: second.router.sessions >= first.router.sessions)
                    found = await send(second, "And now?", **{"X-Session-ID": session})
                    assert (found[0], found[2]) == (home, "semantic_locality;session")

    run(test())


def test_what_runs_through_one_router_counts_as_load_in_the_other_until_it_is_old(tmp_path):
    async def test():
        with RedisServer(tmp_path) as redis:
            async with routers(redis.url, engines=2, policy="least_loaded") as ((first, second), engines):
                await wait_connected(first, second)
                for engine in engines:
                    engine.plan(*[hang() for _ in range(9)])
                running = [asyncio.ensure_future(ask(first, "POST", CHAT, body=chat("Hi"))) for _ in range(6)]
                await wait_until(lambda: sum(one.running_elsewhere for one in second.router.replicas) == 6)
                assert all(one.all_running == 3 for one in second.router.replicas)
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                await wait_until(lambda: sum(one.running_elsewhere for one in second.router.replicas) == 0)

    run(test())


def test_load_of_a_router_that_is_gone_expires():
    async def test():
        async with routers("redis://127.0.0.1:1/0", count=1) as ((app,), _):
            now = [0.0]
            exchange = RouterSync(app.router, never_probe, clock=lambda: now[0])
            replica = app.router.replicas[0]
            exchange.take("other", [Load(name_replica(replica.pool.address.url), 7, 900)])
            assert (replica.running_elsewhere, replica.waiting_elsewhere) == (7, 900)
            now[0] = LOAD_LIFE_S + 1
            exchange.update_loads()
            assert (replica.running_elsewhere, replica.waiting_elsewhere) == (0, 0)

    run(test())


def test_killed_and_restored_under_load_no_request_fails_and_the_routers_meet_again(tmp_path):
    async def test():
        with RedisServer(tmp_path) as redis:
            async with routers(redis.url) as ((first, second), _):
                await wait_connected(first, second)
                stop = asyncio.Event()
                served = [0]

                async def load() -> None:
                    number = 0
                    while not stop.is_set():
                        number += 1
                        await send((first, second)[number % 2], write_document(f"load {number % 40}"))
                        served[0] += 1

                running = asyncio.ensure_future(load())
                await wait_until(lambda: served[0] > 20)
                redis.kill()
                await wait_until(lambda: not first.link.is_connected and not second.link.is_connected)
                at_death = served[0]
                homes = {name: (await send(first, write_document(name)))[0] for name in ("dark a", "dark b", "dark c")}
                assert not any(any(count_known(second, write_document(name))) for name in homes)
                await wait_until(lambda: served[0] > at_death + 50)
                redis.start()
                await wait_connected(first, second)
                await wait_until(lambda: all(any(count_known(second, write_document(name))) for name in homes))
                stop.set()
                await running  # raises if any request failed
                for name, home in homes.items():
                    assert (await send(second, write_document(name)))[0] == home
                assert first.link.failures >= 1
                assert first.link.connections == 2

    run(test())


@pytest.mark.parametrize("kind", ["hangs", "garbage", "closes", "refuses"])
def test_a_redis_that_is_slow_or_broken_costs_no_request(kind):
    async def misbehave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while kind != "closes" and await reader.read(1024):
                if kind == "garbage":
                    writer.write(b"$-7\r\n\x00\xff*nonsense\r\n" * 100)
        except OSError:
            pass
        finally:
            writer.close()

    async def test():
        server = await asyncio.start_server(misbehave, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if kind == "refuses":
            server.close()
        async with routers(f"redis://127.0.0.1:{port}/0", count=1) as ((app,), _):
            for number in range(30):
                await send(app, write_document(str(number % 5)))
            if kind != "hangs":
                await wait_until(lambda: app.link.failures > 0)
            assert not app.link.is_connected or kind == "hangs"
        server.close()

    run(test())


def test_entries_that_are_forged_or_garbage_are_counted_and_left_out(tmp_path):
    import redis.asyncio as client_library

    async def test():
        with RedisServer(tmp_path) as server:
            async with routers(server.url) as ((first, second), _):
                await wait_connected(first, second)
                client = client_library.from_url(server.url)
                name = name_replica(first.router.replicas[0].pool.address.url)
                lie = Placed(name, [1], [2], [3])

                def sign(data: bytes) -> dict[str, Any]:
                    return {"from": "me", "news": data, "sign": first.link._sign(b"me", data)}

                for fields in (
                    {"x": "y"},
                    sign(b"\xc1"),
                    sign(write_messages([lie])[:-1]),
                    sign(b"\x91\x95\xa6placed\xa1r\x91\x01\x91\x02\x91\x80"),
                    sign(b"x" * (2 << 20)),
                ):
                    await client.xadd("semantickv:default:deltas", fields)
                await wait_until(lambda: first.link.garbage == second.link.garbage == 5)
                forged = sign(write_messages([lie]))
                for fields in ({"from": "me", "news": forged["news"]}, {**forged, "from": "another"}):
                    await client.xadd("semantickv:default:deltas", fields)
                await wait_until(lambda: first.link.unsigned == second.link.unsigned == 2)
                await client.xadd("semantickv:default:deltas", sign(write_messages([Failing("nobody's"), Hello()])))
                await wait_until(lambda: first.link.sync.unknown == 1)
                home, _, _ = await send(first, write_document("a"))
                await wait_until(lambda: any(count_known(second, write_document("a"))))
                assert (await send(second, write_document("a")))[0] == home
                await client.aclose()

    run(test())


def test_redis_holds_no_text_and_everything_in_it_expires(tmp_path):
    import redis.asyncio as client_library

    async def test():
        with RedisServer(tmp_path) as server:
            async with routers(server.url) as ((first, second), engines):
                await wait_connected(first, second)
                headers = {"Authorization": "Bearer sk-very-secret", "X-Session-ID": "sess-42", "X-Tenant-ID": "acme"}
                for number in range(50):
                    await send(first, write_document(f"contract {number}"), **headers)
                await wait_until(lambda: second.link.sync.taken >= 50)
                client = client_library.from_url(server.url)
                keys = [key async for key in client.scan_iter()]
                assert keys == [b"semantickv:default:deltas"]
                assert 0 < await client.ttl(keys[0]) <= 3600
                held = repr(await client.xrange(keys[0])).encode()
                words = (
                    "Clause",
                    "contract",
                    "coins",
                    "secret",
                    "sess-42",
                    "acme",
                    KEY,
                    str(engines[0].port),
                    "127.0.0.1",
                )
                assert not [word for word in words if word.encode() in held]
                assert await client.xlen(keys[0]) < 6000
                await client.aclose()

    run(test())


def test_groups_know_nothing_of_each_other(tmp_path):
    async def test():
        with RedisServer(tmp_path) as redis:
            async with (
                routers(redis.url, count=1) as ((first,), _),
                routers(redis.url, count=1, redis_group="other") as ((second,), _),
            ):
                await wait_connected(first, second)
                await send(first, write_document("a"))
                await asyncio.sleep(0.3)
                assert second.link.sync.taken == 0

    run(test())


async def never_probe(replica: Any) -> bool:
    raise AssertionError("nobody asked")


@pytest.mark.parametrize("is_well", [True, False])
def test_a_hint_that_a_replica_fails_is_checked_and_not_believed(is_well):
    async def test():
        async with routers("redis://127.0.0.1:1/0", count=1) as ((app,), _):
            replica = app.router.replicas[0]
            asked = []

            async def probe(one: Any) -> bool:
                asked.append(one)
                return is_well

            exchange = RouterSync(app.router, probe)
            exchange.take("other", [Failing(name_replica(replica.pool.address.url))])
            await wait_until(lambda: asked)
            await asyncio.sleep(0)
            assert replica.can_serve is is_well

    run(test())


def test_a_router_that_comes_soon_after_another_gets_what_is_known_when_the_pause_is_over():
    async def test():
        async with routers("redis://127.0.0.1:1/0", count=1) as ((app,), _):
            now = [0.0]
            exchange = RouterSync(app.router, never_probe, clock=lambda: now[0])
            app.router.replicas[0].memory.add(5, 64)
            exchange.take("one", [Hello()])
            first = exchange.list_outgoing(99)
            exchange.take("two", [Hello()])
            exchange.list_loads()
            assert exchange.list_outgoing(99) == []
            now[0] = SNAPSHOT_PAUSE_S + 1
            exchange.list_loads()
            assert exchange.list_outgoing(99) == first
            assert any(isinstance(one, Known) and one.keys == [5] for one in first)

    run(test())


def test_without_redis_what_waits_to_be_told_is_bounded():
    async def test():
        async with routers("redis://127.0.0.1:1/0", count=1) as ((app,), _):
            for number in range(MOST_OUTGOING + 50):
                app.link.sync._put(Failing(str(number)))
            assert app.link.describe()["waiting"] == MOST_OUTGOING
            assert app.link.describe()["dropped"] >= 50

    run(test())


def test_redis_without_a_hash_key_is_refused():
    with pytest.raises(ConfigError, match="SEMANTICKV_HASH_KEY"):
        build_router(EdgeSettings(replicas=("http://a:1", "http://b:1"), redis_url="redis://127.0.0.1:6379/0"))
    with pytest.raises(ConfigError, match="SEMANTICKV_REDIS_URL"):
        build_router(EdgeSettings(replicas=("http://a:1", "http://b:1"), redis_url="nonsense", hash_key=KEY))


keys = st.integers(0, 2**64 - 1)
counts = st.integers(0, 1_000_000)


@given(st.lists(st.tuples(keys, keys, counts), max_size=20), keys)
def test_messages_come_back_as_they_were(pieces, home):
    hashes, chains, tokens = ([one[at] for one in pieces] for at in range(3))
    sent = [Placed("r", hashes, chains, tokens, home), Known("r", hashes, tokens), Load("r", 3, 9), Hello()]
    assert read_messages(write_messages(sent)) == sent


@given(st.binary(max_size=100))
def test_no_bytes_break_the_reader_of_messages(data):
    assert read_messages(data) is None or isinstance(read_messages(data), list)


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 10**9)), min_size=1, max_size=9))
def test_orders_come_back_as_they_were(passages):
    keys, sizes = (list(column) for column in zip(*passages, strict=True))
    message = Ordered("r", b"o" * 16, b"scope", b"r" * 16, keys, sizes)
    assert read_messages(write_messages([message])) == [message]
    assert read_messages(write_messages([Ordered("r", b"o" * 16, b"scope", b"r" * 16, keys, [*sizes, 1])])) is None
    assert read_messages(write_messages([Ordered("r", b"short", b"scope", b"r" * 16, keys, sizes)])) is None


def test_lists_that_do_not_belong_together_are_refused():
    assert read_messages(write_messages([Placed("r", [1, 2], [3], [4, 5])])) is None
    assert read_messages(write_messages([Known("r", [1, 2], [4])])) is None


def test_this_folder_has_no_other_way_in(tmp_path):
    """The link is the only module here that imports a Redis client."""
    folder = Path(__file__).parents[3] / "src/semantickv"
    users = [path.name for path in folder.rglob("*.py") if "redis.asyncio" in path.read_text()]
    assert users == ["redis_link.py"]


def test_a_link_that_is_stopped_while_its_connection_fails_ends():
    """A group of tasks hides a cancellation when one of them fails in the same moment."""

    async def test():
        async with routers("redis://127.0.0.1:1/0", count=1) as ((app,), _):
            link = app.link

            async def find_end(client: Any) -> str:
                return "0"

            async def fail(*_: Any) -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    raise OSError("the connection broke while it was closed")

            link._find_start, link._write, link._read = find_end, fail, fail
            task = asyncio.ensure_future(link.run())
            await wait_until(lambda: link.is_connected)
            await asyncio.sleep(0.01)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=300)
            assert done
            assert task.cancelled()

    run(test())
