"""When sessions begin and how long people think: arrival processes by name, drawn from a seed.

Open loop: a session begins at its time whether or not others have been served. Nothing here knows about a cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from semblend.errors import InputError

PROCESSES: Final = ("sequential", "poisson", "gamma", "diurnal")
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``rate`` sessions a second, and ``think_s`` seconds between two requests of a session (mean; 0: at once).

    sequential: evenly spaced, one session after the other (what the source text's workloads do); poisson; gamma:
    bursts where ``burstiness`` is below 1; diurnal: Poisson whose rate swings between ``trough`` and 1 of ``rate`` over
    ``period_s``.

    >>> list(Arrivals("sequential", rate=2.0).draw_starts(3, seed=0))
    [0.0, 0.5, 1.0]
    """

    process: str = "sequential"
    rate: float = 1.0
    think_s: float = 0.0
    burstiness: float = 0.3
    trough: float = 0.2
    period_s: float = DAY_S

    def __post_init__(self) -> None:
        if self.process not in PROCESSES:
            raise InputError(f"unknown arrival process {self.process!r}", hint="one of " + ", ".join(PROCESSES))
        for name in ("rate", "burstiness", "period_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"arrivals: {name} must be above 0", hint="rate is in sessions a second")
        if not self.think_s >= 0 or not 0 <= self.trough <= 1:
            raise InputError("arrivals: think_s must not be negative, trough lies between 0 and 1")

    def draw_starts(self, sessions: int, seed: int) -> Iterator[float]:
        """Draw the seconds at which ``sessions`` sessions begin, in order, from 0 on."""
        rng, now = random.Random(f"arrivals {seed}"), 0.0
        for number in range(sessions):
            if self.process == "sequential":
                yield number / self.rate
                continue
            yield now
            now += self._draw_gap(rng, now)

    def draw_think_s(self, rng: random.Random) -> float:
        """Draw the seconds until a session's next request: log-normal, because some pauses are very long."""
        sigma = 1.0
        return self.think_s * rng.lognormvariate(-sigma * sigma / 2, sigma) if self.think_s else 0.001

    def _draw_gap(self, rng: random.Random, now: float) -> float:
        """Draw the seconds until the next session begins."""
        if self.process == "gamma":
            return rng.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
        gap = rng.expovariate(self.rate)
        while self.process == "diurnal" and rng.random() > self._compute_share(now + gap):  # thinning
            gap += rng.expovariate(self.rate)
        return gap

    def _compute_share(self, at_s: float) -> float:
        """Compute the share of ``rate`` that holds at a time of the day, for the diurnal process."""
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * at_s / self.period_s)
        return self.trough + (1 - self.trough) * wave
