"""One request under way, and how it is opened: who calls, what the prompt is, what the engine gets to see of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from semantickv.apps.callers import Caller, add_fields, identify_caller, make_salt, write_fields
from semantickv.edge.exchange import OutgoingRequest
from semantickv.edge.faults import Fault
from semantickv.edge.headers import find_header, select_request_headers
from semantickv.routing.arranging import ArrangedRequest, MarkedRequest, read_marked
from semantickv.routing.fingerprint import NO_PIECES, PromptPieces, cut_prompt
from semantickv.routing.prompt_view import UNREAD, PromptPart, PromptView, read_prompt
from semantickv.routing.router import RouteDecision, Router, RouteRequest
from semantickv.settings import EdgeSettings
from semantickv.telemetry.answer_reader import AnswerReader
from semantickv.telemetry.request_span import RequestSpan
from semblend.errors import InputError
from semblend.prompt import Namespace
from semblend.wire.caller_headers import find_repeated
from semblend.wire.errors import ApiError

PROMPT_PATHS = ("/v1/chat/completions", "/v1/completions")
_HIDDEN = (b"x-tenant-id", b"x-request-id", b"x-session-id")
"""Headers of the client that the engine gets from us or not at all: an engine may trust this server's X-Tenant-ID."""


@dataclass(slots=True)
class EdgeCall:
    """One request under way."""

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
    first_byte: float | None = None
    reader: AnswerReader | None = None
    ticket: int | None = None
    span: RequestSpan | None = None
    added: dict[str, str] = field(default_factory=dict)
    """Fields that this server adds to the body: a salt, a session."""
    marked: MarkedRequest | None = None
    arranged: ArrangedRequest | None = None

    @property
    def salt(self) -> str:
        salt = self.added.get("cache_salt", self.view.fields.get("cache_salt"))
        return salt if isinstance(salt, str) else ""


@dataclass(frozen=True, slots=True)
class CallOpener:
    """Reads requests before they are placed, and writes them for the replica that was chosen."""

    settings: EdgeSettings
    router: Router

    def open(self, scope: Mapping[str, Any], body: bytes, began: float) -> EdgeCall | ApiError:
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
            marked = read_marked(view) if is_prompt and self.router.replicas[0].arranger is not None else None
        except InputError as error:
            return ApiError(400, error.message, hint=error.hint, param="semblend")
        pieces = NO_PIECES
        if is_prompt and self.router.needs_pieces:
            pieces = _cut(caller, view, view.list_parts() if marked is None else marked.list_parts())
        query = scope["query_string"].decode("latin-1")
        target = scope.get("raw_path", path.encode()).decode("latin-1") + (f"?{query}" if query else "")
        sent = add_fields(body, fields, added) if added and marked is None else body
        route = RouteRequest(caller.namespace, caller.session, pieces, is_arranged=marked is not None)
        outgoing = OutgoingRequest(scope["method"], target, headers, sent)
        return EdgeCall(caller, path, body, view, route, outgoing, began, added=added, marked=marked)

    def _must_read(self, body: bytes) -> bool:
        """Whether a prompt is parsed before it is sent. Otherwise it is parsed behind the answer, for the record."""
        settings, router = self.settings, self.router
        return (
            router.needs_pieces
            or bool(settings.salt_secret)
            or settings.session_hint == "body"
            or router.replicas[0].arranger is not None
            or (len(router.replicas) > 1 and b'"session_id"' in body)
        )

    def arrange(self, call: EdgeCall, marked: MarkedRequest, decision: RouteDecision) -> None:
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
