"""How long a prefill and a reuse take on this engine: learned from every request, so that only what pays is begun.

A time is a sum of parts that grow with what is done: a constant, rows through the layers, positions they attend to,
donor tokens that are moved. A `TimeFit` finds how much each part weighs, from the last requests, by relative errors,
and a request that was held up for some other reason weighs little. What is not a sum (a GPU that waits for its launches
takes no longer for twice the rows) is corrected by what works of about that size took. An engine that can be timed when
it starts gives the first samples (`TimeModel.warm_up`). Before anything was timed, rows are counted instead, and those
of a reuse count more.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

AT_ONCE = "balanced at once"
"""The path of mode balanced where donors are known so well that the first repair needs no look before it."""
EDITED = "balanced, edited"
"""Its path for edited histories: all that is not exact goes through the first layers, then one pass repairs."""
PASSES: Mapping[str, int] = MappingProxyType({"fast": 1, "balanced": 2, AT_ONCE: 1, EDITED: 2})
"""How many passes a reuse takes, by path, where nothing goes wrong; the first layers wait for a verdict as one does."""
PAYS_BELOW = 0.95
"""A reuse is begun where it is expected to take less than this share of a prefill."""
ROW_PRICE = 1.3
"""A row of ours takes so much longer than one of the engine's own prefill, where nothing was timed: scattered rows
attend in more kernels (H200, vLLM 0.26: 2,499 rows among 24,576 in 87 ms, a prefill takes 72 ms for as much work)."""
MIN_TIMED = 32
"""So many requests say how long an engine takes, where it was not timed when it started."""
MIN_REUSED = 8
WINDOW = 256
PRIOR = 3.0
"""What was measured when an engine started counts like so many requests."""
SHORTEST_MS = 1e-3
"""Nothing takes less."""
STRETCH = 0.35
"""Works whose times differ by less, as logarithms, are of about one size: half as long again is another one."""
OUTLIER = 0.15
"""A request that took so much longer or shorter than expected weighs less, the more the less (Huber)."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a prompt makes an engine do: ``rows`` through all layers, attending to ``keys`` positions in sum, and
    ``moved`` donor tokens into place.

    >>> Work.of_prefill(tokens=4, exact=2)
    Work(rows=2, keys=7, moved=0)
    """

    rows: int
    keys: int
    moved: int = 0

    @classmethod
    def of_prefill(cls, tokens: int, exact: int = 0) -> Work:
        return cls(tokens - exact, (tokens * (tokens + 1) - exact * (exact + 1)) // 2)

    def __add__(self, other: Work) -> Work:
        return Work(self.rows + other.rows, self.keys + other.keys, self.moved + other.moved)

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """What a time is the sum of, each of about the same size."""
        return 1.0, self.rows / 1024, self.keys / (1 << 24), self.moved / 8192


NOTHING = Work(0, 0)


@dataclass(frozen=True, slots=True)
class Timed:
    """Work that was done, and how long it took."""

    work: Work
    ms: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a reuse and a prefill of the same prompt are expected to take: in milliseconds, or in rows if not ``timed``.

    >>> Forecast(40.0, 70.0, timed=True).pays, Forecast(69.0, 70.0, timed=True).pays
    (True, False)
    """

    reuse: float
    cold: float
    timed: bool

    @property
    def pays(self) -> bool:
        return self.reuse < PAYS_BELOW * self.cold

    @property
    def cost(self) -> float:
        """The reuse in prefills."""
        return self.reuse / self.cold if self.cold > 0 else float("inf")

    def describe(self) -> str:
        if self.timed:
            short = f": less than {1 - PAYS_BELOW:.0%} saved" if PAYS_BELOW <= self.cost < 1 else ""
            return f"reuse is expected to take {self.reuse:.1f} ms, a prefill {self.cold:.1f} ms{short}"
        return f"such prompts cost {self.cost:.2f} of a prefill"


