"""The link to Redis: one stream that all routers of a group write to and read from.

Every entry is bounded, the stream is bounded, and everything expires. Entries are signed with a secret that all routers
share; one that is not ours, or is broken, is counted and left out. The link runs beside the requests; all that it can
do to them is to bring no news.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from contextlib import suppress
from typing import Any, Generic

from semantickv.shared_state.messages import MOST_BYTES, read_messages, write_messages
from semantickv.shared_state.sync import SyncT
from semblend.errors import ConfigError, MissingDependencyError

FLUSH_S = 0.05
LOAD_S = 0.5
COMMAND_S = 5.0
"""How long a command may take before the connection counts as broken."""
BLOCK_MS = 1000
STOP_S = 3.0
"""How long a link that ends waits for its work to end: a read that cannot be cancelled takes a second."""
MOST_ENTRIES = 4096
"""Entries in the stream; a router that was away for longer gets a snapshot anyway."""
MOST_MESSAGES = 64
"""Messages in one entry."""
LIFE_S = 3600
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class RedisLink(Generic[SyncT]):
    """Runs until cancelled, and connects again for as long as it lives."""

    def __init__(self, url: str, group: str, sync: SyncT, secret: str = "") -> None:
        self.sync = sync
        self.is_connected = False
        self.connections = self.failures = self.garbage = self.unsigned = 0
        self.sender = secrets.token_hex(8)
        self._last: str | None = None
        self._is_stopping = False
        self._secret = hashlib.blake2b(secret.encode(), person=b"semantickv.sign").digest() if secret else b""
        self._key = f"semantickv:{group}:deltas"
        self._redis = _import_redis()
        self._url = url
        try:
            self._redis.from_url(url)
        except ValueError as error:
            raise ConfigError(f"SEMANTICKV_REDIS_URL: {error}", hint="for example redis://127.0.0.1:6379/0") from None

    async def run(self) -> None:
        """Exchange news until cancelled.

        The client library may keep a cancellation for itself, and a group of tasks hides one when a task fails in the
        same moment (both seen, redis 8.1 and Python 3.11). So the work has a task of its own and a flag that ends it.
        """
        self._is_stopping = False
        work = asyncio.ensure_future(self._work())
        try:
            await asyncio.wait([work])
        finally:
            self._is_stopping = True
            work.cancel()
            await asyncio.wait([work], timeout=STOP_S)

    async def _work(self) -> None:
        """Exchange news for as long as Redis is there; wait and try again when it is not."""
        pause = FIRST_PAUSE_S
        while not self._is_stopping:
            client = self._redis.from_url(
                self._url, socket_timeout=COMMAND_S, socket_connect_timeout=COMMAND_S, retry=None, max_connections=4
            )
            try:
                last = await self._find_start(client)
                self.connections += 1
                self.is_connected, pause = True, FIRST_PAUSE_S
                self.sync.note_joined()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._write(client))
                    group.create_task(self._read(client, last))
            except Exception:  # a client library's errors come in many shapes, and none may end this task
                self.failures += 1
            finally:
                self.is_connected = False
                await _close(client)
            self.sync.update_loads()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _find_start(self, client: Any) -> str:
        """The entry to read on from: the last one that we saw.

        For a link that is new, the stream's last one: what came before is in the snapshots that a `Hello` brings.
        """
        found = await client.xrevrange(self._key, count=1)
        end = _decode(found[0][0]) if found else "0-0"
        return end if self._last is None or _order(self._last) > _order(end) else self._last

    async def _write(self, client: Any) -> None:
        """Send what waits, twenty times a second, and the load twice a second."""
        turns = 0
        while not self._is_stopping:
            if turns % round(LOAD_S / FLUSH_S) == 0:
                self.sync.update_loads()
                await self._send(client, self.sync.list_loads())
            while messages := self.sync.list_outgoing(MOST_MESSAGES):
                await self._send(client, messages)
            turns += 1
            await asyncio.sleep(FLUSH_S)

    async def _send(self, client: Any, messages: list[Any]) -> None:
        data = write_messages(messages)
        if len(data) > MOST_BYTES:
            for half in (messages[: len(messages) // 2], messages[len(messages) // 2 :]):
                if len(messages) > 1:
                    await self._send(client, half)
            return
        pipe = client.pipeline(transaction=False)
        entry = {"from": self.sender, "news": data, "sign": self._sign(self.sender.encode(), data)}
        pipe.xadd(self._key, entry, maxlen=MOST_ENTRIES, approximate=True)
        pipe.expire(self._key, LIFE_S)
        await pipe.execute()

    async def _read(self, client: Any, last: str) -> None:
        while not self._is_stopping:
            found = await client.xread({self._key: last}, count=64, block=BLOCK_MS)
            for _, entries in found or ():
                for name, fields in entries:
                    self._last = last = _decode(name)
                    self._take(fields)
                    await asyncio.sleep(0)

    def _take(self, fields: Any) -> None:
        """Take one entry of the stream, from whoever wrote it."""
        sender, data = (fields or {}).get(b"from"), (fields or {}).get(b"news")
        if not isinstance(sender, bytes) or not isinstance(data, bytes):
            self.garbage += 1
        elif self._secret and not self._is_signed(sender, data, (fields or {}).get(b"sign")):
            self.unsigned += 1
        elif sender != self.sender.encode():
            messages = read_messages(data)
            if messages is None:
                self.garbage += 1
            else:
                self.sync.take(sender[:32].decode("latin-1"), messages)

    def _sign(self, sender: bytes, data: bytes) -> bytes:
        """The signature of an entry; without a secret it is worth nothing, and nobody asks for it."""
        return hashlib.blake2b(sender + b"\0" + data, key=self._secret, digest_size=32).digest()

    def _is_signed(self, sender: bytes, data: bytes, sign: Any) -> bool:
        return isinstance(sign, bytes) and hmac.compare_digest(sign, self._sign(sender, data))

    def describe(self) -> dict[str, Any]:
        """Counts for the operator."""
        return {
            "connected": self.is_connected, "connections": self.connections, "failures": self.failures,
            "garbage": self.garbage, "unsigned": self.unsigned, **self.sync.describe(),
        }  # fmt: skip


def _order(name: str) -> tuple[int, ...]:
    """The place of an entry in its stream: milliseconds and a number.

    >>> _order("1700000000000-10") > _order("1700000000000-9")
    True
    """
    return tuple(int(part) if part.isdecimal() else 0 for part in name.split("-"))


def _decode(name: Any) -> str:
    return name.decode("latin-1") if isinstance(name, bytes) else str(name)


async def _close(client: Any) -> None:
    with suppress(Exception):  # it is broken already, and the next link says so
        async with asyncio.timeout(COMMAND_S):
            await client.aclose()


def _import_redis() -> Any:
    try:
        import redis.asyncio
    except ImportError:
        raise MissingDependencyError(
            "shared state needs the redis client", hint="pip install 'semblend-suite[edge]'"
        ) from None
    return redis.asyncio
