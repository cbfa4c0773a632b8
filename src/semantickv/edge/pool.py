"""The connections to one engine: idle ones are used again, the newest first."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from semantickv.edge.addresses import EngineAddress
from semantickv.edge.connection import EngineConnection
from semantickv.edge.faults import Fault, FaultKind

MOST_IDLE = 256
IDLE_S = 30.0


class ConnectionPool:
    """For one event loop. Whoever takes a connection gives it back, whole or broken."""

    def __init__(
        self, address: EngineAddress, *, connect_timeout_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.address = address
        self.open = 0
        """Connections taken and not given back."""
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._idle: deque[tuple[float, EngineConnection]] = deque()

    def take_idle(self) -> EngineConnection | None:
        """Take an idle connection; None if there is none. The engine may just have closed it."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.is_reusable and self._clock() - since <= IDLE_S:
                self.open += 1
                return connection
            connection.close()
        return None

    async def connect(self) -> EngineConnection | Fault:
        """Open a connection, and take it."""
        self.open += 1
        try:
            found = await self._connect()
        except BaseException:
            self.open -= 1
            raise
        if isinstance(found, Fault):
            self.open -= 1
        return found

    def give_back(self, connection: EngineConnection) -> None:
        """Keep a connection whose exchange ended well for the next one; close any other."""
        self.open -= 1
        if not connection.is_reusable:
            connection.close()
            return
        now = self._clock()
        self._idle.append((now, connection))
        while len(self._idle) > MOST_IDLE or now - self._idle[0][0] > IDLE_S:
            self._idle.popleft()[1].close()

    @property
    def idle(self) -> int:
        return len(self._idle)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _connect(self) -> EngineConnection | Fault:
        address, loop = self.address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    EngineConnection, address.host, address.port, ssl=address.tls
                )
        except TimeoutError:
            return Fault(FaultKind.CONNECT_TIMEOUT, f"no connection in {self._connect_timeout_s:g} s")
        except (OSError, UnicodeError) as error:  # refused, unreachable, no such name, a certificate without trust
            return Fault(FaultKind.REFUSED, getattr(error, "strerror", None) or type(error).__name__)
        return connection
