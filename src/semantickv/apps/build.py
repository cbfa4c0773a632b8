"""Builds the applications from settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from semantickv.apps.gateway import Gateway
from semantickv.edge.addresses import EngineAddress
from semantickv.edge.pool import ConnectionPool
from semantickv.engine_state.feed import EngineFeeds, ReplicaFeed
from semantickv.engine_state.subscriber import EventSource
from semantickv.routing.health import probe_replica
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.replica import Replica
from semantickv.routing.router import EngineReuse, Router
from semantickv.settings import EdgeSettings
from semantickv.shared_state.open_link import open_link
from semantickv.telemetry.trace_log import TraceLog, TraceOptions
from semblend.arrange import Arranger
from semblend.errors import ConfigError

if TYPE_CHECKING:
    from semantickv.shared_state.exchange import StateExchange

log = logging.getLogger("semantickv")

MOST_FLEET_TOKENS = 256_000_000
"""Tokens that a router remembers of all its replicas together: 1.6 GB (research/edge/placement_scale.py)."""


def build_proxy(settings: EdgeSettings) -> Gateway:
    """Build the telemetry proxy: one engine, no choice."""
    if not settings.upstream:
        raise ConfigError(
            "the proxy has no engine to forward to", hint="set SEMANTICKV_UPSTREAM_BASE_URL or pass --upstream"
        )
    router = Router([_build_replica("engine", settings.upstream, settings, settings.max_tracked_tokens)], "round_robin")
    return Gateway(settings, router, _build_trace_log(settings, "proxy"))


def build_router(settings: EdgeSettings) -> Gateway:
    """Build the locality router over all replicas."""
    if not settings.replicas:
        raise ConfigError(
            "the router has no replicas", hint="SEMANTICKV_REPLICAS=http://a:8101,http://b:8102, or --replicas"
        )
    reuse = EngineReuse.parse(settings.engine_reuse)
    tracked = min(settings.max_tracked_tokens, MOST_FLEET_TOKENS // len(settings.replicas))
    if tracked < settings.max_tracked_tokens:
        log.info("of %d replicas, %d tokens each are remembered", len(settings.replicas), tracked)
    replicas = [_build_replica(f"r{at}", url, settings, tracked) for at, url in enumerate(settings.replicas)]
    for replica in replicas if settings.arrange else ():
        replica.arranger = Arranger.for_cache(tracked)
    if len({replica.pool.address.url for replica in replicas}) < len(replicas):
        raise ConfigError("a replica is named twice", hint="give every engine once")
    router = Router(replicas, settings.policy, reuse=reuse, keep_sessions=settings.session_affinity)
    feeds, link = _build_feeds(replicas, settings), open_link(settings, lambda: _build_exchange(router))
    return Gateway(settings, router, _build_trace_log(settings, "router"), shows_routes=True, feeds=feeds, link=link)


def _build_exchange(router: Router) -> StateExchange:
    from semantickv.shared_state.exchange import StateExchange

    return StateExchange(router, probe_replica)


def _build_feeds(replicas: Sequence[Replica], settings: EdgeSettings) -> EngineFeeds | None:
    """The feeds of the replicas that publish KV events; None if no replica does."""
    sources = [EventSource.parse(text) for text in settings.kv_events]
    if len(sources) > len(replicas):
        raise ConfigError(
            f"SEMANTICKV_KV_EVENTS names {len(sources)} addresses for {len(replicas)} replicas",
            hint="one for each replica, in their order",
        )
    feeds = [ReplicaFeed(one, source) for one, source in zip(replicas, sources, strict=False) if source.endpoint]
    return EngineFeeds(feeds) if feeds else None


def _build_replica(name: str, url: str, settings: EdgeSettings, tracked_tokens: int) -> Replica:
    pool = ConnectionPool(EngineAddress.parse(url), connect_timeout_s=settings.connect_timeout_s)
    return Replica(name, pool, ReplicaMemory(tracked_tokens))


def _build_trace_log(settings: EdgeSettings, name: str) -> TraceLog | None:
    if not settings.trace:
        return None
    _check_folder(settings.trace_dir)
    options = TraceOptions.in_folder(
        settings.trace_dir,
        name,
        redact=settings.redact_text,
        key=settings.hash_key,
        file_bytes=int(settings.trace_file_mb * (1 << 20)),
    )
    return TraceLog(options)


def _check_folder(folder: str) -> None:
    """Refuse a folder for traces that cannot be written, before the first request is lost."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write traces to {folder}: {error.strerror}", hint="name a folder with --output-dir, or --no-trace"
        ) from None
