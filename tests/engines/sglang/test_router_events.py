"""Our router in front of a real SGLang that publishes KV events: pages of one token, replays, evictions, a flush."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from following_router import check_it_forgets_what_is_evicted, check_it_learns_from_a_replay
from http_server import FLAGS, STOCK, Server, find_port

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOM = [flag if flag != "6144" else "2100" for flag in FLAGS]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    events, replay = find_port(), find_port()
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    log = tmp_path_factory.mktemp("server") / "log.txt"
    more = ("--kv-events-config", json.dumps(config), "--served-model-name", "m")
    running = Server(log, *more, command=STOCK, flags=ROOM)
    running.events = f"tcp://127.0.0.1:{events}|tcp://127.0.0.1:{replay}"
    try:
        yield running
    finally:
        running.stop()


def test_the_router_knows_what_sglang_holds_and_forgets_what_it_evicts(server):
    url, fillers = f"http://127.0.0.1:{server.port}", ("summer", "autumn", "winter", "june", "july")
    asyncio.run(check_it_forgets_what_is_evicted(url, server.events, server.post, fillers))


def test_a_router_that_starts_later_learns_from_the_replay_and_a_flush_empties_everything(server):
    url = f"http://127.0.0.1:{server.port}"
    asyncio.run(check_it_learns_from_a_replay(url, server.events, server.post, "/flush_cache"))
