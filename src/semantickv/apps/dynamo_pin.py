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
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semantickv.apps.callers import add_fields, identify_caller
from semantickv.apps.proxy import NOT_FOUND, Headers, Place, ProxyApp, send_error, send_json, write_target
from semantickv.edge.headers import find_header, select_request_headers
from semantickv.edge.upstream_call import Fault, FaultKind, OutgoingRequest, Upstream, UpstreamAnswer, fetch
from semantickv.routing.fingerprint import NO_PIECES, PromptPieces, cut_prompt, load_cutter
from semantickv.routing.prompt_view import PROMPT_PATHS, PromptView, read_prompt
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
HEALTH_S = 2.0
MOST_HEALTH_BYTES = 8 << 20
PIN_REFUSED = Fault(FaultKind.BUSY, "the frontend refused the pin")
_FREE = Placement(None, PlacementReason.CONSTRAINED)
log = logging.getLogger("semantickv")


class PinGateway(ProxyApp):
    """The application. ``workers`` are those that the frontend lists; ``counts`` says why requests went where."""

    def __init__(
        self, settings: EdgeSettings, pool: Upstream, evidence: WorkerEvidence, endpoint: str = DEFAULT_ENDPOINT
    ) -> None:
        super().__init__(max_requests=settings.max_requests, timeout_s=settings.timeout_s)
        self.settings = settings
        self.pool = pool
        self.evidence = evidence
        self.endpoint = endpoint
        self.workers: tuple[WorkerKey, ...] = ()
        self.placed: Counter[WorkerKey] = Counter()
        """Requests that are pinned to each worker now."""
        self.counts: Counter[str] = Counter()

    def warm_up(self) -> None:
        """Load numba and its kernels: seconds that no request must wait for."""
        load_cutter()

    async def refresh_workers(self) -> None:
        """Ask the frontend who is there. A frontend that does not answer changes nothing."""
        answer = await fetch(self.pool, HEALTH, HEALTH_S, max_bytes=MOST_HEALTH_BYTES)
        if isinstance(answer, Fault):
            return
        try:
            self.workers = read_workers(json.loads(answer.body), self.endpoint)
            self.evidence.note_workers(self.workers)
            for gone in self.placed.keys() - set(self.workers):
                if not self.placed[gone]:
                    del self.placed[gone]
        except (ValueError, RecursionError):
            log.warning("the frontend's /health is not JSON")

    # -- a request ---------------------------------------------------------------------------------------------------

    def is_forwarded(self, method: str, path: str) -> bool:
        return (method == "POST" and path in PROMPT_PATHS) or (method == "GET" and path == "/v1/models")

    async def answer_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        if scope["method"] == "GET" and scope["path"] == "/health":
            await send_json(send, {"status": "ok" if self.workers else "waiting", "workers": len(self.workers)})
        else:
            await send_error(send, NOT_FOUND)

    def open_call(self, scope: Scope, body: bytes, began: float) -> PinCall | ApiError:
        """Read a request and decide where it goes. One that cannot be read, or that pins itself, passes as it is."""
        del began
        headers = select_request_headers(scope["headers"])
        outgoing = OutgoingRequest(scope["method"], write_target(scope), headers, body)
        view = read_prompt(body)
        fields = view.fields if scope["method"] == "POST" else {}
        if not fields or has_rules(fields) or find_header(headers, WORKER_HEADER):
            return PinCall(self, body, outgoing)
        asked = add_fields(body, fields, {"nvext": ask_for_worker(fields)})
        pieces = _cut(view, identify_caller(headers, self.settings.hash_key).namespace)
        return PinCall(self, body, replace(outgoing, body=asked), pieces)

    # -- life --------------------------------------------------------------------------------------------------------

    def list_jobs(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._follow_workers()]

    async def _follow_workers(self) -> None:
        """Follow the frontend's list of workers while the server runs."""
        while True:
            await self.refresh_workers()
            await asyncio.sleep(self.settings.health_s if self.workers else min(1.0, self.settings.health_s))

    async def close(self) -> None:
        await self.pool.close()


@dataclass(slots=True)
class PinCall:
    """One request to the frontend: to its worker and, where the frontend refuses the pin, once more without."""

    gateway: PinGateway
    body: bytes
    outgoing: OutgoingRequest
    pieces: PromptPieces = NO_PIECES
    placement: Placement | None = None
    request_id: str = ""
    _worker: WorkerKey | None = None
    _refused: WorkerKey | None = None
    _seen: PinnedAnswer = field(default_factory=PinnedAnswer)

    def place(self) -> Place:
        gateway, outgoing = self.gateway, self.outgoing
        if self.placement is None:
            self.placement = self._choose()
            gateway.counts[self.placement.reason.value] += 1
        self._worker = worker = self.placement.worker
        if worker is not None:
            gateway.evidence.note_placed(self.pieces, worker)
            gateway.placed[worker] += 1
            outgoing = replace(outgoing, headers=[*outgoing.headers, *write_pin_headers(worker)])
        return Place(gateway.pool, outgoing)

    def _choose(self) -> Placement:
        if not self.pieces.hashes:
            return _FREE
        states = [WorkerState(key, self.gateway.placed[key]) for key in self.gateway.workers]
        return self.gateway.evidence.choose(self.pieces, states)

    def take_head(self, answer: UpstreamAnswer) -> Headers | Fault:
        assert self.placement is not None
        if self._worker is not None and answer.status >= 400:
            return PIN_REFUSED
        if self._refused is not None and answer.status < 400:
            self.gateway.evidence.note_fault(self._refused)  # it was the pin: the same request is welcome elsewhere
        return [
            (b"x-semantic-route", self.placement.outcome.value.encode()),
            (b"x-route-reason", self.placement.reason.value.encode()),
        ]

    def observe(self, piece: bytes) -> None:
        self._seen.observe(piece)

    def end_attempt(self, fault: Fault | None) -> bool:
        """Only a refused pin is tried again: if the frontend itself is gone, another worker would not help."""
        if self._worker is not None:
            self.gateway.placed[self._worker] -= 1
        if fault is not PIN_REFUSED:
            return False
        self._refused = self._worker
        self.gateway.counts["retried"] += 1
        self.placement = Placement(None, PlacementReason.FAULT)
        return True

    def end(self, status: int, fault: Fault | None) -> None:
        """Remember who computed the prompt, and compare its cache with what was expected of it."""
        seen = self._seen
        if fault is not None or not 0 < status < 400 or not self.pieces.hashes or seen.worker is None:
            return
        if seen.worker != self._worker:
            self.gateway.evidence.note_placed(self.pieces, seen.worker)
        elif seen.cached_tokens is not None and self.placement is not None:
            self.gateway.evidence.note_answer(self.placement, seen.cached_tokens)


def _cut(view: PromptView, caller: bytes) -> PromptPieces:
    """Cut a prompt; key, model and salt are its namespace."""
    own = view.fields.get("nvext")
    salts = [view.fields.get("cache_salt"), own.get("cache_salt") if isinstance(own, dict) else None]
    words = [view.model, *(salt if isinstance(salt, str) else "" for salt in salts)]
    return cut_prompt(view.list_parts(), caller + "\0".join(words).encode("utf-8", "surrogatepass"))
