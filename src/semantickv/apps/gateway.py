"""The proxy and the router as one ASGI application: it places, forwards and records requests.

::

    ProxyApp ─▶ CallOpener ─▶ RoutedCall ─▶ engine
    and in the end one ExchangeRecord ─▶ metrics, the caller's record, the trace
    beside the requests: health checks, replicas that hang, KV events, the link to other routers, the replica file
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from semantickv.apps.callers import (
    Caller,
    add_fields,
    declare_edit,
    identify_caller,
    is_operator,
    make_salt,
    write_fields,
)
from semantickv.apps.describe import describe_fleet, describe_health, describe_replica, describe_replicas
from semantickv.apps.proxy import (
    CLIENT_LEFT_STATUS,
    NOT_FOUND,
    NOT_OPERATOR,
    Headers,
    Place,
    ProxyApp,
    ProxyCall,
    send_bytes,
    send_error,
    send_json,
    write_target,
)
from semantickv.edge.headers import RawHeaders, find_header, select_request_headers
from semantickv.edge.upstream_call import Fault, FaultKind, OutgoingRequest, UpstreamAnswer
from semantickv.engine_state.cache_follower import CacheFollower, ServedPrompt
from semantickv.routing.arranging import ArrangedRequest, MarkedRequest, read_marked, write_order
from semantickv.routing.fingerprint import NO_PIECES, PromptPieces, cut_prompt, load_cutter
from semantickv.routing.health import HealthWatch
from semantickv.routing.prompt_view import PROMPT_PATHS, UNREAD, PromptPart, PromptView, read_prompt
from semantickv.routing.replica import Health, Replica
from semantickv.routing.router import NoReplica, RouteDecision, Router, RouteRequest
from semantickv.settings import EdgeSettings
from semantickv.telemetry.fleet_book import FleetBook
from semantickv.telemetry.metrics import EdgeMetrics, RequestSpan, start_span
from semantickv.telemetry.record import AnswerReader, EngineReceipt, ExchangeRecord, RecordStore
from semantickv.telemetry.trace_log import TraceLog
from semantickv.traces.collection import TraceJob
from semblend.arrange import Arrangement
from semblend.errors import ConfigError, InputError
from semblend.prompt import Namespace
from semblend.quality import EDIT_HEADER
from semblend.web.site import HEADERS, build_fleet
from semblend.wire.callers import find_repeated
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from semantickv.shared_state.redis_link import RedisLink
    from semantickv.shared_state.sync import RouterSync

SETTLE_S = 0.002
MOST_UNSETTLED = 64
LARGE_BODY_BYTES = 1 << 20
"""A body of this size is not kept after its request has ended."""
LOOK_S = 0.25
"""How often the requests on replicas that are out, or hang, are looked for."""
GONE = Fault(FaultKind.GIVEN_UP, "the replica was taken out")
log = logging.getLogger("semantickv")
POST_PATHS = (*PROMPT_PATHS, "/v1/embeddings", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")


OPERATOR_PATHS = ("/metrics", "/v1/replicas", "/v1/fleet", "/v1/traces/latest")
REPLICAS = "/v1/replicas"
FRESH_S = 1.0
"""A health check this old answers for /health; an older one is repeated first."""
PAGE_FILES = build_fleet()
PAGE_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in HEADERS.items())


BYTES_PER_TOKEN = 4
BUSY = Fault(FaultKind.BUSY)
_NO_REPLICA = ApiError(503, "no engine can serve", hint="try again in a moment", code="no_replica", retry_after_s=1)
_HIDDEN = (b"x-tenant-id", b"x-request-id", b"x-session-id")
"""Headers of the client that the engine gets from us or not at all: an engine may trust this server's X-Tenant-ID."""