class TimeFit:
    """Times of one kind of work, and what their parts weigh.

    >>> fit = TimeFit()
    >>> for rows in (1000, 2000, 4000, 8000):
    ...     fit.note(Work(rows, 0), ms=5 + rows / 100)
    >>> round(fit.expect(Work(3000, 0)), 3)
    35.0
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[tuple[float, ...], float]] = deque(maxlen=WINDOW)
        self._weights: Floats | None = None
        self._prior: Floats | None = None
        self._corrections: tuple[Floats, Floats] = NO_CORRECTIONS
        self._since_fit = 0

    def __len__(self) -> int:
        return len(self._seen)

    def begin_with(self, timed: Sequence[Timed]) -> None:
        """What was measured before any request: it counts like a few of them, however they turn out."""
        parts = np.array([one.work.parts for one in timed])
        self._prior = self._weights = fit_parts(parts, np.array([one.ms for one in timed]))

    def note(self, work: Work, ms: float) -> None:
        """It took so long; what is no time is left out."""
        if not SHORTEST_MS < ms < float("inf"):
            return
        self._seen.append((work.parts, ms))
        self._since_fit += 1
        if self._weights is None or self._since_fit > len(self._seen) // 16:  # here, where no request waits for it
            self._fit()

    def expect(self, work: Work) -> float:
        """Milliseconds that such work takes; there must be a sample."""
        assert self._weights is not None, "nothing was timed"
        sum_of_parts = max(SHORTEST_MS, float(self._weights @ np.array(work.parts)))
        return sum_of_parts * math.exp(np.interp(math.log(sum_of_parts), *self._corrections))

    def _fit(self) -> None:
        parts, ms = map(np.array, zip(*self._seen, strict=True))
        self._weights = fit_parts(parts, ms, self._prior)
        self._corrections = fit_corrections(np.maximum(parts @ self._weights, SHORTEST_MS), ms)
        self._since_fit = 0


NO_CORRECTIONS = np.zeros(1), np.zeros(1)


def fit_corrections(fitted: Floats, ms: Floats) -> tuple[Floats, Floats]:
    """By size, how much longer works took than the sum of their parts; both as logarithms, few of a size count less.

    No work is expected to take less than a smaller one.
    """
    sizes, off = np.log(fitted), np.log(ms / fitted)
    steps = np.round(sizes / STRETCH)
    groups = [steps == step for step in np.unique(steps)]
    counts = np.array([at.sum() for at in groups])
    middles, usual = (np.array([np.median(values[at]) for at in groups]) for values in (sizes, off))
    return middles, np.maximum.accumulate(middles + usual * counts / (counts + PRIOR)) - middles


def fit_parts(parts: Floats, ms: Floats, prior: Floats | None = None) -> Floats:
    """How much each part weighs, none of them negative: least squares of relative errors, outliers weighing less.

    ``prior``: weights that count like `PRIOR` samples.
    """
    shares = parts / ms[:, None]
    weights, trust = np.zeros(parts.shape[1]), np.ones(len(ms))
    for _ in range(4):
        rows, target = shares * np.sqrt(trust)[:, None], np.sqrt(trust)
        if prior is not None:
            usual = PRIOR**0.5 * np.diag((parts / (parts @ prior)[:, None]).mean(0))
            rows, target = np.concatenate((rows, usual)), np.concatenate((target, usual @ prior))
        weights = solve_not_negative(rows, target)
        off = np.abs(shares @ weights - 1.0)
        trust = OUTLIER / np.maximum(off, OUTLIER)
    return weights


def solve_not_negative(rows: Floats, target: Floats) -> Floats:
    """Least squares without negative weights: what comes out negative goes, the most negative first."""
    kept = list(range(rows.shape[1]))
    while kept:
        some = rows[:, kept]
        found = np.linalg.lstsq(some, target, rcond=1e-9)[0]
        if found.min() >= 0:
            weights = np.zeros(rows.shape[1])
            weights[kept] = found
            return weights
        kept.pop(int(found.argmin()))
    return np.zeros(rows.shape[1])


class TimeModel:
    """What an engine was seen to take. Thread-safe.

    ``path``: the quality mode whose passes a reuse takes (`semblend.quality.find_path`), `AT_ONCE` or `EDITED`.
    """

    def __init__(self) -> None:
        self._cold = TimeFit()
        self._reuse: dict[str, TimeFit] = {}
        self._warm = False
        self._lock = threading.Lock()

    def warm_up(self, passes: Mapping[str, int], few: Timed, many: Timed, load: Timed | None = None) -> None:
        """What was measured when the engine started: a pass over few rows and over many, and a load.

        ``passes``: how many a reuse takes, by path. It costs about one more with few rows: a step of the engine around
        it, and the look at the donor's KV.
        """
        with self._lock:
            self._warm = True
            self._cold.begin_with((few, many))
            for path, count in passes.items():
                short, ms = Work(count * few.work.rows, count * few.work.keys), (count + 1) * few.ms
                seen = [Timed(short, ms), Timed(short + many.work, ms + many.ms)]
                if load is not None:
                    seen.append(Timed(short + load.work, ms + load.ms))
                self._reuse.setdefault(path, TimeFit()).begin_with(seen)

    def note_cold(self, work: Work, ms: float) -> None:
        with self._lock:
            self._cold.note(work, ms)

    def note_reuse(self, path: str, work: Work, tail: Work, ms: float) -> None:
        with self._lock:
            self._reuse.setdefault(path, TimeFit()).note(work, ms - self._expect_more(tail))

    def expect(self, path: str, work: Work, tail: Work, cold: Work) -> Forecast:
        """What ``work`` on this path takes with the ``tail`` that the engine prefills behind it, and what a prefill of
        all would; in rows until both were timed often enough."""
        with self._lock:
            reuse = self._reuse.get(path)
            seen = 0 if reuse is None else len(reuse)
            if reuse is None or (not self._warm and (len(self._cold) < MIN_TIMED or seen < MIN_REUSED)):
                return Forecast(ROW_PRICE * work.rows + tail.rows, cold.rows, timed=False)
            return Forecast(reuse.expect(work) + self._expect_more(tail), self._cold.expect(cold), timed=True)

    def _expect_more(self, tail: Work) -> float:
        """What the rows of a prefill add to one that has begun."""
        if not tail.rows or not (self._warm or len(self._cold)):
            return 0.0
        return max(0.0, self._cold.expect(tail) - self._cold.expect(NOTHING))
