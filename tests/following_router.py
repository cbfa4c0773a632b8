"""Our router in front of a real engine that publishes KV events: what must hold for every engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from asgi_client import ask

from semantickv.apps.build import build_router
from semantickv.apps.gateway import Gateway
from semantickv.engine_state.cache_follower import FollowedCache
from semantickv.settings import EdgeSettings
from tests.fakes.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
Post = Callable[[str, Any], Any]


def write_body(name: str) -> dict[str, Any]:
    """A chat of some 500 tokens about one made-up document."""
    text = " ".join(f"In {name} {n} the keeper of gate {n * 7 % 97} counted {n * 31 % 89} boats." for n in range(28))
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text}]
    return {"model": "m", "messages": messages, "max_tokens": 2, "temperature": 0}


@asynccontextmanager
async def following(url: str, events: str) -> AsyncIterator[tuple[Gateway, FollowedCache]]:
    """A router over the engine and a scripted one, with the cache of the former followed."""
    async with ScriptedEngine() as other:
        app = build_router(EdgeSettings(replicas=(url, other.url), kv_events=(events,), trace=False))
        assert app.follower is not None
        running = asyncio.ensure_future(app.follower.run())
        try:
            yield app, app.follower.caches["r0"]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await app.close()


async def send(app: Gateway, name: str) -> tuple[dict[str, str], int | None]:
    """Send a document; return the headers, and the tokens that the real engine had cached, if it served."""
    client, body = await ask(app, "POST", CHAT, body=json.dumps(write_body(name)).encode(), headers=JSON)
    assert client.status == 200, body
    usage = json.loads(body).get("usage")
    details = (usage or {}).get("prompt_tokens_details") or {}
    return client.headers, None if usage is None else details.get("cached_tokens", 0)


async def wait_until(is_so: Callable[[], Any], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.02)


async def check_it_forgets_what_is_evicted(url: str, events: str, post: Post, fillers: tuple[str, ...]) -> None:
    """A document is known after one request, and no longer known once others have filled the engine's cache."""
    async with following(url, events) as (app, cache):
        headers, _ = await send(app, "spring")
        assert (headers["x-replica-id"], headers["x-semantic-route"]) == ("r0", "cold_fallback")
        await wait_until(lambda: len(cache.held) == 1)
        assert app.follower is not None
        assert (app.follower.tokenized, app.follower.failed) == (1, 0)
        headers, cached = await send(app, "spring")
        assert headers["x-semantic-route"] == "exact_prefix_route"
        assert cached is not None
        assert cached >= 448
        score = float(headers["x-semantic-score"])
        for name in fillers:  # by somebody else: nothing of it goes through this router
            await asyncio.to_thread(post, CHAT, write_body(name))
        await wait_until(lambda: cache.held.forgotten > 0)
        headers, cached = await send(app, "spring")
        assert float(headers["x-semantic-score"]) < score
        if cached is not None:  # a piece of which a block is gone counts as gone
            assert float(headers["x-semantic-score"]) <= cached / 490 + 0.05


async def check_it_learns_from_a_replay(url: str, events: str, post: Post, reset: str) -> None:
    """A router that starts late knows what the engine holds; after a reset it knows that nothing is left."""
    await asyncio.to_thread(post, CHAT, write_body("monday"))
    async with following(url, events) as (app, cache):
        await wait_until(lambda: len(cache.blocks) * cache.blocks.block_size >= 448)
        assert cache.subscriber.replayed > 0
        _, cached = await send(app, "monday")
        assert cached is not None
        assert cached >= 448
        await wait_until(lambda: len(cache.held) == 1)
        await asyncio.to_thread(post, reset, {})
        await asyncio.to_thread(post, CHAT, write_body("tuesday"))  # an engine publishes with its next step
        await wait_until(lambda: cache.replica.memory.tokens == 0 or cache.held.forgotten)
        headers, _ = await send(app, "monday")
        assert headers["x-semantic-route"] == "cold_fallback"
