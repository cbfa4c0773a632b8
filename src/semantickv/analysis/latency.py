"""Time to first token as a straight line: ``base_ttft_ms + uncached_prompt_tokens * token_latency_ms``.

This is the source text's model, kept because it is easy to reason about. It knows no queue, no batch and no quadratic
attention. Every number made with it is an estimate and is labelled simulated.

`calibrate` fits the line to observed requests. Serving times have a long tail on one side (a queue, a preemption), so
least squares is pulled upwards. The fit starts from the median of pairwise slopes (Theil-Sen) and is refined with
Huber's weights; the intervals come from a bootstrap of the requests. A negative base or slope has no meaning: both are
kept at or above zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.simulator.simulate import SimulationResult
from semantickv.traces.trace import Trace
from semblend.errors import InputError

SIMULATED_NOTE = (
    "Simulated: a cache of metadata under a straight-line latency model. No model ran, and no GPU was measured."
)
BOUNDS = ("belady", "belady_bypass")
"""Policies that know the future: drawn and listed, never called the best."""


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """``source`` says where the two numbers come from: default, given or calibrated.

    >>> LatencyModel(80.0, 0.08).estimate_ttft_ms(np.array([1000])).tolist()
    [160.0]
    """

    base_ttft_ms: float = 80.0
    token_latency_ms: float = 0.08
    source: str = "default"

    def __post_init__(self) -> None:
        for name in ("base_ttft_ms", "token_latency_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} {value:g} must be finite and not negative", hint="milliseconds")

    def estimate_ttft_ms(self, uncached_tokens: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Estimate the time to first token in ms for each number of uncached prompt tokens."""
        return self.base_ttft_ms + self.token_latency_ms * np.asarray(uncached_tokens, dtype=np.float64)

    def as_json(self) -> dict[str, Any]:
        """Return both numbers, their source and the formula."""
        return {
            "base_ttft_ms": self.base_ttft_ms,
            "token_latency_ms": self.token_latency_ms,
            "source": self.source,
            "formula": "base_ttft_ms + uncached_prompt_tokens * token_latency_ms",
        }


def estimate_request_ttfts_ms(trace: Trace, done: SimulationResult, latency: LatencyModel) -> npt.NDArray[np.float64]:
    """Estimate the time to first token of every request, in ms."""
    return latency.estimate_ttft_ms(trace.request_tokens - np.asarray(done.hit_tokens_by_request, dtype=np.int64))


def build_policy_record(trace: Trace, done: SimulationResult, latency: LatencyModel) -> dict[str, Any]:
    """Build the record of one policy's run, in the names that replay and experiments write."""
    ttft = estimate_request_ttfts_ms(trace, done, latency)
    p50, p95 = (float(np.percentile(ttft, q)) for q in (50, 95)) if len(ttft) else (0.0, 0.0)
    return {
        "policy": done.policy,
        "hit_rate": done.hit_rate,
        "block_hit_rate": done.block_hit_rate,
        "token_hit_rate": done.token_hit_rate,
        "tokens_saved": int(done.tokens_saved),
        "evictions": int(done.evictions),
        "evictions_by_type": {kind: int(count) for kind, count in done.evictions_by_type.items() if count},
        "avg_ttft_ms": float(ttft.mean()) if len(ttft) else 0.0,
        "p50_ttft_ms": p50,
        "p95_ttft_ms": p95,
        "utilization": done.utilization,
        "regret": int(done.regret),
        "weights": {kind: float(weight) for kind, weight in done.weights.items()},
        "mode": done.mode,
        "simulated": True,
    }


def compute_gain(records: list[dict[str, Any]], policy: str, baseline: str = "lru") -> float | None:
    """Compute how much lower a policy's average simulated TTFT is than the baseline's, as a share.

    Positive is better. None if either policy is missing.

    >>> compute_gain([{"policy": "lru", "avg_ttft_ms": 100.0}, {"policy": "x", "avg_ttft_ms": 75.0}], "x")
    0.25
    """
    times = {record["policy"]: record["avg_ttft_ms"] for record in records}
    if policy not in times or not times.get(baseline):
        return None
    return float(1.0 - times[policy] / times[baseline])


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
