"""KV events: the router's memory follows what engines store and evict, through gaps, restarts and garbage."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from asgi_client import ask
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode

from semantickv.apps.build import build_router
from semantickv.edge.upstream_call import EngineAddress, Upstream
from semantickv.engine_state.cache_follower import CacheFollower, FollowedCache, HeldPrompts, ServedPrompt
from semantickv.engine_state.events import (
    AllBlocksCleared,
    BadEventsError,
    BlockRemoved,
    BlockStored,
    EngineBlocks,
    list_marks,
    read_batch,
    start_chain,
)
from semantickv.engine_state.subscriber import EventSource
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.replica import Replica
from semantickv.settings import EdgeSettings
from semblend.errors import ConfigError
from tests.fakes.scripted_engine import ScriptedEngine, answer_json
from tests.fakes.scripted_publisher import CLEAR, ScriptedPublisher, remove, store

SIZE = 16
TOKENS = tuple(range(1000, 1000 + 8 * SIZE))


def cut(names: str, tokens: int = 32) -> PromptPieces:
    """A prompt with one piece for each letter; equal letters are equal pieces."""
    hashes = tuple(ord(name) for name in names)
    chains = tuple(hash((names[: at + 1], "chain")) for at in range(len(names)))
    return PromptPieces(hashes, chains, (tokens,) * len(names), (1.0,) * len(names))


def run(test: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


def make_replica(name: str = "r0") -> Replica:
    return Replica(name, Upstream(EngineAddress.parse("http://127.0.0.1:9")), ReplicaMemory(100_000))


@asynccontextmanager
async def following(**publisher: Any):
    """A publisher, and a replica whose cache is followed by it."""
    async with ScriptedPublisher(**publisher) as engine:
        cache = FollowedCache(make_replica(), EventSource.parse(engine.address))
        follower = CacheFollower([cache])
        task = asyncio.ensure_future(follower.run())
        await engine.wait_for_subscriber()
        try:
            yield engine, cache, follower
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def wait_until(is_so: Any) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


def serve(
    follower: CacheFollower, cache: FollowedCache, pieces: PromptPieces, tokens: tuple[int, ...] = TOKENS
) -> None:
    cache.replica.memory.note(pieces)  # as the router does when it sends a request there
    follower.note_served(ServedPrompt(cache.replica, pieces, {"prompt": list(tokens)}, "", b"", len(tokens), True))


# -- events as they come over the wire -------------------------------------------------------------------------------


def test_the_events_of_vllm_and_sglang_are_read_alike():
    vllm = store([1], None, range(16), 16, extra_keys=[["salt"]], group_idx=0, kv_cache_spec_kind="full_attention")
    sglang = store([1], None, range(16), 16, cache_salt="salt")
    found = [read_batch(encode([1.0, [one], None])) for one in (vllm, sglang)]
    assert found[0] == found[1] == [BlockStored((1,), None, tuple(range(16)), 16, "GPU", "salt")]


def test_other_groups_and_unknown_kinds_of_events_are_left_out():
    events = [{"type": "New"}, store([1], None, range(16), 16, group_idx=1), CLEAR]
    assert read_batch(encode([1.0, events])) == [AllBlocksCleared()]


BROKEN = [
    b"",
    b"\xc1",
    b"nonsense",
    encode(7),
    encode([1.0]),
    encode([1.0, 7]),
    encode([1.0, [7]]),
    encode([1.0, [{"type": "BlockRemoved"}]]),
    encode([1.0, [{"type": "BlockRemoved", "block_hashes": [[1]]}]]),
    encode([1.0, [store([1], None, range(15), 16)]]),
    encode([1.0, [store([1], None, ["a"] * 16, 16)]]),
    encode([1.0, [store([], None, [], 0)]]),
    encode([1.0, [store([1], None, range(16), 16)]])[:-3],
]


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_batch_is_refused_by_name(data):
    with pytest.raises(BadEventsError):
        read_batch(data)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data):
    try:
        assert isinstance(read_batch(data), list)
    except BadEventsError:
        pass


def test_an_address_that_is_none_is_a_config_error():
    with pytest.raises(ConfigError, match="KV events"):
        EventSource.parse("localhost:5557")


# -- the blocks of one engine ----------------------------------------------------------------------------------------


def test_marks_depend_on_tokens_and_salt_and_not_on_the_engines_hashes():
    blocks = EngineBlocks()
    blocks.apply(BlockStored((91, 92), None, TOKENS[:32], SIZE))
    blocks.apply(BlockStored((93,), 92, TOKENS[32:48], SIZE))
    marks = list(list_marks(TOKENS, SIZE, start_chain("")))
    assert [blocks.holds(mark) for mark in marks] == [True] * 3 + [False] * 5
    assert not any(blocks.holds(mark) for mark in list_marks(TOKENS, SIZE, start_chain("other")))


def test_a_block_is_held_until_every_medium_has_let_go_of_it():
    blocks = EngineBlocks()
    (mark,) = blocks.apply(BlockStored((1,), None, TOKENS[:16], SIZE, "GPU")).stored
    blocks.apply(BlockStored((1,), None, TOKENS[:16], SIZE, "CPU_PINNED"))
    assert blocks.apply(BlockRemoved((1,), "GPU")).removed == ()
    assert blocks.apply(BlockRemoved((1,), "CPU_PINNED")).removed == (mark,)
    assert not len(blocks)


def test_a_block_behind_an_unseen_one_is_counted_and_nothing_else():
    blocks = EngineBlocks()
    assert blocks.apply(BlockStored((2,), 1, TOKENS[:16], SIZE)).stored == ()
    assert (blocks.orphans, len(blocks)) == (1, 0)


def test_an_engine_that_never_evicts_does_not_fill_our_memory():
    blocks = EngineBlocks(most_blocks=10)
    for number in range(50):
        blocks.apply(BlockStored((number,), None, (number,) * 16, SIZE))
    assert len(blocks) == 10


# -- prompts and blocks ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 8)), max_size=40),
    st.sampled_from([1, 4, 16]),
)
def test_the_memory_has_exactly_what_a_plain_count_says(steps, size):
    """Differential: six prompts over one alphabet of passages, stored and evicted from their ends in any order."""
    prompts = {n: (cut("abcdefgh"[n:] + "abcdefgh"[:n], 16), tuple(range(100 * n, 100 * n + 128))) for n in range(6)}
    blocks, memory = EngineBlocks(), ReplicaMemory(100_000)
    held = HeldPrompts(blocks, memory)
    blocks.apply(BlockStored((-1,), None, (7,) * size, size))
    for number, (pieces, tokens) in prompts.items():
        held.link(number, pieces, list(list_marks(tokens, size, start_chain(""))), 128)
    stored = dict.fromkeys(prompts, 0)  # passages of 16 tokens from the beginning
    per = 16 // size
    for is_store, number, upto in steps:
        tokens, now = prompts[number][1], stored[number]
        name = lambda block, number=number: 1000 * (number + 1) + block  # noqa: E731
        if is_store and upto > now:
            first, last = now * per, upto * per
            parent = None if first == 0 else name(first - 1)
            event = BlockStored(tuple(map(name, range(first, last))), parent, tokens[first * size : last * size], size)
            held.follow(blocks.apply(event))
            stored[number] = upto
        elif not is_store and upto <= now:
            gone = tuple(map(name, reversed(range((upto - 1) * per, now * per))))
            held.follow(blocks.apply(BlockRemoved(gone)))
            stored[number] = upto - 1
    for number, (pieces, _) in prompts.items():
        found = memory.match(pieces)
        want_any = sum(
            any(key in prompts[other][0].hashes[: stored[other]] for other in prompts) for key in pieces.hashes
        )
        assert found.prefix_tokens == 16 * stored[number]
        assert found.any_tokens == 16 * want_any


def test_links_are_bounded_and_an_old_prompt_stays_as_a_guess():
    blocks, memory = EngineBlocks(), ReplicaMemory(1_000_000)
    held = HeldPrompts(blocks, memory, most_links=64)
    for number in range(100):
        tokens = tuple(range(number * 1000, number * 1000 + 128))
        blocks.apply(BlockStored(tuple(range(number * 8, number * 8 + 8)), None, tokens, SIZE))
        held.link(number, cut(chr(300 + number) * 4), list(list_marks(tokens, SIZE, start_chain(""))), 128)
    assert len(held) <= 8
    assert memory.match(cut(chr(300) * 4)).any_tokens == 128


# -- a cache over real sockets -----------------------------------------------------------------------------------------


def test_what_an_engine_evicts_is_forgotten_from_the_end():
    async def test():
        async with following() as (engine, cache, follower):
            await engine.publish(store(range(8), None, TOKENS, SIZE))
            pieces = cut("wxyz")
            await wait_until(lambda: len(cache.blocks) == 8)
            serve(follower, cache, pieces)
            await wait_until(lambda: len(cache.held) == 1)
            memory = cache.replica.memory
            assert memory.match(pieces).prefix_tokens == 128
            await engine.publish(remove([7, 6, 5]))
            await wait_until(lambda: cache.held.forgotten)
            assert memory.match(pieces).prefix_tokens == memory.match(pieces).any_tokens == 64
            await engine.publish(store([15, 16, 17], 4, TOKENS[80:], SIZE))  # computed again under other names
            await wait_until(lambda: memory.match(pieces).prefix_tokens == 128)
            await engine.publish(CLEAR)
            await wait_until(lambda: not memory.tokens)
            assert len(memory) == 0

    run(test())


def test_a_document_that_stands_in_another_engine_is_known_after_one_request():
    async def test():
        async with ScriptedPublisher() as first, ScriptedPublisher() as second:
            follower = CacheFollower(
                FollowedCache(make_replica(name), EventSource.parse(engine.address))
                for name, engine in (("r0", first), ("r1", second))
            )
            task = asyncio.ensure_future(follower.run())
            for engine in (first, second):
                await engine.wait_for_subscriber()
            here, there = follower.caches["r0"], follower.caches["r1"]
            await second.publish(store(range(8), None, TOKENS, SIZE))
            await first.publish(store([70], None, range(16), SIZE))
            await wait_until(lambda: len(there.blocks) == 8 and len(here.blocks) == 1)
            serve(follower, here, cut("wxyz"))
            await wait_until(lambda: there.replica.memory.match(cut("wxyz")).prefix_tokens == 128)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(test())


def test_a_prompt_that_is_answered_before_its_events_come_is_linked_when_they_do():
    async def test():
        async with following() as (engine, cache, follower):
            serve(follower, cache, cut("wxyz"))
            await wait_until(lambda: follower.tokenized == 1)
            assert len(cache.held) == 0
            await engine.publish(store(range(8), None, TOKENS, SIZE))
            await wait_until(lambda: len(cache.held) == 1)
            await engine.publish(remove([7]))
            await wait_until(lambda: cache.held.forgotten)

    run(test())


def test_missed_batches_are_fetched_from_the_replay():
    async def test():
        async with following() as (engine, cache, _):
            await engine.publish(store([0], None, TOKENS[:16], SIZE))
            await wait_until(lambda: len(cache.blocks) == 1)
            await engine.publish(store([1], 0, TOKENS[16:32], SIZE), lose=True)
            await engine.publish(store([2], 1, TOKENS[32:48], SIZE))
            await wait_until(lambda: len(cache.blocks) == 3)
            assert cache.subscriber.replayed >= 2  # the batch that came live is among them
            assert (cache.blocks.orphans, cache.subscriber.losses) == (0, 0)

    run(test())


def test_a_router_that_starts_late_learns_what_engines_hold_already():
    async def test():
        async with ScriptedPublisher() as engine:
            await engine.publish(store(range(8), None, TOKENS, SIZE))
            cache = FollowedCache(make_replica(), EventSource.parse(engine.address))
            task = asyncio.ensure_future(cache.subscriber.run())
            await wait_until(lambda: len(cache.blocks) == 8)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(test())


def test_a_cache_that_was_emptied_before_the_router_listened_takes_nothing_of_what_was_placed_since():
    async def test():
        async with ScriptedPublisher() as engine:
            await engine.publish(CLEAR)
            await engine.publish(store(range(8), None, TOKENS, SIZE))
            cache = FollowedCache(make_replica(), EventSource.parse(engine.address))
            cache.replica.memory.note(cut("wxyz"))
            task = asyncio.ensure_future(cache.subscriber.run())
            await wait_until(lambda: len(cache.blocks) == 8)
            assert cache.replica.memory.match(cut("wxyz")).prefix_tokens == 128
            await engine.wait_for_subscriber()
            await engine.publish(CLEAR)
            await wait_until(lambda: not cache.replica.memory.tokens)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(test())


@pytest.mark.parametrize("has_replay", [True, False])
def test_after_events_that_are_lost_for_good_nothing_counts_as_held_on_their_word(has_replay):
    async def test():
        async with following(has_replay=has_replay) as (engine, cache, follower):
            await engine.publish(store(range(8), None, TOKENS, SIZE))
            await wait_until(lambda: len(cache.blocks) == 8)
            serve(follower, cache, cut("wxyz"))
            await wait_until(lambda: len(cache.held) == 1)
            await engine.publish(remove([7]), lose=True)
            engine.drop_buffer()
            await engine.publish(store([20], None, range(16), SIZE))
            await wait_until(lambda: cache.subscriber.losses == 1)
            await wait_until(lambda: len(cache.blocks) == 1)
            assert len(cache.held) == 0
            assert cache.replica.memory.match(cut("wxyz")).prefix_tokens == 128  # stays as a guess

    run(test())


def test_an_engine_that_began_anew_has_an_empty_cache():
    async def test():
        async with following() as (engine, cache, follower):
            await engine.publish(store(range(8), None, TOKENS, SIZE))
            await wait_until(lambda: len(cache.blocks) == 8)
            serve(follower, cache, cut("wxyz"))
            await wait_until(lambda: len(cache.held) == 1)
            await engine.publish(store([5], None, range(16), SIZE), number=0)
            await wait_until(lambda: cache.subscriber.restarts == 1 and len(cache.blocks) == 1)
            assert cache.replica.memory.tokens == 0

    run(test())


def test_garbage_in_the_stream_costs_what_it_would_have_said_and_no_more():
    async def test():
        async with following() as (engine, cache, _):
            for data in BROKEN:
                await engine.publish_raw(data)
            await engine.publish(store([1], None, range(16), SIZE))
            await wait_until(lambda: len(cache.blocks) == 1)
            assert cache.subscriber.bad == len(BROKEN)

    run(test())


def test_a_prompt_whose_length_the_engine_reported_otherwise_is_not_linked():
    async def test():
        async with following() as (engine, cache, follower):
            await engine.publish(store(range(8), None, TOKENS, SIZE))
            await wait_until(lambda: len(cache.blocks) == 8)
            follower.note_served(ServedPrompt(cache.replica, cut("wxyz"), {"prompt": list(TOKENS)}, "", b"", 127, True))
            await wait_until(lambda: follower.failed == 1)
            assert len(cache.held) == 0

    run(test())


def test_an_address_that_nobody_can_connect_to_does_not_stop_the_other_feeds():
    async def test():
        async with ScriptedPublisher() as engine:
            good = FollowedCache(make_replica("r0"), EventSource.parse(engine.address))
            bad = FollowedCache(make_replica("r1"), EventSource.parse("tcp://not a host:port"))
            follower = CacheFollower([bad, good])
            task = asyncio.ensure_future(follower.run())
            await engine.wait_for_subscriber()
            await engine.publish(store([1], None, range(16), SIZE))
            await wait_until(lambda: len(good.blocks) == 1)
            assert follower.failed == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(test())


def test_more_prompts_than_can_be_tokenized_are_left_out_and_counted():
    cache = FollowedCache(make_replica(), EventSource("tcp://127.0.0.1:9"))
    follower = CacheFollower([cache])
    for number in count():
        serve(follower, cache, cut(chr(500 + number)))
        if follower.skipped:
            break
    assert number == 256


# -- isolation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others_sent_it", [False, True])
def test_without_salts_a_tenant_sees_the_same_headers_whether_or_not_another_one_sent_the_document(others_sent_it):
    """Paired: tenant B's placements, scores and reasons do not depend on what another tenant has in the caches."""

    async def test():
        async with (
            ScriptedEngine() as one,
            ScriptedEngine() as two,
            ScriptedPublisher() as first,
            ScriptedPublisher() as second,
        ):
            body = {"model": "m", "messages": [{"role": "user", "content": "All of it. " * 400}]}
            ids = list(range(1000))
            for engine in (one, two):
                engine.default = answer_tokens(ids)
            settings = EdgeSettings(
                replicas=(one.url, two.url), kv_events=(first.address, second.address), trace=False, hash_key="k"
            )
            app = build_router(settings)
            task = asyncio.ensure_future(app.follower.run())
            for engine in (first, second):
                await engine.wait_for_subscriber()
                await engine.publish(store([999], None, [7] * SIZE, SIZE))
            if others_sent_it:  # another tenant, through another router: both engines hold all of its tokens
                for engine in (first, second):
                    await engine.publish(store(range(62), None, ids[: 62 * SIZE], SIZE))
            await wait_until(lambda: all(cache.blocks.block_size for cache in app.follower.caches.values()))
            seen = []
            for _ in range(3):
                client, _ = await ask(
                    app, "POST", "/v1/chat/completions", body=json.dumps(body).encode(),
                    headers={"Authorization": "Bearer b"},
                )  # fmt: skip
                names = ("x-replica-id", "x-semantic-route", "x-semantic-score", "x-route-reason")
                seen.append([client.headers[name] for name in names])
                await wait_until(lambda: app.follower.tokenized == 1 and app.follower._waiting.empty())
                await asyncio.sleep(0.05)
            other = app.router.replicas[1 - int(seen[0][0][1])]
            assert other.memory.tokens == 0  # B never went there
            assert [row[1] for row in seen] == ["cold_fallback", "exact_prefix_route", "exact_prefix_route"]
            assert len({row[0] for row in seen}) == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(test())


def answer_tokens(ids: list[int]) -> Any:
    """Behave like an engine that tokenizes everything into ``ids``."""

    async def behave(side: Any) -> None:
        value = {"tokens": ids} if side.request.target == "/tokenize" else {"usage": {"prompt_tokens": len(ids)}}
        await answer_json(value)(side)

    return behave
