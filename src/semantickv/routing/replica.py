"""One engine that requests can go to, and what the router knows about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from semantickv.edge.faults import Fault, FaultKind
from semantickv.edge.pool import ConnectionPool
from semantickv.routing.breaker import CircuitBreaker
from semantickv.routing.locality import ReplicaMemory
from semblend.arrange import Arranger

PROBES_TO_CHANGE = 2
"""Probes in a row that must fail before a replica counts as down."""


class Health(StrEnum):
    """What the last answers of a replica say about it."""

    UNKNOWN = "unknown"
    """It has not answered yet, or its last connection was refused. Requests may still be tried there."""
    UP = "up"
    """It answers."""
    DOWN = "down"
    """Several health checks in a row failed: it gets no requests until one succeeds."""


@dataclass(slots=True, eq=False)
class Replica:
    """``id`` is what clients see; the address stays with the operator."""

    id: str
    pool: ConnectionPool
    memory: ReplicaMemory
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    arranger: Arranger | None = None
    """In which orders passages were sent here; None where nothing is arranged."""
    health: Health = Health.UNKNOWN
    running: int = 0
    waiting_tokens: int = 0
    """Tokens that running requests still have to compute, as the router estimates them."""
    running_elsewhere: int = 0
    """Requests that other routers have on this replica, as they last said."""
    waiting_elsewhere: int = 0
    """Tokens that those still have to compute."""
    recent_requests: float = 0.0
    """Requests of the recent past, fading with every request that the router places."""
    last_turn: int = 0
    served: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    _failed_probes: int = 0

    @property
    def can_serve(self) -> bool:
        """Whether requests may be tried here."""
        return self.health is not Health.DOWN and self.breaker.may_pass

    @property
    def is_up(self) -> bool:
        """Whether it answers, as far as anybody has seen, and gets requests."""
        return self.health is Health.UP and self.breaker.may_pass

    @property
    def all_running(self) -> int:
        """Requests on this replica, whoever sent them."""
        return self.running + self.running_elsewhere

    def note_probe(self, is_well: bool) -> None:
        """Take the result of a health check. A replica that went down is taken to come back with an empty cache."""
        self._failed_probes = 0 if is_well else self._failed_probes + 1
        if is_well:
            self.health = Health.UP
        elif self._failed_probes >= PROBES_TO_CHANGE and self.health is not Health.DOWN:
            self.health = Health.DOWN
            self.forget_all()

    def note_refused(self) -> None:
        """Nobody listens there, or its name is unknown: whatever was seen before, it is not up now."""
        if self.health is Health.UP:
            self.health = Health.UNKNOWN

    def forget_all(self) -> None:
        """The engine's cache is empty."""
        self.memory.clear()
        if self.arranger is not None:
            self.arranger.clear()

    def note_end(self, fault: Fault | None) -> None:
        """Take the end of a request."""
        if fault is None:
            self.served += 1
            self.breaker.note_success()
            if self.health is Health.UNKNOWN:
                self.health = Health.UP
        elif fault.blames_engine:
            self.faults[fault.kind.value] += 1
            self.breaker.note_fault()
            if fault.kind is FaultKind.REFUSED:
                self.note_refused()
        else:
            self.breaker.note_nothing()
