"""What the proxy and the router share: one ASGI application that takes, places, forwards and records a request.

::

    receive ─▶ Intake ─▶ Caller, PromptView ─▶ Router.choose ─▶ open_answer ─▶ relay ─▶ send
                                  ▲                   │ a fault before the first byte
                                  └───────────────────┘
    and in the end one ExchangeRecord ─▶ metrics, the caller's record, the trace
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semantickv.apps.answers import send_error
from semantickv.apps.edge_call import PROMPT_PATHS, CallOpener, EdgeCall
from semantickv.apps.own_paths import OwnPaths
from semantickv.edge.faults import Fault, FaultKind
from semantickv.edge.forward import ClientWatch, EngineAnswer, EngineTimeouts, open_answer, relay
from semantickv.edge.headers import find_header
from semantickv.edge.intake import Intake, IntakeLimits
from semantickv.engine_state.feed import EngineFeeds, ServedPrompt
from semantickv.routing.arranging import write_order
from semantickv.routing.fingerprint import load_cutter
from semantickv.routing.health import watch_health
from semantickv.routing.router import NoReplica, RouteDecision, Router, RouteRequest
from semantickv.settings import EdgeSettings
from semantickv.telemetry.answer_reader import AnswerReader
from semantickv.telemetry.fleet_book import FleetBook
from semantickv.telemetry.metrics import EdgeMetrics
from semantickv.telemetry.record import EngineReceipt, ExchangeRecord, RecordStore
from semantickv.telemetry.request_span import start_span
from semantickv.telemetry.trace_log import TraceJob, TraceLog
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from semantickv.shared_state.redis_link import RedisLink

MOST_ATTEMPTS = 3
CLIENT_LEFT_STATUS = 499
POST_PATHS = (*PROMPT_PATHS, "/v1/embeddings")
STOPPED = Fault(FaultKind.STOPPED, "this server stops")


@dataclass(slots=True)
class Gateway:
    """The application. ``shows_routes`` adds the headers that say where a request went and why."""

    settings: EdgeSettings
    router: Router
    trace_log: TraceLog | None = None
    shows_routes: bool = False
    feeds: EngineFeeds | None = None
    link: RedisLink | None = None
    intake: Intake = field(init=False)
    metrics: EdgeMetrics = field(init=False)
    own_paths: OwnPaths = field(init=False)
    opener: CallOpener = field(init=False)
    records: RecordStore = field(default_factory=RecordStore)
    fleet: FleetBook = field(default_factory=FleetBook)
    _timeouts: EngineTimeouts = field(init=False)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.intake = Intake(IntakeLimits(requests=self.settings.max_requests))
        self.metrics = EdgeMetrics(self)
        self.opener = CallOpener(self.settings, self.router)
        self.own_paths = OwnPaths(
            self.settings,
            self.router,
            self.metrics,
            self.records,
            self._list_traces,
            self.feeds,
            self.link,
            self.fleet if self.shows_routes else None,
        )
        self._timeouts = EngineTimeouts(self.settings.timeout_s, self.settings.timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            if self._is_forwarded(scope["method"], scope["path"]):
                await self._forward(scope, receive, send)
            else:
                await self.own_paths.answer(scope, send)

    def warm_up(self) -> None:
        """Load what takes seconds and what the first request must not wait for: numba and its kernels."""
        if self.router.needs_pieces:
            load_cutter()

    def read_gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """The numbers of this moment, for /metrics."""
        replicas, log = self.router.replicas, self.trace_log
        counts = {} if log is None else {"written": log.written, "unread": log.unread, "dropped": log.dropped}
        return {
            "semantickv_running": {(): self.intake.running},
            "semantickv_refused_total": {(): self.intake.refused},
            "semantickv_traces_total": {(name,): count for name, count in counts.items()},
            "semantickv_replica_up": {(one.id,): float(one.can_serve) for one in replicas},
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

    def _list_traces(self) -> list[str]:
        return [] if self.trace_log is None else list(self.trace_log.latest)

    # -- a request that is forwarded -------------------------------------------------------------------------------

    @staticmethod
    def _is_forwarded(method: str, path: str) -> bool:
        if method == "POST":
            return path in POST_PATHS
        name = path.removeprefix("/v1/models/")
        return method == "GET" and (path == "/v1/models" or (name != path and ".." not in name.split("/")))

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a request, serve it, and write down what became of it."""
        began = time.perf_counter()
        refused = self.intake.enter()
        if refused is not None:
            self.metrics.count_refusal(_name_path(scope["path"]), refused.status)
            await send_error(send, refused)
            return
        body = b""
        try:
            found = await self.intake.read_body(scope["headers"], receive)
            if isinstance(found, ApiError):
                self.metrics.count_refusal(_name_path(scope["path"]), found.status)
                await send_error(send, found)
            elif isinstance(found, Fault):
                self.metrics.count_refusal(_name_path(scope["path"]), CLIENT_LEFT_STATUS)
            else:
                body = found
                call = self.opener.open(scope, body, began)
                if isinstance(call, ApiError):
                    self.metrics.count_refusal(_name_path(scope["path"]), call.status)
                    await send_error(send, call)
                    return
                if self.trace_log is not None and call.path in PROMPT_PATHS:
                    call.ticket = self.trace_log.take_ticket()
                call.span = start_span(scope["method"], _name_path(call.path), scope["headers"])
                if call.span is not None:
                    call.outgoing = replace(call.outgoing, headers=call.span.replace_context(call.outgoing.headers))
                watch = ClientWatch(receive)
                try:
                    await self._serve(call, send, watch)
                finally:
                    watch.stop()
                    self._close_call(call)
        finally:
            self.intake.leave(body)

    async def _serve(self, call: EdgeCall, send: Send, watch: ClientWatch) -> None:
        """Send the request to one replica after another, until one has begun to answer or none is left."""
        tried: list[Any] = []
        while True:
            decision = self.router.choose(call.route, tried)
            if isinstance(decision, NoReplica):
                break
            call.attempts += 1
            call.decision = decision
            await self._try(call, decision, send, watch, tried)
            tried.append(decision.replica)
            if call.fault is None or not call.fault.may_retry or call.attempts >= MOST_ATTEMPTS or watch.has_left:
                break
        if call.status or watch.has_left:
            return
        error = call.fault.as_api_error() if call.fault is not None else _NO_REPLICA
        call.status = error.status
        await send_error(send, error, call.caller.request_id)

    async def _try(
        self, call: EdgeCall, decision: RouteDecision, send: Send, watch: ClientWatch, tried: list[Any]
    ) -> None:
        """Send the request to one replica and pass its answer on."""
        if call.marked is not None:
            self.opener.arrange(call, call.marked, decision)
        self.router.start(decision, call.route)
        # Once the request is on its way: to remember a prompt of 8k tokens takes some 30 µs.
        asyncio.get_running_loop().call_soon(self._remember, decision, call.route)
        call.fault = STOPPED  # stands if this task is cancelled
        try:
            answer = await open_answer(decision.replica.pool, call.outgoing, self._timeouts, watch)
            if isinstance(answer, Fault):
                call.fault = answer
                return
            try:
                if answer.head.status == 503 and self._has_another(call, decision, tried):
                    call.fault = Fault(FaultKind.BUSY)
                    return
                await self._pass_on(call, decision, answer, send, watch)
            finally:
                answer.close()
        finally:
            self.router.end(decision, call.fault, had_first_byte=call.first_byte is not None)

    def _remember(self, decision: RouteDecision, route: RouteRequest) -> None:
        """Remember a prompt that was sent, and tell the other routers."""
        self.router.remember(decision, route)
        if self.link is not None:
            self.link.exchange.note_placed(decision, route)

    async def _pass_on(
        self, call: EdgeCall, decision: RouteDecision, answer: EngineAnswer, send: Send, watch: ClientWatch
    ) -> None:
        call.first_byte, call.status = time.perf_counter(), answer.head.status
        self.router.note_first_byte(decision)
        call.reader = AnswerReader(answer.head.headers)
        if call.arranged is not None and decision.replica.arranger is not None and call.status == 200:
            for one in call.arranged.sent:
                decision.replica.arranger.record(one)
        headers = [(b"x-request-id", call.caller.request_id.encode("latin-1"))]
        if self.shows_routes:
            headers += _write_route(decision, self.router.policy)
        if call.arranged is not None and (order := write_order(call.arranged.groups)):
            headers.append((b"x-semantic-order", order))
        call.fault = await relay(answer, send, watch, headers=headers, observe=call.reader.observe)

    def _has_another(self, call: EdgeCall, decision: RouteDecision, tried: list[Any]) -> bool:
        if call.attempts >= MOST_ATTEMPTS:
            return False
        return isinstance(self.router.choose(call.route, [*tried, decision.replica]), RouteDecision)

    def _close_call(self, call: EdgeCall) -> None:
        """Write down what became of a request."""
        ended, reader = time.perf_counter(), call.reader
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

    def _learn(self, call: EdgeCall, decision: RouteDecision, receipt: EngineReceipt) -> None:
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

    def _describe(self, call: EdgeCall, record: ExchangeRecord, ended: float, first_token: float | None) -> TraceJob:
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
            session=call.caller.session,
            tenant=call.caller.tenant,
            usage=usage,
            metadata={name: value for name, value in metadata.items() if value is not None},
        )

    # -- life ------------------------------------------------------------------------------------------------------

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start the health checks, and end them, the connections and the traces when the server ends."""
        await receive()
        self.warm_up()
        if len(self.router.replicas) > 1:
            self._tasks.append(asyncio.ensure_future(watch_health(self.router.replicas, self.settings.health_s)))
        if self.feeds is not None:
            self._tasks.append(asyncio.ensure_future(self.feeds.run()))
        if self.link is not None:
            self._tasks.append(asyncio.ensure_future(self.link.run()))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.router.replicas:
            replica.pool.close()
        if self.trace_log is not None:
            await asyncio.to_thread(self.trace_log.close)
        await send({"type": "lifespan.shutdown.complete"})


_NO_REPLICA = ApiError(503, "no engine can serve", hint="try again in a moment", code="no_replica", retry_after_s=1)


def _write_route(decision: RouteDecision, policy: str) -> list[tuple[bytes, bytes]]:
    """The headers that say where a request went, and why. They speak of the caller's own prompts only."""
    outcome, replica = decision.outcome.value.encode(), decision.replica.id.encode()
    return [
        (b"x-semantic-route", outcome),
        (b"x-semantic-placement", outcome),
        (b"x-semantic-score", f"{decision.score:.4f}".encode()),
        (b"x-route-reason", f"{policy};{decision.reason.value}".encode()),
        (b"x-replica-id", replica),
        (b"x-semantickv-replica", replica),
    ]


def _name_path(path: str) -> str:
    """The path as a label: few values, whatever clients ask for."""
    return path if path in POST_PATHS else "/v1/models"


def _to_ms(at: float | None, began: float) -> float | None:
    return None if at is None else round(1000 * (at - began), 3)
