"""What the proxy and the router share: one ASGI application that takes, places, forwards and records a request.

::

    ClientConnection ─▶ Intake ─▶ CallOpener ─▶ Forwarding ─▶ engine      the server of `semantickv router` and `proxy`
    any ASGI server ─▶ __call__ ─▶ the same, and AsgiSide sends the answer
    and in the end one ExchangeRecord ─▶ metrics, the caller's record, the trace
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semantickv.apps.answers import answer_error, send_error
from semantickv.apps.edge_call import PROMPT_PATHS, CallOpener, EdgeCall
from semantickv.apps.forwarding import Forwarding, Lane
from semantickv.apps.own_paths import OwnPaths
from semantickv.edge.asgi_side import AsgiSide
from semantickv.edge.exchange import CLIENT_LEFT, ClientSide, EngineTimeouts
from semantickv.edge.faults import Fault, FaultKind
from semantickv.edge.headers import find_header
from semantickv.edge.intake import Intake, IntakeLimits
from semantickv.engine_state.feed import EngineFeeds, ServedPrompt
from semantickv.routing.fingerprint import load_cutter
from semantickv.routing.health import watch_health
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

    from semantickv.shared_state.exchange import StateExchange
    from semantickv.shared_state.redis_link import RedisLink

CLIENT_LEFT_STATUS = 499
SETTLE_S = 0.002
MOST_UNSETTLED = 64
LARGE_BODY_BYTES = 1 << 20
"""A body of this size is not kept after its request has ended."""
log = logging.getLogger("semantickv")
POST_PATHS = (*PROMPT_PATHS, "/v1/embeddings")


@dataclass(slots=True)
class Gateway:
    """The application. ``shows_routes`` adds the headers that say where a request went and why."""

    settings: EdgeSettings
    router: Router
    trace_log: TraceLog | None = None
    shows_routes: bool = False
    feeds: EngineFeeds | None = None
    link: RedisLink[StateExchange] | None = None
    intake: Intake = field(init=False)
    metrics: EdgeMetrics = field(init=False)
    own_paths: OwnPaths = field(init=False)
    opener: CallOpener = field(init=False)
    records: RecordStore = field(default_factory=RecordStore)
    fleet: FleetBook = field(default_factory=FleetBook)
    _lane: Lane = field(init=False)
    _running: set[Forwarding] = field(default_factory=set)
    _unsettled: deque[tuple[EdgeCall, float]] = field(default_factory=deque)
    """Requests that have ended, and when; not written down yet."""
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
        timeouts = EngineTimeouts(self.settings.timeout_s, self.settings.timeout_s)
        self._lane = Lane(
            self.router, self.opener, timeouts, self.shows_routes,
            self._note_sent, self._note_refused, self._note_arranged, self._note_end,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            if self.is_forwarded(scope["method"], scope["path"]):
                await self._forward(scope, receive, send)
            else:
                self.settle()
                await self.own_paths.answer(scope, send)

    def warm_up(self) -> None:
        """Load what takes seconds and what the first request must not wait for: numba and its kernels."""
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

    def _list_traces(self) -> list[str]:
        return [] if self.trace_log is None else list(self.trace_log.latest)

    # -- a request that is forwarded -------------------------------------------------------------------------------

    @staticmethod
    def is_forwarded(method: str, path: str) -> bool:
        """Whether a request goes to an engine; the rest is answered here."""
        if method == "POST":
            return path in POST_PATHS
        name = path.removeprefix("/v1/models/")
        return method == "GET" and (path == "/v1/models" or (name != path and ".." not in name.split("/")))

    def forward(self, scope: Mapping[str, Any], body: bytes, began: float, client: ClientSide) -> Forwarding | None:
        """Send a request on whose body was read and which has a place in the intake; None if it was refused.

        What is left is done as bytes come, by calls from connection to connection. The place is given back in the end.
        """
        forwarding: Forwarding | None = None
        try:
            call = self.opener.open(scope, body, began)
            if isinstance(call, ApiError):
                self.refuse(scope, call, client)
                self.intake.leave(body)
                return None
            if self.trace_log is not None and call.path in PROMPT_PATHS:
                call.ticket = self.trace_log.take_ticket()
            call.span = start_span(scope["method"], _name_path(call.path), scope["headers"])
            if call.span is not None:
                call.outgoing = replace(call.outgoing, headers=call.span.replace_context(call.outgoing.headers))
            forwarding = Forwarding(self._lane, call, client)
            self._running.add(forwarding)
            forwarding.begin()
        except BaseException:
            if forwarding is None:
                self.intake.leave(body)
            else:
                forwarding.stop()
            raise
        return forwarding

    def refuse(self, scope: Mapping[str, Any], error: ApiError, client: ClientSide) -> None:
        """Answer a request that is not forwarded with an error, and count it."""
        self.metrics.count_refusal(_name_path(scope["path"]), error.status)
        answer_error(client, error)

    def note_left(self, scope: Mapping[str, Any]) -> None:
        """Count a client that left before its request was whole."""
        self.metrics.count_refusal(_name_path(scope["path"]), CLIENT_LEFT_STATUS)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a request from an ASGI server, and send its answer there."""
        began = time.perf_counter()
        refused = self.intake.enter()
        if refused is not None:
            self.metrics.count_refusal(_name_path(scope["path"]), refused.status)
            await send_error(send, refused)
            return
        body: bytes | ApiError | Fault = CLIENT_LEFT
        try:
            body = await self.intake.read_body(scope["headers"], receive)
        finally:
            if not isinstance(body, bytes):
                self.intake.leave(b"")
        if isinstance(body, ApiError):
            self.metrics.count_refusal(_name_path(scope["path"]), body.status)
            await send_error(send, body)
        elif isinstance(body, Fault):
            self.note_left(scope)
        else:
            side = AsgiSide(send)
            await side.run(receive, self.forward(scope, body, began, side))

    def _note_sent(self, decision: RouteDecision, route: RouteRequest) -> list[int]:
        """Remember a prompt that was sent, and tell the other routers. The engine has it already: nobody waits."""
        new = self.router.remember(decision, route)
        if self.link is not None:
            self.link.exchange.note_placed(decision, route)
        return new

    def _note_refused(self, decision: RouteDecision, new: Sequence[int]) -> None:
        """Forget what a prompt brought that its engine refused, here and in the other routers."""
        self.router.forget(decision, new)
        if self.link is not None and new:
            self.link.exchange.note_refused(decision, new)

    def _note_arranged(self, decision: RouteDecision, sent: Sequence[Arrangement]) -> None:
        """Remember in which orders a replica got passages, and tell the other routers."""
        if decision.replica.arranger is None:
            return
        for one in sent:
            decision.replica.arranger.record(one)
        if self.link is not None:
            self.link.exchange.note_arranged(decision, [one.to_sent() for one in sent])

    def _note_end(self, forwarding: Forwarding) -> None:
        """Give a request's place back. What became of it is written down soon."""
        self._running.discard(forwarding)
        call = forwarding.call
        self.intake.leave(call.body)
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

    def _close_call(self, call: EdgeCall, ended: float) -> None:
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
            session=call.caller.with_session(call.view.fields.get("session_id")).session,
            tenant=call.caller.tenant,
            usage=usage,
            metadata={name: value for name, value in metadata.items() if value is not None},
        )

    # -- life ------------------------------------------------------------------------------------------------------

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start the health checks, and end them, the connections and the traces when the server ends."""
        await receive()
        self.warm_up()
        self._tasks.append(asyncio.ensure_future(watch_health(self.router.replicas, self.settings.health_s)))
        if self.feeds is not None:
            self._tasks.append(asyncio.ensure_future(self.feeds.run()))
        if self.link is not None:
            self._tasks.append(asyncio.ensure_future(self.link.run()))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for forwarding in list(self._running):
            forwarding.stop()
        self.settle()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.router.replicas:
            replica.pool.close()
        if self.trace_log is not None:
            await asyncio.to_thread(self.trace_log.close)
        await send({"type": "lifespan.shutdown.complete"})


def _name_path(path: str) -> str:
    """The path as a label: few values, whatever clients ask for."""
    return path if path in POST_PATHS else "/v1/models"


def _to_ms(at: float | None, began: float) -> float | None:
    return None if at is None else round(1000 * (at - began), 3)
