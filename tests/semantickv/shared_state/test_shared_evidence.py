"""Several routers of one Dynamo deployment over one real Redis: a document is known to all of them."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from redis_server import RedisServer

from semantickv.routing.worker_evidence import WorkerEvidence
from semantickv.shared_state.messages import Failing, Hello, Known, Load, Placed, read_messages, write_messages
from semantickv.shared_state.redis_link import RedisLink
from semantickv.shared_state.sync import SharedEvidence, read_worker, write_worker
from semblend.integration.dynamo.placement import PlacementReason, WorkerKey, WorkerState
from semblend.prompt import Namespace

A, B = WorkerKey(7587890112233), WorkerKey(7587890112233, 1)
IDLE = [WorkerState(A), WorkerState(B)]
NOWHERE = Namespace()


def write_tokens(seed: int, count: int = 2000) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()


def make_router(secret: str = "s", **clock) -> SharedEvidence:
    return SharedEvidence(100_000, secret=secret, **clock)


def place(router: SharedEvidence, tokens: list[int], worker: WorkerKey) -> None:
    router.note_placed(router.read(tokens, NOWHERE), worker)


def find(router: SharedEvidence, tokens: list[int]) -> WorkerKey | None:
    return router.choose(router.read(tokens, NOWHERE), IDLE).worker


def pass_on(giver: SharedEvidence, taker: SharedEvidence) -> None:
    """As Redis would: through the bytes of an entry."""
    taker.take("giver", read_messages(write_messages(giver.list_outgoing(10_000))))


def test_what_one_router_places_the_other_knows_at_any_offset():
    first, second = make_router(), make_router()
    place(first, write_tokens(1), B)
    assert find(second, write_tokens(1)) is None
    pass_on(first, second)
    assert find(second, [*range(100), *write_tokens(1)]) == B
    assert second.list_outgoing(10) == [], "what was heard is not told again"


def test_a_router_that_comes_is_told_what_the_others_know():
    first, late = make_router(), make_router()
    for seed in range(5):
        place(first, write_tokens(seed), (A, B)[seed % 2])
    first.list_outgoing(10_000)
    late.note_joined()
    pass_on(late, first)  # hello
    pass_on(first, late)
    assert [find(late, write_tokens(seed)) for seed in range(5)] == [A, B, A, B, A]


def test_a_snapshot_waits_for_its_pause_and_then_comes():
    now = [0.0]
    router = make_router(clock=lambda: now[0])
    place(router, write_tokens(1), A)
    router.list_outgoing(10)
    router.take("x", [Hello()])
    assert [type(one) for one in router.list_outgoing(10)] == [Known]
    router.take("x", [Hello()])
    assert router.list_outgoing(10) == []
    now[0] = 11.0
    assert router.list_loads() == []
    assert [type(one) for one in router.list_outgoing(10)] == [Known]


def test_routers_with_another_secret_have_nothing_in_common():
    first, second = make_router("s"), make_router("another")
    place(first, write_tokens(1), A)
    pass_on(first, second)
    assert find(second, write_tokens(1)) is None


def test_a_worker_that_dynamo_does_not_list_is_forgotten_whoever_told_of_it():
    router = make_router()
    router.take("x", [Placed("99.0", [1], [2], [500])])
    assert WorkerKey(99) in router.tracked_tokens
    router.note_workers([A, B])
    assert WorkerKey(99) not in router.tracked_tokens


def test_news_of_other_routers_is_counted_and_left_out():
    router = make_router()
    router.take("x", [Placed("0c1f", [1], [2], [500]), Load("7587890112233.0", 3, 9), Failing("7587890112233.0")])
    assert router.describe()["unknown_workers"] == 3
    assert router.tracked_tokens == {}


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_the_name_of_a_worker_says_who_it_is(worker, rank):
    assert read_worker(write_worker(WorkerKey(worker, rank))) == (worker, rank)


@given(st.text(max_size=64))
def test_no_name_breaks_the_reader(name):
    found = read_worker(name)
    assert found is None or write_worker(found).split(".") == [str(int(word)) for word in name.split(".")]


def test_over_a_real_redis_that_is_killed_and_comes_back(tmp_path):
    async def test() -> None:
        with RedisServer(tmp_path) as redis:
            routers = [make_router() for _ in range(2)]
            links = [RedisLink(redis.url, "dynamo", router) for router in routers]
            tasks = [asyncio.ensure_future(link.run()) for link in links]

            async def wait_until(is_so) -> None:
                while not is_so():
                    await asyncio.sleep(0.01)

            async with asyncio.timeout(120):
                await wait_until(lambda: all(link.is_connected for link in links))
                place(routers[0], write_tokens(1), B)
                await wait_until(lambda: find(routers[1], write_tokens(1)) == B)
                redis.kill()
                await wait_until(lambda: not any(link.is_connected for link in links))
                place(routers[1], write_tokens(2), A)
                assert find(routers[1], write_tokens(1)) == B, "nobody waits for Redis"
                redis.start()
                await wait_until(lambda: find(routers[0], write_tokens(2)) == A)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(test())


def test_without_redis_the_evidence_is_what_it_would_be_alone():
    alone, shared = WorkerEvidence(100_000, secret="s"), make_router()
    for seed in range(4):
        for one in (alone, shared):
            one.note_placed(one.read(write_tokens(seed), NOWHERE), (A, B)[seed % 2])
    for seed in range(6):
        prompt = alone.read([5, *write_tokens(seed)], NOWHERE)
        assert shared.choose(prompt, IDLE) == alone.choose(prompt, IDLE)
    assert alone.choose(alone.read(write_tokens(9), NOWHERE), IDLE).reason is PlacementReason.UNKNOWN