@dataclass(slots=True, eq=False)
class RoutedCall:
    """One request under way: a `ProxyCall`."""

    gateway: Gateway
    caller: Caller
    path: str
    body: bytes
    view: PromptView
    route: RouteRequest
    outgoing: OutgoingRequest
    began: float
    attempts: int = 0
    status: int = 0
    decision: RouteDecision | None = None
    new_keys: Sequence[int] = ()
    """What the prompt brought to its replica's memory that was not there."""
    fault: Fault | None = None
    sent_at: float = 0.0
    """When the attempt under way began; all times are of `time.perf_counter`."""
    tokens_ahead: int = 0
    """Tokens that the replica had to compute, with this prompt's, when it was sent there."""
    first_byte: float | None = None
    last_byte: float = 0.0
    reader: AnswerReader | None = None
    ticket: int | None = None
    span: RequestSpan | None = None
    added: dict[str, Any] = field(default_factory=dict)
    """Fields that this server adds to the body: a salt, a session."""
    marked: MarkedRequest | None = None
    arranged: ArrangedRequest | None = None
    tried: list[Replica] = field(default_factory=list)
    doubtful: list[tuple[Replica, Fault]] = field(default_factory=list)
    """Faults that the request itself may have caused: they are judged when it is known what others made of it."""

    @property
    def request_id(self) -> str:
        return self.caller.request_id

    @property
    def salt(self) -> str:
        salt = self.added.get("cache_salt", self.view.fields.get("cache_salt"))
        return salt if isinstance(salt, str) else ""

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes token by token; looked for in the bytes, so that nothing is parsed for it."""
        return b'"stream": true' in self.body or b'"stream":true' in self.body

    # -- what the proxy core calls -----------------------------------------------------------------------------------

    def place(self) -> Place | ApiError:
        router = self.gateway.router
        decision = router.choose(self.route, self.tried)
        if isinstance(decision, NoReplica):
            return _NO_REPLICA
        self.attempts += 1
        self.decision = decision
        self.tried.append(decision.replica)
        if self.marked is not None:
            self.gateway.opener.arrange(self, self.marked, decision)
        router.start(decision, self.route)
        self.new_keys = self.gateway.note_sent(decision, self.route)
        self.tokens_ahead = decision.replica.waiting_tokens + (
            0 if decision.prompt_tokens else len(self.body) // BYTES_PER_TOKEN
        )
        self.sent_at = time.perf_counter()
        return Place(decision.replica.pool, self.outgoing)

    def take_head(self, answer: UpstreamAnswer) -> Headers | Fault:
        gateway, decision = self.gateway, self.decision
        assert decision is not None
        if answer.status == 503 and self._has_another():
            return BUSY
        self.first_byte = self.last_byte = time.perf_counter()
        self.status = answer.status
        self.reader = AnswerReader(answer.headers)
        if answer.status >= 400:
            gateway.note_refused(decision, self.new_keys)
        elif self.path in PROMPT_PATHS:
            seconds = self.first_byte - self.sent_at
            gateway.router.note_speed(decision, seconds, self.tokens_ahead, self.reader.is_stream)
        gateway.router.note_first_byte(decision)
        if self.arranged is not None and answer.status == 200:
            gateway.note_arranged(decision, self.arranged.sent)
        ours = [(b"x-request-id", self.request_id.encode("latin-1"))]
        if gateway.shows_routes:
            ours += write_route(decision, gateway.router.policy)
        if self.arranged is not None and (order := write_order(self.arranged.groups)):
            ours.append((b"x-semantic-order", order))
        return ours

    def observe(self, piece: bytes) -> None:
        assert self.reader is not None
        self.last_byte = time.perf_counter()
        self.reader.observe(piece)

    def end_attempt(self, fault: Fault | None) -> bool:
        decision = self.decision
        assert decision is not None
        replica = decision.replica
        self.fault = fault
        has_begun = self.first_byte is not None
        self.gateway.router.end(decision, had_first_byte=has_begun)
        if fault is not None and fault.may_be_the_request and not has_begun:
            self.doubtful.append((replica, fault))
        elif fault is not None and fault.kind is FaultKind.CLIENT_LEFT and not has_begun:
            waited = time.perf_counter() - self.sent_at
            replica.note_left(self.gateway.router.is_overdue(waited, self.tokens_ahead, self.is_stream))
        else:
            replica.note_end(fault)
        if fault is None or has_begun or not fault.may_retry:
            return False
        self.gateway.note_refused(decision, self.new_keys)
        return self.attempts < self.gateway.settings.max_attempts

    def end(self, status: int, fault: Fault | None) -> None:
        """Judge the doubtful faults: one that followed the request to every replica is the request's own."""
        self.status, self.fault = status, fault
        is_the_requests = self.first_byte is None and len({replica.id for replica, _ in self.doubtful}) > 1
        for replica, one in self.doubtful:
            replica.note_end(one, is_the_requests=is_the_requests)
        self.gateway.note_end(self)

    def _has_another(self) -> bool:
        """Whether another replica could be asked."""
        if self.attempts >= self.gateway.settings.max_attempts:
            return False
        return isinstance(self.gateway.router.choose(self.route, self.tried), RouteDecision)


