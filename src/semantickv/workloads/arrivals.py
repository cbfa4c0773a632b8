"""When sessions begin and how long people think: processes by name, drawn from a seed.

Open loop: a session begins at its time whether or not others were served. Nothing here knows about a cache.
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

    >>> list(Arrivals("sequential", rate=2.0).starts(3, seed=0))
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

    def starts(self, sessions: int, seed: int) -> Iterator[float]:
        """The seconds at which ``sessions`` sessions begin, in order, from 0 on."""
        drawn, now = random.Random(f"arrivals {seed}"), 0.0
        for number in range(sessions):
            if self.process == "sequential":
                yield number / self.rate
                continue
            yield now
            now += self._gap(drawn, now)

    def think(self, drawn: random.Random) -> float:
        """Seconds until the session's next request: log-normal, because some people go for a coffee."""
        sigma = 1.0
        return self.think_s * drawn.lognormvariate(-sigma * sigma / 2, sigma) if self.think_s else 0.001

    def _gap(self, drawn: random.Random, now: float) -> float:
        if self.process == "gamma":
            return drawn.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
        gap = drawn.expovariate(self.rate)
        while self.process == "diurnal" and drawn.random() > self._share(now + gap):  # thinning
            gap += drawn.expovariate(self.rate)
        return gap

    def _share(self, at_s: float) -> float:
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * at_s / self.period_s)
        return self.trough + (1 - self.trough) * wave
