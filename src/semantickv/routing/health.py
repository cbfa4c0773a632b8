"""Asks every replica now and then whether it is well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from semantickv.edge.upstream_call import Fault, FaultKind, OutgoingRequest, fetch
from semantickv.routing.replica import Replica
from semantickv.routing.router import Router
from semantickv.settings import EdgeSettings

PROBE = OutgoingRequest("GET", "/health", [], b"")
PROBE_S = 2.0
AGAIN_S = 0.5
"""After a failed check the next one comes this soon: a replica that hangs is out within seconds."""


async def probe_replica(replica: Replica, timeout_s: float = PROBE_S) -> bool:
    """Ask one replica; any answer below 500 counts: an engine without /health is alive as well."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await fetch(replica.pool, PROBE, timeout_s)
    except TimeoutError:
        return False
    if isinstance(answer, Fault):
        if answer.kind is FaultKind.REFUSED:
            replica.note_refused()
        return False
    return answer.status < 500


class HealthWatch:
    """The health checks of a router. `look` may be called at any time; checks that are fresh are not repeated."""

    def __init__(self, router: Router, settings: EdgeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._settings = settings
        self._clock = clock
        self._checked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def look(self, max_age_s: float = 0.0) -> None:
        """Probe all replicas side by side, unless that was done less than ``max_age_s`` ago."""
        async with self._lock:
            if self._clock() - self._checked_at < max_age_s:
                return
            replicas = self._router.replicas
            probes = (probe_replica(one, self._settings.health_timeout_s) for one in replicas)
            results = await asyncio.gather(*probes, return_exceptions=True)
            for replica, result in zip(replicas, results, strict=True):
                replica.note_probe(result is True)  # an error is no good sign either
            self._checked_at = self._clock()

    async def run(self, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep) -> None:
        """Probe again and again, until cancelled; sooner while a check has failed and the next one decides."""
        while True:
            await self.look()
            is_doubtful = any(one.is_doubtful for one in self._router.replicas)
            await sleep(min(AGAIN_S, self._settings.health_s) if is_doubtful else self._settings.health_s)
