"""What the router tells an operator, and everybody, about itself: as values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from semantickv.engine_state.cache_follower import CacheFollower
from semantickv.routing.replica import Health, Replica
from semantickv.routing.router import Router
from semantickv.telemetry.fleet_book import FleetBook


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


def describe_replicas(router: Router, follower: CacheFollower | None = None) -> dict[str, Any]:
    """Describe every replica with its load and its health, for the operator."""
    heard = {} if follower is None else {name: cache.describe() for name, cache in follower.caches.items()}
    return {
        "policy": router.policy,
        "engine_reuse": router.reuse.value,
        "sessions": router.sessions,
        "prompts": None if follower is None else follower.describe(),
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