@dataclass(frozen=True, slots=True)
class CallOpener:
    """Reads requests before they are placed, and writes them for the replica that was chosen."""

    gateway: Gateway

    @property
    def settings(self) -> EdgeSettings:
        return self.gateway.settings

    @property
    def router(self) -> Router:
        return self.gateway.router

    def open(self, scope: Mapping[str, Any], body: bytes, began: float) -> RoutedCall | ApiError:
        """Read who calls and what the prompt is, from ASGI's scope. With salts, an unreadable prompt is refused."""
        path, settings = scope["path"], self.settings
        if repeated := find_repeated(scope["headers"]):
            return repeated
        caller = identify_caller(scope["headers"], settings.hash_key)
        is_prompt = path in PROMPT_PATHS
        view = read_prompt(body) if is_prompt else UNREAD
        fields = view.fields if is_prompt and self._must_read(body, scope["headers"]) else {}
        in_header, in_body = bool(caller.session), fields.get("session_id") not in (None, "")
        caller = caller.with_session(fields.get("session_id"))
        headers = select_request_headers(scope["headers"], _HIDDEN)
        headers.append((b"x-request-id", caller.request_id.encode("latin-1")))
        added: dict[str, Any] = {}
        session = caller.session
        if settings.salt_secret:
            if is_prompt and not fields:
                return _UNSALTED
            salt = make_salt(settings.salt_secret, caller.namespace, fields.get("cache_salt"))
            headers.append((b"x-tenant-id", salt.encode()))
            # Two tenants may call their sessions alike, by whatever name; an engine must not take them for one.
            if session := session or (str(fields["session_id"]) if in_body else ""):
                session = make_salt(settings.salt_secret, caller.namespace + b"session", session)
            added = {"cache_salt": salt} if fields else {}
        if in_header:
            headers.append((b"x-session-id", session.encode("latin-1")))
        if session and fields and (in_body if settings.salt_secret else settings.session_hint == "body"):
            added["session_id"] = session
        if fields:
            added |= declare_edit(scope["headers"], fields)
        try:
            marked = read_marked(view) if is_prompt and self.router.arranges else None
        except InputError as error:
            return ApiError(400, error.message, hint=error.hint, param="semblend")
        pieces = NO_PIECES
        if is_prompt and self.router.needs_pieces:
            pieces = _cut(caller, view, view.list_parts() if marked is None else marked.list_parts())
        sent = add_fields(body, fields, added) if added and marked is None else body
        route = RouteRequest(caller.namespace, caller.session, pieces, is_arranged=marked is not None)
        outgoing = OutgoingRequest(scope["method"], write_target(scope), headers, sent)
        return RoutedCall(self.gateway, caller, path, body, view, route, outgoing, began, added=added, marked=marked)

    def _must_read(self, body: bytes, headers: RawHeaders) -> bool:
        """Whether a prompt is parsed before it is sent. Otherwise it is parsed behind the answer, for the record."""
        settings, router = self.settings, self.router
        return (
            router.needs_pieces
            or bool(settings.salt_secret)
            or settings.session_hint == "body"
            or router.arranges
            or (len(router.replicas) > 1 and b'"session_id"' in body)
            or bool(find_header(headers, EDIT_HEADER.encode()))
        )

    def arrange(self, call: RoutedCall, marked: MarkedRequest, decision: RouteDecision) -> None:
        """Put the marked passages in the order of the replica that was chosen."""
        arranger = decision.replica.arranger
        assert arranger is not None
        namespace = Namespace(tenant=call.caller.namespace.hex(), model=call.view.model, salt=call.salt)
        call.arranged = arranged = marked.arrange(arranger, namespace)
        call.outgoing = replace(call.outgoing, body=write_fields(arranged.fields, call.added))
        if call.route.pieces.hashes:
            call.route = replace(call.route, pieces=_cut(call.caller, call.view, arranged.list_parts()))


