"""The paths that the proxy and the router answer themselves: health, records, and what only the operator may see."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from semantickv.apps.callers import identify_caller, is_operator
from semantickv.apps.proxy import NOT_FOUND, NOT_OPERATOR, send_bytes, send_error, send_json
from semantickv.engine_state.feed import EngineFeeds
from semantickv.routing.replica import Health, Replica
from semantickv.routing.router import Router
from semantickv.telemetry.fleet_book import FleetBook
from semblend.errors import ConfigError
from semblend.web.site import HEADERS, build_fleet
from semblend.wire.caller_headers import find_repeated
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from semantickv.apps.gateway import Gateway

OPERATOR_PATHS = ("/metrics", "/v1/replicas", "/v1/fleet", "/v1/traces/latest")
REPLICAS = "/v1/replicas"
FRESH_S = 1.0
"""A health check this old answers for /health; an older one is repeated first."""
PAGE_FILES = build_fleet()
PAGE_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in HEADERS.items())


@dataclass(frozen=True, slots=True)
class OwnPaths:
    """Answers what is asked of this server itself."""

    gateway: Gateway

    @property
    def fleet(self) -> FleetBook | None:
        return self.gateway.fleet if self.gateway.shows_routes else None

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not forwarded."""
        gateway = self.gateway
        method, path, headers = scope["method"], scope["path"], scope["headers"]
        changes = self.fleet is not None and (
            (method == "POST" and path == REPLICAS) or (method == "DELETE" and path.startswith(REPLICAS + "/"))
        )
        if method != "GET" and not changes:
            await send_error(send, NOT_FOUND)
        elif repeated := find_repeated(headers):
            await send_error(send, repeated)
        elif path == "/health":
            await gateway.health.look(FRESH_S)
            found = describe_health(gateway.router)
            await send_json(send, found, 200 if found["replicas_up"] else 503)
        elif path.startswith("/v1/requests/"):
            caller = identify_caller(headers, gateway.settings.hash_key)
            record = gateway.records.find(caller.namespace, path.removeprefix("/v1/requests/"))
            await (send_error(send, NOT_FOUND) if record is None else send_json(send, record.to_dict()))
        elif path in PAGE_FILES and self.fleet is not None:
            body, kind = PAGE_FILES[path]
            await send_bytes(send, 200, body, kind.encode(), PAGE_HEADERS)
        elif not changes and (path not in OPERATOR_PATHS or (path == "/v1/fleet" and self.fleet is None)):
            await send_error(send, NOT_FOUND)
        elif not is_operator(headers, (scope.get("client") or ("", 0))[0], gateway.settings.admin_key):
            await send_error(send, NOT_OPERATOR)
        elif changes:
            await self._change_replicas(scope, receive, send)
        else:
            await self._answer_operator(path, send)

    def _describe(self) -> dict[str, Any]:
        link = self.gateway.link
        found = describe_replicas(self.gateway.router, self.gateway.feeds)
        return found | {"shared_state": None if link is None else link.describe()}

    async def _answer_operator(self, path: str, send: Send) -> None:
        if path == "/metrics":
            await send_bytes(send, 200, self.gateway.metrics.write(), b"text/plain; version=0.0.4; charset=utf-8")
        elif path == REPLICAS:
            await send_json(send, self._describe())
        elif path == "/v1/fleet" and self.fleet is not None:
            await send_json(send, describe_fleet(self._describe(), self.fleet, self.gateway.router))
        else:
            lines = ",".join(self.gateway.list_traces())
            await send_bytes(send, 200, f'{{"requests": [{lines}]}}'.encode(), b"application/json")

    async def _change_replicas(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add a replica (POST with its url) or remove one (DELETE by its id)."""
        gateway = self.gateway
        assert gateway.source is not None
        try:
            if scope["method"] == "DELETE":
                name = scope["path"].removeprefix(REPLICAS + "/")
                gone = gateway.source.remove(gateway, name)
                await send_json(send, {"removed": gone.id, "running": gone.running})
                return
            body = await gateway.intake.read_body(scope["headers"], receive)
            if isinstance(body, bytes):
                gateway.intake.held_bytes -= len(body)
                added = gateway.source.add(gateway, *_read_replica(body))
                await send_json(send, describe_replica(added), 201)
            elif isinstance(body, ApiError):
                await send_error(send, body)
        except ConfigError as error:
            await send_error(send, ApiError(400, error.message, hint=error.hint))
        except KeyError:
            await send_error(send, ApiError(404, "no such replica", hint="GET /v1/replicas lists their ids"))


def _read_replica(body: bytes) -> tuple[str, str]:
    try:
        fields = json.loads(body)
        url, events = fields["url"], fields.get("kv_events", "")
        if isinstance(url, str) and isinstance(events, str):
            return url, events
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError("the body names no replica", hint='send {"url": "http://127.0.0.1:8103"}')


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
        "replicas": [describe_replica(one) | {"kv_events": heard.get(one.id)} for one in router.replicas],
    }


def describe_replica(one: Replica) -> dict[str, Any]:
    """Describe one replica, for the operator."""
    return {
        "id": one.id,
        "url": one.pool.address.url,
        "up": one.is_up,
        "health": one.health.value,
        "breaker": one.breaker.state.value,
        "hung": one.is_hung,
        "slowness": round(one.slowness, 2),
        "running": one.running,
        "running_elsewhere": one.running_elsewhere,
        "waiting_tokens": one.waiting_tokens,
        "served": one.served,
        "faults": dict(one.faults),
        "faults_of_requests": one.requests_own_faults,
        "tracked_tokens": one.memory.tokens,
        "kv_events": None,
        "connections": {"open": one.pool.open, "idle": one.pool.idle},
    }
