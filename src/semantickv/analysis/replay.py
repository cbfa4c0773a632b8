"""Replay a recorded trace through several policies: what each of them would have saved. Simulated.

A fair sentence about the result: "on replay of the same trace, this policy would have kept more reusable tokens, under
this latency model". It is not a measurement of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.analysis.latency import (
    SIMULATED_NOTE,
    Calibration,
    LatencyModel,
    Observations,
    build_policy_record,
    estimate_request_ttfts_ms,
)
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Mode, build_forest
from semantickv.simulator.simulate import simulate
from semantickv.traces.trace import Trace, describe_trace

DEFAULT_POLICIES = ("lru", "adaptive_semantic", "static_semantic")
CHAINED_NOTE = (
    "This trace's ids stand for a block and everything before it: it cannot show what reuse independent of position "
    "would add, and block mode over it equals prefix mode up to evicted beginnings."
)


@dataclass(frozen=True, eq=False)
class Replay:
    """Every policy's record, the simulated time of every request, and where the latency line came from."""

    trace: Trace
    capacity: Capacity
    mode: Mode
    latency: LatencyModel
    records: list[dict[str, Any]]
    ttft_ms: Mapping[str, npt.NDArray[np.float64]]
    calibration: Calibration | None = None
    observed: Observations | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return the result in the names of replay_results.json."""
        return {
            "simulated": True,
            "note": SIMULATED_NOTE,
            "trace": describe_trace(self.trace) | {"format": self.trace.format, "skipped_lines": self.trace.skipped},
            "capacity": {"size": self.capacity.size, "unit": self.capacity.unit, "label": self.capacity.label},
            "mode": self.mode,
            "latency": self.latency.as_json(),
            "calibration": None if self.calibration is None else self.calibration.as_json(),
            "policies": self.records,
        }


def replay(
    trace: Trace,
    capacity: Capacity,
    policies: Sequence[str] = DEFAULT_POLICIES,
    *,
    mode: Mode = "prefix",
    latency: LatencyModel | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Replay:
    """Simulate the same requests, in order, with each policy, and estimate their times to first token."""
    model = latency or LatencyModel()
    forest = build_forest(trace, mode)
    done = []
    for number, policy in enumerate(policies):
        if progress is not None:
            progress(f"{policy}: {number + 1} of {len(policies)} policies, {len(trace):,} requests")
        done.append(simulate(forest, policy, capacity, seed=seed))
    return Replay(
        trace,
        capacity,
        mode,
        model,
        [build_policy_record(trace, one, model) for one in done],
        {one.policy: estimate_request_ttfts_ms(trace, one, model) for one in done},
    )
