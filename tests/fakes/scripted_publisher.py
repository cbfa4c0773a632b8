"""An engine's publisher of KV events that does what a test tells it to, on real ZMQ sockets.

async with ScriptedPublisher() as publisher:
    await publisher.publish(store([11, 12], parent=None, tokens=range(32), size=16))
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from semantickv.engine_state.subscriber import import_zmq

_END = (-1).to_bytes(8, "big", signed=True)


def store(hashes: Sequence[int], parent: int | None, tokens: Iterable[int], size: int, **more: Any) -> dict[str, Any]:
    """The event that blocks were stored, as vLLM writes it."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": list(tokens),
        "block_size": size, "lora_id": None, "medium": "GPU", **more,
    }  # fmt: skip


def remove(hashes: Sequence[int], medium: str = "GPU") -> dict[str, Any]:
    """The event that blocks were removed."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEAR = {"type": "AllBlocksCleared"}


class ScriptedPublisher:
    """Publishes and answers replays. `publish` with ``lose=True`` counts a batch that nobody gets to see."""

    def __init__(self, *, has_replay: bool = True) -> None:
        self.endpoint = self.replay = ""
        self._has_replay = has_replay
        self._number = 0
        self._buffer: list[tuple[bytes, bytes]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """As SEMANTICKV_KV_EVENTS takes it."""
        return f"{self.endpoint}|{self.replay}" if self.replay else self.endpoint

    async def __aenter__(self) -> ScriptedPublisher:
        zmq = import_zmq()
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # tells of subscribers, so that a test can wait for one
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        if self._has_replay:
            self._router = self._context.socket(zmq.ROUTER)
            self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
            self._task = asyncio.ensure_future(self._answer())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        self._context.destroy(0)

    async def wait_for_subscriber(self) -> None:
        """Wait until somebody listens."""
        await self._pub.recv()

    async def publish(self, *events: Any, lose: bool = False, number: int | None = None) -> None:
        """Publish one batch; with ``number`` under that number, as after a restart."""
        import msgspec.msgpack

        if number is not None:
            self._number = number
            self._buffer.clear()
        await self.publish_raw(msgspec.msgpack.encode([0.0, list(events), 0]), lose=lose)

    async def publish_raw(self, data: bytes, *, lose: bool = False) -> None:
        """Publish any bytes as the next batch."""
        name = self._number.to_bytes(8, "big")
        self._number += 1
        self._buffer.append((name, data))
        if not lose:
            await self._pub.send_multipart([b"kv", name, data])

    def drop_buffer(self) -> None:
        """Forget what a replay could bring."""
        self._buffer.clear()

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            for name, data in self._buffer:
                if name >= start:
                    await self._router.send_multipart([client, b"", b"kv", name, data])
            await self._router.send_multipart([client, b"", b"", _END, b""])
