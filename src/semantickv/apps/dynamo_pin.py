"""Stands in front of a stock Dynamo frontend and pins each request to the worker that has computed its passages.

::

    client ─▶ PinGateway ─x-dynamo-worker-instance-id─▶ Dynamo's frontend ─▶ worker
                  ▲ GET /health: who is there                 │
                  └───────── nvext.worker_id: who answered ◀──┘

Needs nothing of Dynamo but its HTTP. Load is what this gateway has pinned itself: run one of them. Where Dynamo's own
loads and KV events should count, there is `semantickv dynamo-router`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semantickv.apps.answers import NOT_FOUND, answer_error, send_error, send_json
from semantickv.apps.callers import add_fields, identify_caller
from semantickv.apps.edge_call import PROMPT_PATHS
from semantickv.edge.asgi_side import AsgiSide
from semantickv.edge.connection import AnswerHead
from semantickv.edge.exchange import ClientSide, EngineExchange, EngineTimeouts, OutgoingRequest, fetch
from semantickv.edge.faults import Fault
from semantickv.edge.headers import find_header, select_request_headers, select_response_headers
from semantickv.edge.intake import Intake, IntakeLimits
from semantickv.edge.pool import ConnectionPool
from semantickv.routing.fingerprint import NO_PIECES, PromptPieces, cut_prompt, load_cutter
from semantickv.routing.prompt_view import PromptView, read_prompt
from semantickv.routing.worker_evidence import WorkerEvidence
from semantickv.settings import EdgeSettings
from semblend.integration.dynamo.placement import Placement, PlacementReason, WorkerKey, WorkerState
from semblend.integration.dynamo.requests import (
    DEFAULT_ENDPOINT,
    WORKER_HEADER,
    PinnedAnswer,
    ask_for_worker,
    has_rules,
    read_workers,
    write_pin_headers,
)
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

HEALTH = OutgoingRequest("GET", "/health", [], b"")
HEALTH_TIMEOUTS = EngineTimeouts(answer_s=2.0, silence_s=2.0)
MOST_HEALTH_BYTES = 8 << 20
_FREE = Placement(None, PlacementReason.CONSTRAINED)
log = logging.getLogger("semantickv")


@dataclass(slots=True)
class PinCall:
    """One request under way."""

    body: bytes
    outgoing: OutgoingRequest
    pieces: PromptPieces = NO_PIECES
    placement: Placement = _FREE


@dataclass(slots=True)
class PinGateway:
    """The application. ``workers`` are those that the frontend lists; ``counts`` says why requests went where."""

    settings: EdgeSettings
    pool: ConnectionPool
    evidence: WorkerEvidence
    endpoint: str = DEFAULT_ENDPOINT
    workers: tuple[WorkerKey, ...] = ()
    running: Counter[WorkerKey] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    intake: Intake = field(init=False)
    timeouts: EngineTimeouts = field(init=False)
    _running: set[PinForwarding] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.intake = Intake(IntakeLimits(requests=self.settings.max_requests))
        self.timeouts = EngineTimeouts(self.settings.timeout_s, self.settings.timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            method, path = scope["method"], scope["path"]
            if method == "GET" and path == "/health":
                await send_json(send, {"status": "ok" if self.workers else "waiting", "workers": len(self.workers)})
            elif self.is_forwarded(method, path):
                await self._forward(scope, receive, send)
            else:
                await send_error(send, NOT_FOUND)

    def warm_up(self) -> None:
        """Load numba and its kernels: seconds that no request must wait for."""
        load_cutter()

    async def refresh_workers(self) -> None:
        """Ask the frontend who is there. A frontend that does not answer changes nothing."""
        answer = await fetch(self.pool, HEALTH, HEALTH_TIMEOUTS, most_bytes=MOST_HEALTH_BYTES)
        if isinstance(answer, Fault):
            return
        try:
            self.workers = read_workers(json.loads(answer.body), self.endpoint)
            self.evidence.note_workers(self.workers)
            for gone in self.running.keys() - set(self.workers):
                if not self.running[gone]:
                    del self.running[gone]
        except (ValueError, RecursionError):
            log.warning("the frontend's /health is not JSON")

    # -- a request ---------------------------------------------------------------------------------------------------

    @staticmethod
    def is_forwarded(method: str, path: str) -> bool:
        """Whether a request goes to the frontend."""
        return (method == "POST" and path in PROMPT_PATHS) or (method == "GET" and path == "/v1/models")

    def forward(self, scope: Mapping[str, Any], body: bytes, began: float, client: ClientSide) -> PinForwarding:  # noqa: ARG002
        """Send a request on that has a place in the intake. The place is given back in the end."""
        try:
            call = self._open(scope, body)
        except BaseException:
            self.intake.leave(body)
            raise
        self.counts[call.placement.reason.value] += 1
        forwarding = PinForwarding(self, call, client)
        self._running.add(forwarding)
        forwarding.begin()
        return forwarding

    def refuse(self, scope: Mapping[str, Any], error: ApiError, client: ClientSide) -> None:  # noqa: ARG002
        """Answer a request that is not forwarded with an error."""
        answer_error(client, error)

    def note_left(self, scope: Mapping[str, Any]) -> None:
        """A client left before its request was whole: nothing is counted here."""

    def note_end(self, forwarding: PinForwarding) -> None:
        """A request has ended, whatever became of it."""
        self._running.discard(forwarding)
        self.intake.leave(forwarding.call.body)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a request from an ASGI server, and send its answer there."""
        refused = self.intake.enter()
        if refused is not None:
            await send_error(send, refused)
            return
        body: bytes | ApiError | Fault | None = None
        try:
            body = await self.intake.read_body(scope["headers"], receive)
        finally:
            if not isinstance(body, bytes):
                self.intake.leave(b"")
        if isinstance(body, ApiError):
            await send_error(send, body)
        elif isinstance(body, bytes):
            side = AsgiSide(send)
            await side.run(receive, self.forward(scope, body, time.perf_counter(), side))

    def _open(self, scope: Mapping[str, Any], body: bytes) -> PinCall:
        """Read a request and decide where it goes. One that cannot be read, or that pins itself, passes as it is."""
        headers = select_request_headers(scope["headers"])
        query = scope["query_string"].decode("latin-1")
        target = scope["path"] + (f"?{query}" if query else "")
        outgoing = OutgoingRequest(scope["method"], target, headers, body)
        view = read_prompt(body)
        fields = view.fields if scope["method"] == "POST" else {}
        if not fields or has_rules(fields) or find_header(headers, WORKER_HEADER):
            return PinCall(body, outgoing)
        asked = add_fields(body, fields, {"nvext": ask_for_worker(fields)})
        pieces = self._cut(view, identify_caller(headers, self.settings.hash_key).namespace)
        states = [WorkerState(key, self.running[key]) for key in self.workers]
        return PinCall(body, replace(outgoing, body=asked), pieces, self.evidence.choose(pieces, states))

    @staticmethod
    def _cut(view: PromptView, caller: bytes) -> PromptPieces:
        """Cut a prompt; key, model and salt are its namespace."""
        own = view.fields.get("nvext")
        salts = [view.fields.get("cache_salt"), own.get("cache_salt") if isinstance(own, dict) else None]
        words = [view.model, *(salt if isinstance(salt, str) else "" for salt in salts)]
        return cut_prompt(view.list_parts(), caller + "\0".join(words).encode("utf-8", "surrogatepass"))

    def learn(self, call: PinCall, seen: PinnedAnswer, worker: WorkerKey | None) -> None:
        """Remember who computed the prompt, and compare its cache with what was expected of it."""
        if not call.pieces.hashes or seen.worker is None:
            return
        if seen.worker != worker:
            self.evidence.note_placed(call.pieces, seen.worker)
        elif seen.cached_tokens is not None:
            self.evidence.note_answer(call.placement, seen.cached_tokens)

    # -- life --------------------------------------------------------------------------------------------------------

    async def _live(self, receive: Receive, send: Send) -> None:
        """Follow the frontend's list of workers while the server runs."""
        await receive()
        self.warm_up()
        task = asyncio.ensure_future(self._follow_workers())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for forwarding in list(self._running):
            forwarding.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.pool.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _follow_workers(self) -> None:
        while True:
            await self.refresh_workers()
            await asyncio.sleep(self.settings.health_s if self.workers else min(1.0, self.settings.health_s))


