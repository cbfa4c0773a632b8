"""Asks every replica now and then whether it is well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from semantickv.edge.exchange import EngineTimeouts, OutgoingRequest, fetch
from semantickv.edge.faults import Fault, FaultKind
from semantickv.routing.replica import Replica

PROBE = OutgoingRequest("GET", "/health", [], b"")
PROBE_TIMEOUTS = EngineTimeouts(answer_s=2.0, silence_s=2.0)


async def probe_replica(replica: Replica) -> bool:
    """Ask one replica; any answer below 500 counts: an engine without /health is alive as well."""
    answer = await fetch(replica.pool, PROBE, PROBE_TIMEOUTS)
    if isinstance(answer, Fault):
        if answer.kind is FaultKind.REFUSED:
            replica.note_refused()
        return False
    return answer.status < 500


async def watch_health(
    replicas: Sequence[Replica], every_s: float, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
) -> None:
    """Probe all replicas side by side, again and again, until cancelled."""
    while True:
        results = await asyncio.gather(*map(probe_replica, replicas), return_exceptions=True)
        for replica, result in zip(replicas, results, strict=True):
            replica.note_probe(result is True)  # an error is no good sign either
        await sleep(every_s)
