"""The paths that the proxy and the router answer themselves: health, records, and what only the operator may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from semantickv.apps.answers import NOT_FOUND, NOT_OPERATOR, send_bytes, send_error, send_json
from semantickv.apps.callers import identify_caller, is_operator
from semantickv.engine_state.feed import EngineFeeds
from semantickv.routing.replica import Health
from semantickv.routing.router import Router
from semantickv.settings import EdgeSettings
from semantickv.telemetry.fleet_book import FleetBook
from semantickv.telemetry.metrics import EdgeMetrics
from semantickv.telemetry.record import RecordStore
from semblend.web.site import HEADERS, build_fleet
from semblend.wire.caller_headers import find_repeated

if TYPE_CHECKING:
    from starlette.types import Scope, Send

    from semantickv.shared_state.exchange import StateExchange
    from semantickv.shared_state.redis_link import RedisLink

OPERATOR_PATHS = ("/metrics", "/v1/replicas", "/v1/fleet", "/v1/traces/latest")
PAGE_FILES = build_fleet()
PAGE_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in HEADERS.items())


@dataclass(frozen=True, slots=True)
class OwnPaths:
    """Answers what is asked of this server itself. ``list_traces`` gives the latest trace lines."""

    settings: EdgeSettings
    router: Router
    metrics: EdgeMetrics
    records: RecordStore
    list_traces: Callable[[], Sequence[str]]
    feeds: EngineFeeds | None = None
    link: RedisLink[StateExchange] | None = None
    fleet: FleetBook | None = None

    async def answer(self, scope: Scope, send: Send) -> None:
        """Answer a request that is not forwarded."""
        path, headers = scope["path"], scope["headers"]
        if scope["method"] != "GET":
            await send_error(send, NOT_FOUND)
        elif repeated := find_repeated(headers):
            await send_error(send, repeated)
        elif path == "/health":
            found = describe_health(self.router)
            await send_json(send, found, 200 if found["replicas_up"] else 503)
        elif path.startswith("/v1/requests/"):
            caller = identify_caller(headers, self.settings.hash_key)
            record = self.records.find(caller.namespace, path.removeprefix("/v1/requests/"))
            await (send_error(send, NOT_FOUND) if record is None else send_json(send, record.to_dict()))
        elif path in PAGE_FILES and self.fleet is not None:
            body, kind = PAGE_FILES[path]
            await send_bytes(send, 200, body, kind.encode(), PAGE_HEADERS)
        elif path not in OPERATOR_PATHS or (path == "/v1/fleet" and self.fleet is None):
            await send_error(send, NOT_FOUND)
        elif not is_operator(headers, (scope.get("client") or ("", 0))[0], self.settings.admin_key):
            await send_error(send, NOT_OPERATOR)
        else:
            await self._answer_operator(path, send)

    def _describe(self) -> dict[str, Any]:
        shared = None if self.link is None else self.link.describe()
        return describe_replicas(self.router, self.feeds) | {"shared_state": shared}

    async def _answer_operator(self, path: str, send: Send) -> None:
        if path == "/metrics":
            await send_bytes(send, 200, self.metrics.write(), b"text/plain; version=0.0.4; charset=utf-8")
        elif path == "/v1/replicas":
            await send_json(send, self._describe())
        elif path == "/v1/fleet" and self.fleet is not None:
            await send_json(send, describe_fleet(self._describe(), self.fleet, self.router))
        else:
            lines = ",".join(self.list_traces())
            await send_bytes(send, 200, f'{{"requests": [{lines}]}}'.encode(), b"application/json")


def describe_health(router: Router) -> dict[str, Any]:
    """Count the replicas by whether they answer; for everybody, so without names."""
    up = sum(one.is_up for one in router.replicas)
    unknown = sum(one.health is Health.UNKNOWN for one in router.replicas)
    return {
        "status": "ok" if up else "no replica",
        "replicas_up": up,
        "replicas_unknown": unknown,
        "replicas_down": len(router.replicas) - up - unknown,
    }


def describe_fleet(replicas: dict[str, Any], fleet: FleetBook, router: Router) -> dict[str, Any]:
    """Describe everything that the fleet page shows."""
    for one in replicas["replicas"]:
        totals = fleet.totals.get(one["id"])
        one["reported"] = None if totals is None else asdict(totals)
    return {
        **replicas,
        "time_unix_s": fleet.clock(),
        "outcomes": dict(fleet.outcomes),
        "reuses": dict(fleet.reuses),
        "documents": fleet.list_documents(router.replicas),
        "decisions": fleet.list_decisions(),
    }


def describe_replicas(router: Router, feeds: EngineFeeds | None = None) -> dict[str, Any]:
    """Describe every replica with its load and its health, for the operator."""
    heard = {} if feeds is None else {name: feed.describe() for name, feed in feeds.feeds.items()}
    return {
        "policy": router.policy,
        "engine_reuse": router.reuse.value,
        "sessions": router.sessions,
        "prompts": None if feeds is None else feeds.describe(),
        "replicas": [
            {
                "id": one.id,
                "url": one.pool.address.url,
                "up": one.is_up,
                "health": one.health.value,
                "breaker": one.breaker.state.value,
                "running": one.running,
                "running_elsewhere": one.running_elsewhere,
                "waiting_tokens": one.waiting_tokens,
                "served": one.served,
                "faults": dict(one.faults),
                "tracked_tokens": one.memory.tokens,
                "kv_events": heard.get(one.id),
                "connections": {"open": one.pool.open, "idle": one.pool.idle},
            }
            for one in router.replicas
        ],
    }