class PinForwarding:
    """One request to the frontend: to its worker and, where the frontend refuses the pin, once more without."""

    __slots__ = ("_client", "_exchange", "_gateway", "_refused", "_seen", "_status", "_worker", "call")

    def __init__(self, gateway: PinGateway, call: PinCall, client: ClientSide) -> None:
        self.call = call
        self._gateway = gateway
        self._client = client
        self._exchange: EngineExchange | None = None
        self._worker: WorkerKey | None = None
        self._refused: WorkerKey | None = None
        self._seen = PinnedAnswer()
        self._status = 0

    def begin(self) -> None:
        """Send the request."""
        worker = self.call.placement.worker
        if worker is not None:
            self._gateway.evidence.note_placed(self.call.pieces, worker)
        self._send(worker)

    # -- what the client's side calls ------------------------------------------------------------------------------

    def leave(self) -> None:
        if self._exchange is not None:
            self._exchange.cancel()
            self._end()

    def stop(self) -> None:
        if self._exchange is not None:
            self._client.cut()
            self.leave()

    def pause(self) -> None:
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        if self._exchange is not None:
            self._exchange.resume()

    # -- what the exchange calls -----------------------------------------------------------------------------------

    def take_head(self, head: AnswerHead) -> None:
        call, gateway = self.call, self._gateway
        assert self._exchange is not None
        if self._worker is not None and head.status >= 400:
            self._exchange.cancel()
            self._refused = self._worker
            self._release()
            gateway.counts["retried"] += 1
            call.placement = Placement(None, PlacementReason.FAULT)
            self._send(None)
            return
        self._status = head.status
        if self._refused is not None and head.status < 400:
            gateway.evidence.note_fault(self._refused)  # it was the pin: the same request is welcome elsewhere
        ours = [
            (b"x-semantic-route", call.placement.outcome.value.encode()),
            (b"x-route-reason", call.placement.reason.value.encode()),
        ]
        self._client.start(head.status, select_response_headers(head.headers, [name for name, _ in ours]) + ours)

    def take_piece(self, piece: bytes, *, is_last: bool) -> None:
        try:
            self._client.write(piece, is_last=is_last)
            self._seen.observe(piece)
            if is_last and self._status < 400:
                self._gateway.learn(self.call, self._seen, self._worker)
        except Exception:
            self._client.cut()
            raise
        finally:
            if is_last:
                self._end()

    def take_fault(self, fault: Fault) -> None:
        """The frontend itself is gone: another worker would not help."""
        if self._status:
            self._client.cut()
        else:
            answer_error(self._client, fault.as_api_error())
        self._end()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _send(self, worker: WorkerKey | None) -> None:
        gateway, outgoing = self._gateway, self.call.outgoing
        if worker is not None:
            outgoing = replace(outgoing, headers=[*outgoing.headers, *write_pin_headers(worker)])
            gateway.running[worker] += 1
        self._worker = worker
        self._exchange = EngineExchange(gateway.pool, outgoing, gateway.timeouts, self)
        self._exchange.begin()

    def _release(self) -> None:
        """Take the request off its worker."""
        if self._worker is not None:
            self._gateway.running[self._worker] -= 1
            self._worker = None

    def _end(self) -> None:
        self._exchange = None
        self._release()
        self._gateway.note_end(self)
