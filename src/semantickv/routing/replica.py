"""One engine that requests can go to, and what the router knows about it: load, health, faults, speed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from semantickv.edge.upstream_call import Fault, FaultKind, Upstream
from semantickv.routing.locality import ReplicaMemory
from semblend.arrange import Arranger

MIN_SPEED_SAMPLES = 5
SPEED_SHARE = 0.1
"""What the newest measurement counts in the mean."""


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Faults in a row that open a breaker, and how long it stays open at first and at most, in seconds."""

    faults: int = 3
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0


class BreakerState(StrEnum):
    """Whether requests go through."""

    CLOSED = "closed"
    """They do."""
    OPEN = "open"
    """They do not, until the pause is over."""
    HALF_OPEN = "half_open"
    """One may go through, and decides."""


class CircuitBreaker:
    """After several faults in a row a replica is left alone for a while, then tried with one request.

    The pause doubles with every failed trial, up to a limit.

    >>> breaker = CircuitBreaker(clock=lambda: 0.0)
    >>> for _ in range(3): breaker.note_fault()
    >>> breaker.state.value, breaker.may_pass
    ('open', False)
    """

    def __init__(self, limits: BreakerLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or BreakerLimits()
        self._clock = clock
        self._faults = 0
        self._pause_s = self.limits.first_pause_s
        self._opened_at: float | None = None
        self._on_trial = False

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        is_over = self._clock() - self._opened_at >= self._pause_s
        return BreakerState.HALF_OPEN if is_over else BreakerState.OPEN

    @property
    def may_pass(self) -> bool:
        if self._opened_at is None:  # nearly always, and a router of many replicas asks for each of them
            return True
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._on_trial)

    def note_start(self) -> None:
        """A request goes through; after a pause it is the trial."""
        if self.state is BreakerState.HALF_OPEN:
            self._on_trial = True

    def note_success(self) -> None:
        """A request was answered: everything is well again."""
        self._faults, self._pause_s, self._opened_at, self._on_trial = 0, self.limits.first_pause_s, None, False

    def note_fault(self) -> None:
        """A request met a fault of the engine."""
        self._faults += 1
        if self._on_trial:
            self._pause_s = min(2 * self._pause_s, self.limits.longest_pause_s)
        if self._on_trial or (self._opened_at is None and self._faults >= self.limits.faults):
            self._opened_at, self._on_trial = self._clock(), False

    def trip(self) -> None:
        """Open at once: one sign is enough."""
        self._faults = self.limits.faults
        if self._on_trial:
            self._pause_s = min(2 * self._pause_s, self.limits.longest_pause_s)
        self._opened_at, self._on_trial = self._clock(), False

    def note_nothing(self) -> None:
        """A request ended without telling anything about the engine, for example because its client left."""
        self._on_trial = False


class MeanSpeed:
    """A fading mean of the seconds that a replica takes for a token of prefill, all that waits in front counted.

    >>> speed = MeanSpeed()
    >>> for _ in range(9): speed.add(0.001)
    >>> round(speed.seconds_per_token, 4), speed.is_known
    (0.001, True)
    """

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._samples = 0

    @property
    def is_known(self) -> bool:
        return self._samples >= MIN_SPEED_SAMPLES

    def add(self, seconds_per_token: float) -> None:
        self._samples += 1
        share = max(SPEED_SHARE, 1 / self._samples)
        self.seconds_per_token += share * (seconds_per_token - self.seconds_per_token)


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
    pool: Upstream
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
    slowness: float = 1.0
    """Times as slow as the fastest replica, as measured; 1 where it is not known, or not much."""
    stream_speed: MeanSpeed = field(default_factory=MeanSpeed)
    whole_speed: MeanSpeed = field(default_factory=MeanSpeed)
    first_byte_at: float = 0.0
    """When it last began an answer, by `time.perf_counter`."""
    hung_at: float = 0.0
    """When it was last found to begin no answers although it takes requests; 0 where it answers."""
    failed_probes_to_leave: int = 2
    served: int = 0
    requests_own_faults: int = 0
    """Faults that followed a request to other replicas: the request's, not this replica's."""
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
    def is_hung(self) -> bool:
        return self.hung_at > 0

    @property
    def is_doubtful(self) -> bool:
        """Whether a health check has failed, and the next one decides."""
        return 0 < self._failed_probes < self.failed_probes_to_leave

    @property
    def all_running(self) -> int:
        """Requests on this replica, whoever sent them."""
        return self.running + self.running_elsewhere

    def note_probe(self, is_well: bool) -> None:
        """Take the result of a health check. A replica that went down is taken to come back with an empty cache."""
        self._failed_probes = 0 if is_well else self._failed_probes + 1
        if is_well:
            self.health = Health.UP
        elif self._failed_probes >= self.failed_probes_to_leave and self.health is not Health.DOWN:
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

    def note_end(self, fault: Fault | None, *, is_the_requests: bool = False) -> None:
        """Take the end of a request. A fault that is the request's own says nothing about the replica."""
        if fault is None:
            self.served += 1
            self.hung_at = 0.0
            self.breaker.note_success()
            if self.health is Health.UNKNOWN:
                self.health = Health.UP
        elif is_the_requests:
            self.requests_own_faults += 1
            self.breaker.note_nothing()
        elif fault.blames_engine:
            self.faults[fault.kind.value] += 1
            self.breaker.note_fault()
            if fault.kind is FaultKind.REFUSED:
                self.note_refused()
        else:
            self.breaker.note_nothing()

    def note_left(self, was_overdue: bool) -> None:
        """A client left before the first byte; a fault if it had waited much longer than requests do here."""
        if was_overdue:
            self.faults["left_waiting"] += 1
            self.breaker.note_fault()
        else:
            self.breaker.note_nothing()

    def note_hung(self, now: float) -> None:
        """It takes requests and begins no answer: leave it alone, and try it with one request after a pause."""
        self.hung_at = now
        self.faults["hung"] += 1
        self.breaker.trip()
