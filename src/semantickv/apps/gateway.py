"""The proxy and the router as one ASGI application: it places, forwards and records requests.

::

    ProxyApp ─▶ CallOpener ─▶ RoutedCall ─▶ engine
    and in the end one ExchangeRecord ─▶ metrics, the caller's record, the trace
    beside the requests: health checks, replicas that hang, KV events, the link to other routers, the replica file
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semantickv.apps.own_paths import OwnPaths
from semantickv.apps.proxy import CLIENT_LEFT_STATUS, ProxyApp, ProxyCall
from semantickv.apps.routed_call import PROMPT_PATHS, CallOpener, RoutedCall
from semantickv.edge.headers import find_header
from semantickv.edge.upstream_call import Fault, FaultKind
from semantickv.engine_state.feed import EngineFeeds, ServedPrompt
from semantickv.routing.fingerprint import load_cutter
from semantickv.routing.health import HealthWatch
from semantickv.routing.replica import Health, Replica
from semantickv.routing.router import RouteDecision, Router, RouteRequest
from semantickv.settings import EdgeSettings
from semantickv.telemetry.fleet_book import FleetBook
from semantickv.telemetry.metrics import EdgeMetrics
from semantickv.telemetry.record import EngineReceipt, ExchangeRecord, RecordStore
from semantickv.telemetry.request_span import start_span
from semantickv.telemetry.trace_log import TraceJob, TraceLog
from semblend.arrange import Arrangement
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from semantickv.apps.build import ReplicaSource
    from semantickv.shared_state.redis_link import RedisLink
    from semantickv.shared_state.router_sync import RouterSync

SETTLE_S = 0.002
MOST_UNSETTLED = 64
LARGE_BODY_BYTES = 1 << 20
"""A body of this size is not kept after its request has ended."""
LOOK_S = 0.25
"""How often the requests on replicas that are out, or hang, are looked for."""
GONE = Fault(FaultKind.GIVEN_UP, "the replica was taken out")
log = logging.getLogger("semantickv")
POST_PATHS = (*PROMPT_PATHS, "/v1/embeddings", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")


class Gateway(ProxyApp):
    """The application. ``shows_routes`` adds the headers that say where a request went and why."""

    def __init__(
        self,
        settings: EdgeSettings,
        router: Router,
        trace_log: TraceLog | None = None,
        *,
        shows_routes: bool = False,
        feeds: EngineFeeds | None = None,
        link: RedisLink[RouterSync] | None = None,
        source: ReplicaSource | None = None,
    ) -> None:
        super().__init__(max_requests=settings.max_requests, timeout_s=settings.timeout_s)
        self.settings = settings
        self.router = router
        self.trace_log = trace_log
        self.shows_routes = shows_routes
        self.feeds = feeds
        self.link = link
        self.source = source
        self.metrics = EdgeMetrics(self)
        self.records = RecordStore()
        self.fleet = FleetBook()
        self.opener = CallOpener(self)
        self.health = HealthWatch(router, settings)
        self.own_paths = OwnPaths(self)
        self._unsettled: deque[tuple[RoutedCall, float]] = deque()
        """Requests that have ended, and when; not written down yet."""
        self._leaving: list[Replica] = []
        self._started = time.perf_counter()

    def warm_up(self) -> None:
        """Load numba and its kernels: seconds that no request must wait for."""
        if self.router.needs_pieces:
            load_cutter()

    def read_gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """The numbers of this moment, for /metrics."""
        self.settle()
        replicas, log = self.router.replicas, self.trace_log
        counts = {} if log is None else {"written": log.written, "unread": log.unread, "dropped": log.dropped}
        return {
            "semantickv_running": {(): self.intake.running},
            "semantickv_refused_total": {(): self.intake.refused},
            "semantickv_traces_total": {(name,): count for name, count in counts.items()},
            "semantickv_replica_up": {(one.id,): float(one.is_up) for one in replicas},
            "semantickv_replica_running": {(one.id,): one.running for one in replicas},
            "semantickv_replica_tracked_tokens": {(one.id,): one.memory.tokens for one in replicas},
            **self._read_shared_gauges(),
        }

    def _read_shared_gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """What engines and other routers say; nothing where nobody was asked."""
        feeds = {} if self.feeds is None else self.feeds.feeds
        return {
            "semantickv_event_batches_total": {(name,): one.subscriber.batches for name, one in feeds.items()},
            "semantickv_event_losses_total": {(name,): one.subscriber.losses for name, one in feeds.items()},
            "semantickv_evicted_pieces_total": {(name,): one.held.forgotten for name, one in feeds.items()},
            "semantickv_redis_up": {} if self.link is None else {(): float(self.link.is_connected)},
        }

    def list_traces(self) -> list[str]:
        return [] if self.trace_log is None else list(self.trace_log.latest)

    # -- a request that is forwarded -------------------------------------------------------------------------------

    def is_forwarded(self, method: str, path: str) -> bool:
        if method == "POST":
            return path in POST_PATHS
        name = path.removeprefix("/v1/models/")
        return method == "GET" and (path == "/v1/models" or (name != path and ".." not in name.split("/")))

    def open_call(self, scope: Scope, body: bytes, began: float) -> RoutedCall | ApiError:
        return self.opener.open(scope, body, began)

    async def answer_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.settle()
        await self.own_paths.answer(scope, receive, send)

    def note_start(self, call: ProxyCall, scope: Scope) -> None:
        assert isinstance(call, RoutedCall)
        if self.trace_log is not None and call.path in PROMPT_PATHS:
            call.ticket = self.trace_log.take_ticket()
        call.span = start_span(scope["method"], _name_path(call.path), scope["headers"])
        if call.span is not None:
            call.outgoing = replace(call.outgoing, headers=call.span.replace_context(call.outgoing.headers))

    def note_unforwarded(self, path: str, status: int) -> None:
        self.metrics.count_refusal(_name_path(path), status)

    def note_sent(self, decision: RouteDecision, route: RouteRequest) -> list[int]:
        """Remember a prompt that was sent, and tell the other routers. The engine has it already: nobody waits."""
        new = self.router.remember(decision, route)
        if self.link is not None:
            self.link.sync.note_placed(decision, route)
        return new

    def note_refused(self, decision: RouteDecision, new: Sequence[int]) -> None:
        """Forget what a prompt brought that its engine refused, here and in the other routers."""
        self.router.forget(decision, new)
        if self.link is not None and new:
            self.link.sync.note_refused(decision, new)

    def note_arranged(self, decision: RouteDecision, sent: Sequence[Arrangement]) -> None:
        """Remember in which orders a replica got passages, and tell the other routers."""
        if decision.replica.arranger is None:
            return
        for one in sent:
            decision.replica.arranger.record(one)
        if self.link is not None:
            self.link.sync.note_arranged(decision, [one.to_sent() for one in sent])

    def note_end(self, call: RoutedCall) -> None:
        """A request has ended. What became of it is written down soon."""
        self._unsettled.append((call, time.perf_counter()))
        is_large = len(call.body) > LARGE_BODY_BYTES
        if is_large or call.span is not None or len(self._unsettled) >= MOST_UNSETTLED:
            self.settle()  # a span ends when its request does
        elif len(self._unsettled) == 1:
            asyncio.get_running_loop().call_later(SETTLE_S, self.settle)

    def settle(self) -> None:
        """Write down what became of the requests that have ended: metrics, records, traces.

        This takes as long as forwarding a request does, so it waits for a moment in which no bytes do. Whoever reads
        what is written here asks for it first.
        """
        while self._unsettled:
            call, ended = self._unsettled.popleft()
            try:
                self._close_call(call, ended)
            except Exception:  # the client has its answer: what fails here costs a record
                log.exception("a request could not be written down")

    def _close_call(self, call: RoutedCall, ended: float) -> None:
        """Write down what became of a request that ended at ``ended``."""
        reader = call.reader
        receipt = EngineReceipt() if reader is None or call.fault is not None else reader.read_receipt()
        decision, fault = call.decision, call.fault
        left = fault is not None and fault.kind is FaultKind.CLIENT_LEFT
        first_token = None if reader is None else reader.first_token_at
        record = ExchangeRecord(
            request_id=call.caller.request_id,
            path=_name_path(call.path),
            model=call.view.model[:128],
            status=CLIENT_LEFT_STATUS if left or not call.status else call.status,
            fault=None if fault is None else fault.kind.value,
            attempts=call.attempts,
            replica=None if decision is None else decision.replica.id,
            route=None if decision is None else decision.outcome.value,
            route_reason=None if decision is None else decision.reason.value,
            route_score=None if decision is None else round(decision.score, 4),
            sent_bytes=len(call.outgoing.body),
            received_bytes=0 if reader is None else reader.received_bytes,
            first_byte_ms=_to_ms(call.first_byte, call.began),
            ttft_ms=_to_ms(first_token, call.began),
            total_ms=round(1000 * (ended - call.began), 3),
            receipt=receipt,
            arranged=() if call.arranged is None else tuple(one.to_dict() for one in call.arranged.groups),
        )
        self.metrics.count(record)
        self.records.add(call.caller.namespace, record)
        if call.span is not None:
            call.span.end(record)
        if decision is not None and self.shows_routes:
            self.fleet.note(record, decision, call.route.pieces)
        if fault is None and decision is not None and call.status == 200:
            self._learn(call, decision, receipt)
        if self.trace_log is not None and call.ticket is not None:
            is_whole = fault is None and call.status < 400
            self.trace_log.submit(call.ticket, self._describe(call, record, ended, first_token) if is_whole else None)

    def _learn(self, call: RoutedCall, decision: RouteDecision, receipt: EngineReceipt) -> None:
        """Compare what the router expected with what the engine says, by its events or by its receipt."""
        replica, pieces = decision.replica, call.route.pieces
        if self.feeds is not None and replica.id in self.feeds.feeds:
            key = find_header(call.outgoing.headers, b"authorization").encode("latin-1")
            fields = call.view.fields if call.arranged is None else call.arranged.fields
            learns = bool(self.settings.salt_secret) or self.settings.one_tenant
            prompt = ServedPrompt(replica, pieces, fields, call.salt, key, receipt.prompt_tokens, learns)
            self.feeds.note_served(prompt)
        elif receipt.reused_tokens is not None and receipt.rejected is None:
            replica.memory.learn(decision.overlap.prefix_tokens, receipt.reused_tokens)

    def _describe(self, call: RoutedCall, record: ExchangeRecord, ended: float, first_token: float | None) -> TraceJob:
        """What the trace says of a request that was answered."""
        receipt = record.receipt
        usage: dict[str, Any] = {"prompt_tokens": receipt.prompt_tokens, "completion_tokens": receipt.output_tokens}
        usage["prompt_tokens_details"] = {"cached_tokens": receipt.exact_tokens}
        metadata = {"replica": record.replica, "route": record.route, "relocated_tokens": receipt.relocated_tokens}
        start = self._started
        return TraceJob(
            body=call.body,
            began_s=call.began - start,
            ended_s=ended - start,
            first_token_s=None if first_token is None else first_token - start,
            session=call.caller.with_session(call.view.fields.get("session_id")).session,
            tenant=call.caller.tenant,
            usage=usage,
            metadata={name: value for name, value in metadata.items() if value is not None},
        )

    # -- beside the requests -----------------------------------------------------------------------------------------

    def list_jobs(self) -> Sequence[Coroutine[Any, Any, None]]:
        jobs: list[Coroutine[Any, Any, None]] = [self.health.run(), self._look_after_replicas()]
        if self.feeds is not None:
            jobs.append(self.feeds.run())
        if self.link is not None:
            jobs.append(self.link.run())
        if self.source is not None and self.source.has_file:
            jobs.append(self.source.follow_file(self))
        return jobs

    async def _look_after_replicas(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look_after_replicas(time.perf_counter())
            await self._close_left()

    def look_after_replicas(self, now: float) -> None:
        """Take out replicas that hang, and let go of the requests on replicas that are out.

        A request whose client has had nothing goes elsewhere. One in mid-answer is cut if its replica is down and has
        sent nothing since the health checks began to fail.
        """
        if len(self.router.replicas) == 1:
            return  # there is nowhere else to go
        calls = [(one, one.call) for one in self.running if isinstance(one.call, RoutedCall) and one.call.decision]
        waiting: dict[Replica, list[RoutedCall]] = {}
        for _, call in calls:
            assert call.decision is not None
            if call.first_byte is None:
                waiting.setdefault(call.decision.replica, []).append(call)
        for replica, held in waiting.items():
            oldest = min(held, key=lambda one: one.sent_at)
            silent_s = now - max(oldest.sent_at, replica.first_byte_at)
            is_judged = replica.hung_at > oldest.sent_at
            if not is_judged and self.router.is_hung(silent_s, oldest.tokens_ahead, oldest.is_stream):
                log.warning("%s has begun no answer for %.0f s: it is taken out", replica.id, silent_s)
                replica.note_hung(now)
        patience_s = self.settings.health_failures * (self.settings.health_s + self.settings.health_timeout_s)
        for forwarding, call in calls:
            assert call.decision is not None
            replica = call.decision.replica
            is_down = replica.health is Health.DOWN
            if call.first_byte is None and (is_down or replica.hung_at > call.sent_at):
                forwarding.interrupt(GONE)
            elif is_down and now - call.last_byte > patience_s:
                forwarding.interrupt(Fault(FaultKind.STALLED, "the replica is down", is_mid_answer=True))

    def note_replicas(self, gone: Replica | None = None) -> None:
        """Replicas were added or removed. The connections of one that left are closed once nothing runs there."""
        if self.link is not None:
            self.link.sync.note_replicas()
        if gone is not None:
            self._leaving.append(gone)

    async def _close_left(self) -> None:
        for replica in [one for one in self._leaving if not one.running]:
            self._leaving.remove(replica)
            await replica.pool.close()

    async def close(self) -> None:
        self.settle()
        for replica in (*self.router.replicas, *self._leaving):
            await replica.pool.close()
        if self.trace_log is not None:
            await asyncio.to_thread(self.trace_log.close)


def _name_path(path: str) -> str:
    """The path as a label: few values, whatever clients ask for."""
    return path if path in POST_PATHS else "/v1/models"


def _to_ms(at: float | None, began: float) -> float | None:
    return None if at is None else round(1000 * (at - began), 3)
