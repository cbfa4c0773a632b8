"""How sure a figure is: bootstrap over sessions.

What is drawn again is a whole session, because its requests hit each other's blocks. A trace without sessions is cut
into runs of neighbouring requests instead, about as many runs as a run has requests, so that most of what a request
hits stays in its run. The cache is not simulated anew for a draw: a draw asks how the figure would move with another
mix of the same traffic, not with other traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.traces.trace import Trace

DRAWS = 400
LEAST_UNITS = 10
"""With fewer sessions or runs no interval is given."""
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``low`` to ``high`` lie 95 % of the draws."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, eq=False)
class Resampling:
    """How often each unit is drawn, in every draw. ``unit`` is what is drawn: "sessions" or "runs of requests"."""

    unit: str
    members: Counts  # for every request, the number of its unit
    weights: Counts  # draws x units

    @property
    def units(self) -> int:
        return int(self.weights.shape[1])

    def sum_units(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sum a value of every request over the units of each draw."""
        summed = np.bincount(self.members, weights=values, minlength=self.units)
        return np.asarray(self.weights @ summed, np.float64)


def resample(trace: Trace, seed: int = 0, draws: int = DRAWS) -> Resampling | None:
    """Draw the sessions of a trace again and again; None where there are fewer than `LEAST_UNITS`."""
    unit, members = _find_units(trace)
    units = int(members.max(initial=-1)) + 1
    if units < LEAST_UNITS:
        return None
    chance = np.random.default_rng(seed)
    return Resampling(unit, members, chance.multinomial(units, np.full(units, 1 / units), size=draws))


def _find_units(trace: Trace) -> tuple[str, Counts]:
    """Say what is drawn, and for every request the number of its unit."""
    named = trace.sessions
    if named and sum(map(bool, named)) > len(trace) // 2:
        numbers: dict[tuple[int, str], int] = {}
        pairs = zip(trace.tenant.tolist(), named, strict=True)
        keys = [(tenant, name or f"\0{at}") for at, (tenant, name) in enumerate(pairs)]  # nameless: a session of one
        return "sessions", np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    run = max(1, int(len(trace) ** 0.5))
    return "runs of requests", np.arange(len(trace), dtype=np.int64) // run


def find_interval(values: npt.NDArray[np.float64]) -> Interval:
    """Find the 2.5 % and 97.5 % points of the draws.

    >>> find_interval(np.arange(1001.0))
    Interval(low=25.0, high=975.0)
    """
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(float(low), float(high))