def _cut(caller: Caller, view: PromptView, parts: Sequence[PromptPart]) -> PromptPieces:
    return cut_prompt(parts, caller.namespace + view.model.encode("utf-8", "surrogatepass"))


_UNSALTED = ApiError(
    400,
    "the body cannot be read, and no salt can be set in it",
    hint="send a JSON object below 4 MiB",
    code="unreadable",
)


def write_route(decision: RouteDecision, policy: str) -> Headers:
    """The headers that say where a request went, and why. They speak of the caller's own prompts only."""
    outcome, replica = decision.outcome.encode(), decision.replica.id.encode()
    return [
        (b"x-semantic-route", outcome),
        (b"x-semantic-placement", outcome),
        (b"x-semantic-score", f"{decision.score:.4f}".encode()),
        (b"x-route-reason", f"{policy};{decision.reason}".encode()),
        (b"x-replica-id", replica),
        (b"x-semantickv-replica", replica),
    ]


class ReplicaSource(Protocol):
    """Where replicas come from while the router runs; `ConfigError` where one cannot be added or removed."""

    @property
    def has_file(self) -> bool:
        """Whether there is a file to follow."""

    def add(self, gateway: Gateway, url: str, events: str = "") -> Replica:
        """Add a replica by its address."""

    def remove(self, gateway: Gateway, name: str) -> Replica:
        """Remove a replica by its id; `KeyError` where there is none."""

    async def follow_file(self, gateway: Gateway) -> None:
        """Add and remove what changes in the file, until cancelled."""


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
        found = describe_replicas(self.gateway.router, self.gateway.follower)
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


class Gateway(ProxyApp):
    """The application. ``shows_routes`` adds the headers that say where a request went and why."""

    def __init__(
        self,
        settings: EdgeSettings,
        router: Router,
        trace_log: TraceLog | None = None,
        *,
        shows_routes: bool = False,
        follower: CacheFollower | None = None,
        link: RedisLink[RouterSync] | None = None,
        source: ReplicaSource | None = None,
    ) -> None:
        super().__init__(max_requests=settings.max_requests, timeout_s=settings.timeout_s)
        self.settings = settings
        self.router = router
        self.trace_log = trace_log
        self.shows_routes = shows_routes
        self.follower = follower
        self.link = link
        self.source = source
        self.metrics = EdgeMetrics(self.read_gauges)
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
        caches = {} if self.follower is None else self.follower.caches
        return {
            "semantickv_event_batches_total": {(name,): one.subscriber.batches for name, one in caches.items()},
            "semantickv_event_losses_total": {(name,): one.subscriber.losses for name, one in caches.items()},
            "semantickv_evicted_pieces_total": {(name,): one.held.forgotten for name, one in caches.items()},
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
        if self.follower is not None and replica.id in self.follower.caches:
            key = find_header(call.outgoing.headers, b"authorization").encode("latin-1")
            fields = call.view.fields if call.arranged is None else call.arranged.fields
            learns = bool(self.settings.salt_secret) or self.settings.one_tenant
            prompt = ServedPrompt(replica, pieces, fields, call.salt, key, receipt.prompt_tokens, learns)
            self.follower.note_served(prompt)
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
        if self.follower is not None:
            jobs.append(self.follower.run())
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
