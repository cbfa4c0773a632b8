"""One request on its way through the proxy or the router: read, placed, sent again where nothing had come back.

::

    CallOpener.open ─▶ RoutedCall.place ─▶ Router.choose ─▶ an engine ─▶ take_head ─▶ observe ─▶ end
                            ▲                                  │ a fault before the first byte
                            └──────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semantickv.apps.callers import Caller, add_fields, identify_caller, make_salt, write_fields
from semantickv.apps.proxy import Headers, Place, write_target
from semantickv.edge.headers import find_header, select_request_headers
from semantickv.edge.upstream_call import Fault, FaultKind, OutgoingRequest, UpstreamAnswer
from semantickv.routing.arranging import ArrangedRequest, MarkedRequest, read_marked, write_order
from semantickv.routing.fingerprint import NO_PIECES, PromptPieces, cut_prompt
from semantickv.routing.prompt_view import UNREAD, PromptPart, PromptView, read_prompt
from semantickv.routing.replica import Replica
from semantickv.routing.router import NoReplica, RouteDecision, Router, RouteRequest
from semantickv.settings import EdgeSettings
from semantickv.telemetry.answer_reader import AnswerReader
from semantickv.telemetry.request_span import RequestSpan
from semblend.errors import InputError
from semblend.prompt import Namespace
from semblend.wire.caller_headers import find_repeated
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from semantickv.apps.gateway import Gateway

PROMPT_PATHS = ("/v1/chat/completions", "/v1/completions")
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
    added: dict[str, str] = field(default_factory=dict)
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
        if answer.status >= 400:
            gateway.note_refused(decision, self.new_keys)
        elif self.path in PROMPT_PATHS:
            gateway.router.note_speed(decision, self.first_byte - self.sent_at, self.tokens_ahead, self.is_stream)
        gateway.router.note_first_byte(decision)
        self.reader = AnswerReader(answer.headers)
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
        fields = view.fields if is_prompt and self._must_read(body) else {}
        caller = caller.with_session(fields.get("session_id"))
        headers = select_request_headers(scope["headers"], _HIDDEN)
        headers.append((b"x-request-id", caller.request_id.encode("latin-1")))
        added: dict[str, str] = {}
        session = caller.session
        if settings.salt_secret:
            if is_prompt and not fields:
                return _UNSALTED
            salt = make_salt(settings.salt_secret, caller.namespace, fields.get("cache_salt"))
            headers.append((b"x-tenant-id", salt.encode()))
            # Two tenants may call their sessions alike; an engine must not take them for one.
            session = make_salt(settings.salt_secret, caller.namespace + b"session", session) if session else ""
            added = {"cache_salt": salt} if fields else {}
        in_body = "session_id" in fields
        if session and not (in_body and not find_header(scope["headers"], b"x-session-id")):
            headers.append((b"x-session-id", session.encode("latin-1")))
        if session and fields and (in_body if settings.salt_secret else settings.session_hint == "body"):
            added["session_id"] = session
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

    def _must_read(self, body: bytes) -> bool:
        """Whether a prompt is parsed before it is sent. Otherwise it is parsed behind the answer, for the record."""
        settings, router = self.settings, self.router
        return (
            router.needs_pieces
            or bool(settings.salt_secret)
            or settings.session_hint == "body"
            or router.arranges
            or (len(router.replicas) > 1 and b'"session_id"' in body)
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
