"""A circuit breaker: after several faults in a row a replica is left alone for a while, then tried with one request."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

FAULTS_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class BreakerState(StrEnum):
    """Whether requests go through."""

    CLOSED = "closed"
    """They do."""
    OPEN = "open"
    """They do not, until the pause is over."""
    HALF_OPEN = "half_open"
    """One may go through, and decides."""


class CircuitBreaker:
    """The pause doubles with every failed trial, up to a minute.

    >>> breaker = CircuitBreaker(clock=lambda: 0.0)
    >>> for _ in range(3): breaker.note_fault()
    >>> breaker.state.value, breaker.may_pass
    ('open', False)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults = 0
        self._pause_s = FIRST_PAUSE_S
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
        self._faults, self._pause_s, self._opened_at, self._on_trial = 0, FIRST_PAUSE_S, None, False

    def note_fault(self) -> None:
        """A request met a fault of the engine."""
        self._faults += 1
        if self._on_trial:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if self._on_trial or (self._opened_at is None and self._faults >= FAULTS_TO_OPEN):
            self._opened_at, self._on_trial = self._clock(), False

    def note_nothing(self) -> None:
        """A request ended without telling anything about the engine, for example because its client left."""
        self._on_trial = False
