"""Fit the latency line to observed requests: robust against slow outliers, with confidence intervals.

Serving times have a long tail on one side (a queue, a preemption), so least squares is pulled upwards. The fit starts
from the median of pairwise slopes (Theil-Sen) and is refined with Huber's weights; the intervals come from a bootstrap
of the requests. A negative base or slope has no meaning: both are kept at or above zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.analysis.latency import LatencyModel
from semantickv.traces.trace import Trace
from semblend.errors import InputError

Floats = npt.NDArray[np.float64]
FEWEST = 8
HUBER = 1.345  # in robust standard deviations: 95 % as efficient as least squares where noise is normal
PAIRS = 200_000
RESAMPLES = 400
_MAD = 1.4826


@dataclass(frozen=True, eq=False)
class Observations:
    """Observed times to first token and the prompt tokens that were computed for them.

    ``assumed_cold`` counts the requests whose trace did not say how many tokens came from a cache: all their prompt
    tokens are taken as computed, which makes the slope too small where a cache did help.
    """

    prefill_tokens: Floats
    ttft_ms: Floats
    assumed_cold: int = 0
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.ttft_ms)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted line with 95 % intervals (bootstrap over requests) and what it leaves unexplained."""

    base_ttft_ms: float
    token_latency_ms: float
    base_interval_ms: tuple[float, float]
    token_interval_ms: tuple[float, float]
    requests: int
    assumed_cold: int
    left_out: int
    outliers: int
    residual_mad_ms: float
    explained: float
    least_squares: tuple[float, float]
    method: str = "Theil-Sen start, Huber weights, bootstrap of requests"

    @property
    def model(self) -> LatencyModel:
        """The latency model with the fitted base and slope."""
        return LatencyModel(self.base_ttft_ms, self.token_latency_ms, "calibrated")

    def as_json(self) -> dict[str, Any]:
        """Return the fit in the names of replay_results.json."""
        return asdict(self)


def calibrate(seen: Observations, *, seed: int = 0) -> Calibration:
    """Fit TTFT in ms as a base plus a slope times the computed tokens; raise InputError if no slope can be seen.

    >>> tokens = np.arange(100, 2000, 50.0)
    >>> fitted = calibrate(Observations(tokens, 50 + 0.1 * tokens))
    >>> round(fitted.base_ttft_ms, 3), round(fitted.token_latency_ms, 5), fitted.outliers
    (50.0, 0.1, 0)
    """
    x, y = seen.prefill_tokens, seen.ttft_ms
    if len(x) < FEWEST:
        raise InputError(
            f"{len(x)} requests have an observed time to first token, calibration needs {FEWEST}",
            hint="collect a longer trace, or pass --base-ms and --ms-per-uncached-token",
        )
    if np.ptp(x) <= 0:
        raise InputError(
            f"all {len(x)} observed requests computed {x[0]:g} tokens: no slope can be seen",
            hint="collect prompts of different length, or pass --base-ms and --ms-per-uncached-token",
        )
    rng = np.random.default_rng(seed)
    base, slope = _fit(x, y, rng)
    samples = np.array([_fit(x[pick], y[pick], rng) for pick in _draw_resamples(len(x), x, rng)])
    low, high = np.percentile(samples, (2.5, 97.5), axis=0)
    residuals = y - base - slope * x
    spread = _compute_spread(residuals)
    around = np.abs(y - np.median(y)).sum()
    plain = np.polyfit(x, y, 1)
    return Calibration(
        base_ttft_ms=base,
        token_latency_ms=slope,
        base_interval_ms=(float(low[0]), float(high[0])),
        token_interval_ms=(float(low[1]), float(high[1])),
        requests=len(x),
        assumed_cold=seen.assumed_cold,
        left_out=seen.left_out,
        outliers=int((np.abs(residuals - np.median(residuals)) > 3 * max(spread, 1e-9)).sum()),
        residual_mad_ms=spread,
        explained=float(1 - np.abs(residuals).sum() / around) if around else 1.0,
        least_squares=(float(plain[1]), float(plain[0])),
    )


def _draw_resamples(count: int, x: Floats, rng: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
    """Draw the numbers of requests with replacement, `RESAMPLES` times; a draw of one length only is repeated."""
    made = 0
    while made < RESAMPLES:
        pick = rng.integers(0, count, count)
        if np.ptp(x[pick]) > 0:
            made += 1
            yield pick


def _fit(x: Floats, y: Floats, rng: np.random.Generator) -> tuple[float, float]:
    """Fit one line and return its base in ms and its slope in ms a token, neither below zero."""
    slope = _compute_median_slope(x, y, rng)
    base = float(np.median(y - slope * x))
    for _ in range(30):
        residuals = y - base - slope * x
        spread = _compute_spread(residuals)
        if spread <= 1e-12:
            break
        weights = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residuals), 1e-12))
        mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
        new = float(np.sum(weights * (x - mean_x) * (y - mean_y)) / max(np.sum(weights * (x - mean_x) ** 2), 1e-12))
        moved = abs(new - slope) * float(np.ptp(x))
        slope, base = new, float(mean_y - new * mean_x)
        if moved < 1e-6 * max(spread, 1e-9):
            break
    if slope < 0:
        return max(0.0, float(np.median(y))), 0.0
    if base < 0:  # through the origin, with the slope that the middle of the data has
        longer = x > 0
        return 0.0, max(0.0, float(np.median(y[longer] / x[longer])))
    return base, slope


def _compute_median_slope(x: Floats, y: Floats, rng: np.random.Generator) -> float:
    """Compute the median slope over pairs of requests; over at most `PAIRS` random ones."""
    count = len(x)
    if count * (count - 1) // 2 <= 2000:
        left, right = np.triu_indices(count, 1)
    else:
        pairs = min(PAIRS, 8 * count)
        left, right = rng.integers(0, count, pairs), rng.integers(0, count, pairs)
    apart = x[right] - x[left]
    keep = apart != 0
    slopes = (y[right] - y[left])[keep] / apart[keep]
    return float(np.median(slopes)) if len(slopes) else 0.0


def _compute_spread(residuals: Floats) -> float:
    """Compute the standard deviation of residuals from their median absolute deviation."""
    return float(_MAD * np.median(np.abs(residuals - np.median(residuals))))


def read_observations(trace: Trace) -> Observations:
    """Read the observed times to first token of a trace and the tokens that were computed for them.

    A trace without times raises InputError.
    """
    seen = ~np.isnan(trace.ttft_ms)
    if not seen.any():
        raise InputError(
            f"{trace.name} holds no observed time to first token", hint="a line needs observed_ttft_ms; see collect"
        )
    times, prompt = trace.ttft_ms[seen], trace.request_tokens[seen].astype(np.float64)
    told = ~np.isnan(trace.computed_tokens[seen])
    tokens = np.where(told, trace.computed_tokens[seen], prompt)
    usable = np.isfinite(times) & (times > 0) & (tokens <= prompt * 4 + 64)
    cold = int((usable & ~told).sum())
    return Observations(tokens[usable], times[usable], cold, int((~usable).sum()))
