"""Our router in front of a real vLLM that publishes KV events: it knows what vLLM holds and forgets what it evicts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from following_router import check_it_forgets_what_is_evicted, check_it_learns_from_a_replay
from forks import ForkedServer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


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
        self.process = ForkedServer(command, env=environment, stdout=log.open("w"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self, seconds: float = 1200) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(self.url + "/health", timeout=30).read()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise AssertionError("the server did not come up: " + self.log.read_text()[-3000:])

    def post(self, path: str, body: Any) -> bytes:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
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


def test_the_router_knows_what_vllm_holds_and_forgets_what_it_evicts(server):
    fillers = ("summer", "autumn", "winter")
    asyncio.run(check_it_forgets_what_is_evicted(server.url, server.events, server.post, fillers))


def test_a_router_that_starts_later_learns_from_the_replay_and_a_reset_empties_everything(server):
    asyncio.run(check_it_learns_from_a_replay(server.url, server.events, server.post, "/reset_prefix_cache"))
