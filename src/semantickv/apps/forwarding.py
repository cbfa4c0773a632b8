"""One request on its way: placed, sent, sent again where nothing had come back, passed on, and written down.

::

    begin ─▶ Router.choose ─▶ EngineExchange ─▶ take_head ─▶ ClientSide.start
                 ▲                 │ take_fault      take_piece ─▶ ClientSide.write ─▶ _end
                 └─────────────────┘ before the first byte
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semantickv.apps.answers import answer_error
from semantickv.apps.edge_call import CallOpener, EdgeCall
from semantickv.edge.connection import AnswerHead
from semantickv.edge.exchange import CLIENT_LEFT, ClientSide, EngineExchange, EngineTimeouts
from semantickv.edge.faults import Fault, FaultKind
from semantickv.edge.headers import select_response_headers
from semantickv.routing.arranging import write_order
from semantickv.routing.replica import Replica
from semantickv.routing.router import NoReplica, RouteDecision, Router, RouteRequest
from semantickv.telemetry.answer_reader import AnswerReader
from semblend.arrange import Arrangement
from semblend.wire.errors import ApiError

MOST_ATTEMPTS = 3
STOPPED = Fault(FaultKind.STOPPED, "this server stops")
BUSY = Fault(FaultKind.BUSY)


@dataclass(frozen=True, slots=True)
class Lane:
    """What all requests of an application share. ``shows_routes`` adds the headers that say where one went and why."""

    router: Router
    opener: CallOpener
    timeouts: EngineTimeouts
    shows_routes: bool
    note_sent: Callable[[RouteDecision, RouteRequest], Sequence[int]]
    """Called once a request is on its way to a replica; returns what it brings there."""
    note_refused: Callable[[RouteDecision, Sequence[int]], None]
    """Called if the replica did not take the request, with what it brought."""
    note_arranged: Callable[[RouteDecision, Sequence[Arrangement]], None]
    """Called if the replica took a request whose passages were arranged."""
    note_end: Callable[[Forwarding], None]
    """Called once, when a request has ended, whatever became of it."""


class Forwarding:
    """A request between its client's side and the engines. It ends once, and `Lane.note_end` hears of it."""

    __slots__ = ("_client", "_exchange", "_is_over", "_lane", "_tried", "call")

    def __init__(self, lane: Lane, call: EdgeCall, client: ClientSide) -> None:
        self.call = call
        self._lane = lane
        self._client = client
        self._exchange: EngineExchange | None = None
        self._tried: list[Replica] = []
        self._is_over = False

    def begin(self) -> None:
        """Place the request and send it; or the error, where nobody can serve."""
        lane, call = self._lane, self.call
        decision = lane.router.choose(call.route, self._tried)
        if isinstance(decision, NoReplica):
            self._refuse(_NO_REPLICA if call.fault is None else call.fault.as_api_error())
            return
        call.attempts += 1
        call.decision = decision
        self._tried.append(decision.replica)
        if call.marked is not None:
            lane.opener.arrange(call, call.marked, decision)
        lane.router.start(decision, call.route)
        self._exchange = EngineExchange(decision.replica.pool, call.outgoing, lane.timeouts, self)
        self._exchange.begin()
        call.new_keys = lane.note_sent(decision, call.route)

    # -- what the client's side calls ------------------------------------------------------------------------------

    def leave(self) -> None:
        self._stop(CLIENT_LEFT)

    def pause(self) -> None:
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        if self._exchange is not None:
            self._exchange.resume()

    # -- what the application calls --------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the request because the server stops, or because it failed here; its client gets no more."""
        if not self._is_over:
            self._client.cut()
            self._stop(STOPPED)

    # -- what the exchange calls -----------------------------------------------------------------------------------

    def take_head(self, head: AnswerHead) -> None:
        call, lane = self.call, self._lane
        decision = call.decision
        assert decision is not None
        assert self._exchange is not None
        if head.status == 503 and self._has_another():
            self._exchange.cancel()
            self.take_fault(BUSY)
            return
        call.first_byte, call.status = time.perf_counter(), head.status
        if head.status >= 400:
            lane.note_refused(decision, call.new_keys)
        lane.router.note_first_byte(decision)
        call.reader = AnswerReader(head.headers)
        if call.arranged is not None and head.status == 200:
            lane.note_arranged(decision, call.arranged.sent)
        ours = [(b"x-request-id", call.caller.request_id.encode("latin-1"))]
        if lane.shows_routes:
            ours += write_route(decision, lane.router.policy)
        if call.arranged is not None and (order := write_order(call.arranged.groups)):
            ours.append((b"x-semantic-order", order))
        self._client.start(head.status, select_response_headers(head.headers, (name for name, _ in ours)) + ours)

    def take_piece(self, piece: bytes, *, is_last: bool) -> None:
        call = self.call
        assert call.reader is not None
        try:
            self._client.write(piece, is_last=is_last)
            call.reader.observe(piece)
        except Exception:
            self._client.cut()
            raise
        finally:
            if is_last:
                self._end_attempt(None)
                self._end()

    def take_fault(self, fault: Fault) -> None:
        call = self.call
        assert call.decision is not None
        if fault.may_retry and not call.status:
            self._lane.note_refused(call.decision, call.new_keys)
        self._end_attempt(fault)
        if call.status:
            self._client.cut()  # the answer had begun
            self._end()
        elif fault.may_retry and call.attempts < MOST_ATTEMPTS:
            try:
                self.begin()
            except Exception:
                self.stop()
                raise
        else:
            self._refuse(fault.as_api_error())

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _has_another(self) -> bool:
        """Whether another replica could be asked."""
        if self.call.attempts >= MOST_ATTEMPTS:
            return False
        return isinstance(self._lane.router.choose(self.call.route, self._tried), RouteDecision)

    def _refuse(self, error: ApiError) -> None:
        self.call.status = error.status
        answer_error(self._client, error, self.call.caller.request_id)
        self._end()

    def _stop(self, fault: Fault) -> None:
        if self._is_over:
            return
        if self._exchange is not None:
            self._exchange.cancel()
            self._end_attempt(fault)
        self._end()

    def _end_attempt(self, fault: Fault | None) -> None:
        """Take the request off its replica."""
        call = self.call
        call.fault = fault
        self._exchange = None
        assert call.decision is not None
        self._lane.router.end(call.decision, fault, had_first_byte=call.first_byte is not None)

    def _end(self) -> None:
        self._is_over = True
        self._lane.note_end(self)


_NO_REPLICA = ApiError(503, "no engine can serve", hint="try again in a moment", code="no_replica", retry_after_s=1)


def write_route(decision: RouteDecision, policy: str) -> list[tuple[bytes, bytes]]:
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
