"""Time to first token as a straight line: ``base_ttft_ms + uncached_prompt_tokens * token_latency_ms``.

This is the source text's model, kept because it is easy to reason about. It knows no queue, no batch and no quadratic
attention. Every number made with it is an estimate and is labelled simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
