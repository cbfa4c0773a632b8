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
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semantickv.apps.answers import NOT_FOUND, send_error, send_json
from semantickv.apps.callers import add_fields, identify_caller
from semantickv.apps.edge_call import PROMPT_PATHS
from semantickv.edge.faults import Fault
from semantickv.edge.forward import ClientWatch, EngineAnswer, EngineTimeouts, OutgoingRequest, open_answer, relay
from semantickv.edge.headers import find_header, select_request_headers
from semantickv.edge.intake import Intake, IntakeLimits
from semantickv.edge.pool import ConnectionPool
from semantickv.routing.fingerprint import NO_PIECES, PromptPieces, cut_prompt, load_cutter
from semantickv.routing.prompt_view import PromptView, read_prompt
from semantickv.routing.worker_evidence import WorkerEvidence
from semantickv.settings import EdgeSettings
from semblend.integration.dynamo.http_pin import (
    DEFAULT_ENDPOINT,
    WORKER_HEADER,
    PinnedAnswer,
    ask_for_worker,
    has_rules,
    read_workers,
    write_pin_headers,
)
from semblend.integration.dynamo.placement import Placement, PlacementReason, WorkerKey, WorkerState
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
    _timeouts: EngineTimeouts = field(init=False)

    def __post_init__(self) -> None:
        self.intake = Intake(IntakeLimits(requests=self.settings.max_requests))
        self._timeouts = EngineTimeouts(self.settings.timeout_s, self.settings.timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            method, path = scope["method"], scope["path"]
            if method == "GET" and path == "/health":
                await send_json(send, {"status": "ok" if self.workers else "waiting", "workers": len(self.workers)})
            elif (method == "POST" and path in PROMPT_PATHS) or (method == "GET" and path == "/v1/models"):
                await self._forward(scope, receive, send)
            else:
                await send_error(send, NOT_FOUND)

    def warm_up(self) -> None:
        """Load numba and its kernels: seconds that no request must wait for."""
        load_cutter()

    async def refresh_workers(self) -> None:
        """Ask the frontend who is there. A frontend that does not answer changes nothing."""
        watch = ClientWatch(_never)
        try:
            answer = await open_answer(self.pool, HEALTH, HEALTH_TIMEOUTS, watch)
            if isinstance(answer, Fault):
                return
            data = await _read_all(answer)
            self.workers = read_workers(json.loads(data), self.endpoint)
            self.evidence.note_workers(self.workers)
        except (ValueError, RecursionError):
            log.warning("the frontend's /health is not JSON")
        finally:
            watch.stop()

    # -- a request ---------------------------------------------------------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self.intake.enter()
        if refused is not None:
            await send_error(send, refused)
            return
        body = b""
        try:
            found = await self.intake.read_body(scope["headers"], receive)
            if isinstance(found, ApiError):
                await send_error(send, found)
            elif not isinstance(found, Fault):
                body = found
                call = self._open(scope, body)
                self.counts[call.placement.reason.value] += 1
                watch = ClientWatch(receive)
                try:
                    await self._serve(call, send, watch)
                finally:
                    watch.stop()
        finally:
            self.intake.leave(body)

    def _open(self, scope: Scope, body: bytes) -> PinCall:
        """Read a request and decide where it goes. One that cannot be read, or that pins itself, passes as it is."""
        headers = select_request_headers(scope["headers"])
        query = scope["query_string"].decode("latin-1")
        target = scope["path"] + (f"?{query}" if query else "")
        outgoing = OutgoingRequest(scope["method"], target, headers, body)
        view = read_prompt(body)
        fields = view.fields if scope["method"] == "POST" else {}
        if not fields or has_rules(fields) or find_header(headers, WORKER_HEADER):
            return PinCall(outgoing)
        asked = add_fields(body, fields, {"nvext": ask_for_worker(fields)})
        pieces = self._cut(view, identify_caller(headers, self.settings.hash_key).namespace)
        states = [WorkerState(key, self.running[key]) for key in self.workers]
        return PinCall(replace(outgoing, body=asked), pieces, self.evidence.choose(pieces, states))

    @staticmethod
    def _cut(view: PromptView, caller: bytes) -> PromptPieces:
        """Cut a prompt; key, model and salt are its namespace."""
        own = view.fields.get("nvext")
        salts = [view.fields.get("cache_salt"), own.get("cache_salt") if isinstance(own, dict) else None]
        words = [view.model, *(salt if isinstance(salt, str) else "" for salt in salts)]
        return cut_prompt(view.list_parts(), caller + "\0".join(words).encode("utf-8", "surrogatepass"))

    async def _serve(self, call: PinCall, send: Send, watch: ClientWatch) -> None:
        """Send a request to its worker. Where the frontend refuses the pin, send it once more without."""
        worker = call.placement.worker
        if worker is not None:
            pinned = replace(call.outgoing, headers=[*call.outgoing.headers, *write_pin_headers(worker)])
            self.evidence.note_placed(call.pieces, worker)
            if await self._try(call, pinned, worker, send, watch) or watch.has_left:
                return
            self.counts["retried"] += 1
            call.placement = Placement(None, PlacementReason.FAULT)
        if await self._try(call, call.outgoing, None, send, watch) and worker is not None:
            self.evidence.note_fault(worker)  # it was the pin: the same request is welcome elsewhere

    async def _try(
        self, call: PinCall, outgoing: OutgoingRequest, worker: WorkerKey | None, send: Send, watch: ClientWatch
    ) -> bool:
        """Send a request and pass the answer on. False if a pinned one was refused: nothing has been passed on."""
        seen = PinnedAnswer()
        if worker is not None:
            self.running[worker] += 1
        try:
            answer = await open_answer(self.pool, outgoing, self._timeouts, watch)
            if isinstance(answer, Fault):
                if not watch.has_left:
                    await send_error(send, answer.as_api_error())
                return True  # the frontend itself is gone: another worker would not help
            try:
                if worker is not None and answer.head.status >= 400:
                    return False
                reason = call.placement.reason.value.encode()
                headers = [(b"x-semantic-route", call.placement.outcome.value.encode()), (b"x-route-reason", reason)]
                fault = await relay(answer, send, watch, headers=headers, observe=seen.observe)
                if fault is None and answer.head.status < 400:
                    self._learn(call, seen, worker)
                return answer.head.status < 400 or worker is not None
            finally:
                answer.close()
        finally:
            if worker is not None:
                self.running[worker] -= 1

    def _learn(self, call: PinCall, seen: PinnedAnswer, worker: WorkerKey | None) -> None:
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
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.pool.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _follow_workers(self) -> None:
        while True:
            await self.refresh_workers()
            await asyncio.sleep(self.settings.health_s if self.workers else min(1.0, self.settings.health_s))


async def _never() -> Any:
    """A client that never leaves."""
    await asyncio.Event().wait()


async def _read_all(answer: EngineAnswer) -> bytes:
    """Read a short answer whole; nothing of one that breaks off or is too long."""
    pieces: list[Any] = []
    try:
        while piece := await answer.read():
            if isinstance(piece, Fault) or sum(map(len, pieces)) > MOST_HEALTH_BYTES:
                return b""
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        answer.close()
