"""Builds the applications from settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from semantickv.apps.gateway import Gateway
from semantickv.edge.upstream_call import EngineAddress, Upstream
from semantickv.engine_state.cache_follower import CacheFollower, FollowedCache
from semantickv.engine_state.subscriber import EventSource
from semantickv.routing.health import probe_replica
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.replica import BreakerLimits, CircuitBreaker, Replica
from semantickv.routing.router import EngineReuse, Router
from semantickv.settings import EdgeSettings
from semantickv.shared_state import open_link
from semantickv.telemetry.trace_log import TraceLog, TraceOptions
from semblend.arrange import Arranger
from semblend.errors import ConfigError

if TYPE_CHECKING:
    from semantickv.shared_state.sync import RouterSync

log = logging.getLogger("semantickv")

MOST_FLEET_TOKENS = 256_000_000
"""Tokens that a router remembers of all its replicas together: 1.6 GB (research/edge/placement_scale.py)."""


FILE_S = 1.0
"""How often the replica file is looked at."""


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
    source = NamedReplicas(settings)
    wanted = source.list_wanted()
    if not wanted:
        raise ConfigError(
            "the router has no replicas", hint="SEMANTICKV_REPLICAS=http://a:8101,http://b:8102, or --replicas"
        )
    reuse = EngineReuse.parse(settings.engine_reuse)
    replicas = [source.build(url, len(wanted)) for url, _ in wanted]
    if len({replica.pool.address.url for replica in replicas}) < len(replicas):
        raise ConfigError("a replica is named twice", hint="give every engine once")
    router = Router(
        replicas, settings.policy, reuse=reuse, keep_sessions=settings.session_affinity, hang_s=settings.hang_s
    )
    follower = _build_follower(replicas, [events for _, events in wanted])
    link = open_link(settings, lambda: _build_sync(router))
    log_of_traces = _build_trace_log(settings, "router")
    return Gateway(settings, router, log_of_traces, shows_routes=True, follower=follower, link=link, source=source)


class NamedReplicas:
    """Where replicas come from: the settings at the start, then a file that is followed and the operator's word."""

    def __init__(self, settings: EdgeSettings) -> None:
        self._settings = settings
        self._built = 0
        self._tracked_tokens = 0
        self._of_file: set[str] = set()
        """Addresses that the file named last."""

    @property
    def has_file(self) -> bool:
        return bool(self._settings.replicas_file)

    def list_wanted(self) -> list[tuple[str, str]]:
        """The addresses of engines and of their KV events, as settings and file name them."""
        events = self._settings.kv_events
        if len(events) > max(1, len(self._settings.replicas)):
            raise ConfigError(
                f"SEMANTICKV_KV_EVENTS names {len(events)} addresses for {len(self._settings.replicas)} replicas",
                hint="one for each replica, in their order",
            )
        padded = (*events, *[""] * len(self._settings.replicas))
        named = list(zip(self._settings.replicas, padded, strict=False))
        if self.has_file:
            of_file = self._read_file()
            self._of_file = {EngineAddress.parse(url).url for url, _ in of_file}
            named += [one for one in of_file if one[0] not in self._settings.replicas]
        return named

    def build(self, url: str, count: int = 0) -> Replica:
        """Build a replica with the next free name; ``count`` of them share the memory for what is tracked."""
        if count:
            self._tracked_tokens = min(self._settings.max_tracked_tokens, MOST_FLEET_TOKENS // count)
            if self._tracked_tokens < self._settings.max_tracked_tokens and not self._built:
                log.info("of %d replicas, %d tokens each are remembered", count, self._tracked_tokens)
        replica = _build_replica(f"r{self._built}", url, self._settings, self._tracked_tokens)
        self._built += 1
        if self._settings.arrange:
            replica.arranger = Arranger.for_cache(self._tracked_tokens)
        return replica

    def add(self, gateway: Gateway, url: str, events: str = "") -> Replica:
        """Add a replica to a router that runs; `ConfigError` where it has it already or the address is none."""
        address, source = EngineAddress.parse(url), EventSource.parse(events)
        if any(one.pool.address.url == address.url for one in gateway.router.replicas):
            raise ConfigError("a replica is named twice", hint="GET /v1/replicas lists those that are there")
        if source.endpoint and gateway.follower is None:
            raise ConfigError("no replica publishes KV events here", hint="start with SEMANTICKV_KV_EVENTS")
        replica = self.build(url)
        gateway.router.add_replica(replica)
        if source.endpoint and gateway.follower is not None:
            gateway.follower.add(FollowedCache(replica, source))
        gateway.note_replicas()
        log.info("%s joined", replica.id)
        return replica

    def remove(self, gateway: Gateway, name: str) -> Replica:
        """Take a replica away by its id: it gets no more requests, and those that run there end there."""
        replica = next((one for one in gateway.router.replicas if one.id == name), None)
        if replica is None:
            raise KeyError(name)
        gateway.router.remove_replica(replica)
        if gateway.follower is not None:
            gateway.follower.remove(replica.id)
        gateway.note_replicas(gone=replica)
        log.info("%s left", replica.id)
        return replica

    async def follow_file(self, gateway: Gateway) -> None:
        """Look at the file every second, and add and remove what changed in it, until cancelled."""
        seen = self._stamp()
        while True:
            await asyncio.sleep(FILE_S)
            if self._stamp() != seen:
                seen = self._stamp()
                try:
                    self.apply_file(gateway)
                except ConfigError as error:  # half a file, while somebody writes it: the next look decides
                    log.warning("%s", error)

    def apply_file(self, gateway: Gateway) -> None:
        """Make the replicas those that the file names, beside those that others named."""
        wanted = {EngineAddress.parse(url).url: events for url, events in self._read_file()}
        if not wanted:
            raise ConfigError(f"{self._settings.replicas_file} names no replica", hint="one address a line")
        present = {one.pool.address.url: one for one in gateway.router.replicas}
        for url, events in wanted.items():
            if url not in present:
                self.add(gateway, url, events)
        for url in self._of_file - wanted.keys():
            if url in present:
                self.remove(gateway, present[url].id)
        self._of_file = set(wanted)

    def _read_file(self) -> list[tuple[str, str]]:
        try:
            lines = Path(self._settings.replicas_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read {self._settings.replicas_file}: {getattr(error, 'strerror', None) or 'it is not text'}",
                hint="check --replicas-file",
            ) from None
        words = [line.partition("#")[0].split() for line in lines]
        return [(one[0], one[1] if len(one) > 1 else "") for one in words if one]

    def _stamp(self) -> tuple[int, int]:
        with suppress(OSError):
            found = Path(self._settings.replicas_file).stat()
            return found.st_mtime_ns, found.st_size
        return 0, 0


def _build_sync(router: Router) -> RouterSync:
    from semantickv.shared_state.sync import RouterSync

    return RouterSync(router, probe_replica)


def _build_follower(replicas: Sequence[Replica], events: Sequence[str]) -> CacheFollower | None:
    """What follows the caches of the replicas that publish KV events; None if no replica does."""
    sources = [EventSource.parse(text) for text in events]
    caches = [FollowedCache(one, source) for one, source in zip(replicas, sources, strict=True) if source.endpoint]
    return CacheFollower(caches) if caches else None


def _build_replica(name: str, url: str, settings: EdgeSettings, tracked_tokens: int) -> Replica:
    pool = Upstream(EngineAddress.parse(url), connect_timeout_s=settings.connect_timeout_s)
    breaker = CircuitBreaker(BreakerLimits(settings.breaker_faults, settings.breaker_s, settings.breaker_max_s))
    memory = ReplicaMemory(tracked_tokens)
    return Replica(name, pool, memory, breaker, failed_probes_to_leave=settings.health_failures)


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
