"""One engine that requests can go to, and what the router knows about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from semantickv.edge.faults import Fault
from semantickv.edge.pool import ConnectionPool
from semantickv.routing.breaker import CircuitBreaker
from semantickv.routing.locality import ReplicaMemory
from semblend.arrange import Arranger

PROBES_TO_CHANGE = 2
"""Probes in a row that must fail before a replica counts as down."""


@dataclass(slots=True, eq=False)
class Replica:
    """``id`` is what clients see; the address stays with the operator."""

    id: str
    pool: ConnectionPool
    memory: ReplicaMemory
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    arranger: Arranger | None = None
    """In which orders passages were sent here; None where nothing is arranged."""
    is_up: bool = True
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
        return self.is_up and self.breaker.may_pass

    @property
    def all_running(self) -> int:
        """Requests on this replica, whoever sent them."""
        return self.running + self.running_elsewhere

    def note_probe(self, is_well: bool) -> None:
        """Take the result of a health check. A replica that went down is taken to come back with an empty cache."""
        self._failed_probes = 0 if is_well else self._failed_probes + 1
        if is_well and not self.is_up:
            self.is_up = True
        elif self._failed_probes >= PROBES_TO_CHANGE and self.is_up:
            self.is_up = False
            self.forget_all()

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
        elif fault.blames_engine:
            self.faults[fault.kind.value] += 1
            self.breaker.note_fault()
        else:
            self.breaker.note_nothing()
