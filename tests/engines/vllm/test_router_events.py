"""Our router in front of a real vLLM that publishes KV events: it knows what vLLM holds and forgets what it evicts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgi_client import ask

from semantickv.apps.build import build_router
from semantickv.edge.scripted_engine import ScriptedEngine
from semantickv.routing.fingerprint import cut_prompt
from semantickv.routing.prompt_view import read_prompt
from semantickv.settings import EdgeSettings

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def find_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class VllmServer:
    """One vLLM with room for some 1,400 tokens of KV."""

    def __init__(self, log: Path, model: str) -> None:
        self.port, events, replay = find_ports(3)
        self.events = f"tcp://127.0.0.1:{events}|tcp://127.0.0.1:{replay}"
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
        config["replay_endpoint"] = f"tcp://*:{replay}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--max-num-seqs", "4"]
        command += ["--enable-prompt-tokens-details", "--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--kv-events-config", json.dumps(config)]
        self.log = log
        environment = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_SERVER_DEV_MODE="1")
        self.process = subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self, seconds: float = 400) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).read()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise AssertionError("the server did not come up: " + self.log.read_text()[-3000:])

    def post(self, path: str, body: Any) -> bytes:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.read()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[VllmServer]:
    running = VllmServer(tmp_path_factory.mktemp("server") / "log.txt", os.environ["SEMBLEND_TEST_VLLM_MODEL"])
    try:
        running.wait()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(60)


def write_body(name: str) -> dict[str, Any]:
    text = " ".join(f"In {name} {n} the keeper of gate {n * 7 % 97} counted {n * 31 % 89} boats." for n in range(28))
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text}]
    return {"model": "m", "messages": messages, "max_tokens": 2, "temperature": 0}


async def wait_until(is_so: Any, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.02)


def test_the_router_knows_what_vllm_holds_and_forgets_what_it_evicts(server):
    async def test() -> None:
        async with ScriptedEngine() as other:
            settings = EdgeSettings(replicas=(server.url, other.url), kv_events=(server.events,), trace=False)
            app = build_router(settings)
            feeds = asyncio.ensure_future(app.feeds.run())
            feed = app.feeds.feeds["r0"]
            spring = json.dumps(write_body("spring")).encode()
            pieces = cut_prompt(read_prompt(spring).list_parts(), b"any")
            client, body = await ask(app, "POST", CHAT, body=spring, headers=JSON)
            assert (client.headers["x-replica-id"], client.headers["x-semantic-route"]) == ("r0", "cold_fallback")
            await wait_until(lambda: len(feed.held) == 1)
            assert (app.feeds.tokenized, app.feeds.failed) == (1, 0)
            assert feed.blocks.block_size == 32
            client, body = await ask(app, "POST", CHAT, body=spring, headers=JSON)
            assert client.headers["x-semantic-route"] == "exact_prefix_route"
            cached = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= 448
            # Somebody else fills vLLM's cache, and nothing of it goes through this router.
            for name in ("summer", "autumn", "winter"):
                await asyncio.to_thread(server.post, CHAT, write_body(name))
            await wait_until(lambda: feed.held.forgotten > 0)
            score = float(client.headers["x-semantic-score"])
            client, body = await ask(app, "POST", CHAT, body=spring, headers=JSON)
            usage = json.loads(body)["usage"] if client.headers["x-replica-id"] == "r0" else None
            assert float(client.headers["x-semantic-score"]) < score
            if usage is not None:
                held = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
                assert float(client.headers["x-semantic-score"]) <= held + 0.05  # a piece lost in part counts as lost
            assert pieces.total_tokens > 256
            feeds.cancel()
            await asyncio.gather(feeds, return_exceptions=True)

    asyncio.run(test())


def test_a_router_that_starts_later_learns_from_the_replay_and_a_reset_empties_everything(server):
    async def test() -> None:
        await asyncio.to_thread(server.post, CHAT, write_body("monday"))
        async with ScriptedEngine() as other:
            settings = EdgeSettings(replicas=(server.url, other.url), kv_events=(server.events,), trace=False)
            app = build_router(settings)
            feeds = asyncio.ensure_future(app.feeds.run())
            feed = app.feeds.feeds["r0"]
            await wait_until(lambda: len(feed.blocks) >= 14)
            assert feed.subscriber.replayed > 0
            monday = json.dumps(write_body("monday")).encode()
            client, body = await ask(app, "POST", CHAT, body=monday, headers=JSON)
            assert json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 448
            await wait_until(lambda: len(feed.held) == 1)
            await asyncio.to_thread(server.post, "/reset_prefix_cache", {})
            await asyncio.to_thread(server.post, CHAT, write_body("tuesday"))  # vLLM publishes with its next step
            await wait_until(lambda: feed.replica.memory.tokens == 0 or feed.held.forgotten)
            client, _ = await ask(app, "POST", CHAT, body=monday, headers=JSON)
            assert client.headers["x-semantic-route"] == "cold_fallback"
            feeds.cancel()
            await asyncio.gather(feeds, return_exceptions=True)

    asyncio.run(test())
