"""Recorded from real engines (tests/engines/record_kv_events.py): what the router believes is what the engine had."""

from __future__ import annotations

import asyncio
import base64
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from semantickv.edge.upstream_call import EngineAddress, Upstream
from semantickv.engine_state.cache_follower import FollowedCache
from semantickv.engine_state.events import list_marks, read_batch, start_chain
from semantickv.engine_state.subscriber import EventSource
from semantickv.routing.fingerprint import cut_prompt
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.prompt_view import PromptView
from semantickv.routing.replica import Replica

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


def count_cached(usage: dict[str, Any]) -> int:
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_router_expects_what_the_engine_then_had_cached(path):
    replica = Replica("r0", Upstream(EngineAddress.parse("http://127.0.0.1:9")), ReplicaMemory(1_000_000))
    cache = FollowedCache(replica, EventSource("tcp://127.0.0.1:9"))
    steps = json.loads(path.read_text())["steps"]
    seen: dict[str, int] = {}
    for step in steps:
        batches = [read_batch(base64.b64decode(data)) for data in step["batches"]]
        if step["body"] is None:  # the cache was emptied
            asyncio.run(take_all(cache, batches))
            continue
        pieces = cut_prompt(PromptView(step["body"]).list_parts(), b"tenant")
        cached, tokens = count_cached(step["usage"]), step["tokens"]
        assert len(tokens) == step["usage"]["prompt_tokens"]
        size = cache.blocks.block_size
        if size:
            marks = list_marks(tokens, size, start_chain(""))
            held = sum(1 for _ in takewhile(cache.blocks.holds, marks))
            # An engine computes at least one token, and may count whole blocks only.
            assert min(held * size, len(tokens) - 1) == pytest.approx(cached, abs=max(1, size))
        if step["name"] in seen:
            expected = replica.memory.match(pieces).prefix_tokens / pieces.total_tokens
            # A piece of which one block is gone counts as gone.
            assert cached / len(tokens) - max(pieces.tokens) / pieces.total_tokens - 0.1 <= expected
            assert expected <= cached / len(tokens) + 0.1
        replica.memory.note(pieces)
        asyncio.run(take_all(cache, batches))
        cache.held.link(
            pieces.chains[-1], pieces, list(list_marks(tokens, cache.blocks.block_size, start_chain(""))), len(tokens)
        )
        seen[step["name"]] = cached
    assert any(seen.values()), "nothing was ever reused: the recording shows nothing"


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_recording_holds_evictions(path):
    steps = json.loads(path.read_text())["steps"]
    kinds = {
        type(event).__name__
        for step in steps
        for data in step["batches"]
        for event in read_batch(base64.b64decode(data))
    }
    assert {"BlockStored", "BlockRemoved"} <= kinds


async def take_all(cache: FollowedCache, batches: list[Any]) -> None:
    for events in batches:
        await cache.take(events)
