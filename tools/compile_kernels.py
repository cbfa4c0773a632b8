"""Compile kernels and keep them: else every process of a test run that needs one first compiles it for itself.

``python -m tools.compile_kernels`` compiles all of them, which takes two minutes; with ``lookups`` those that an engine
needs.
"""

from __future__ import annotations

import sys
import time

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import build_forest
from semantickv.simulator.policies import POLICIES
from semantickv.simulator.simulate import simulate
from semantickv.traces.trace import Trace, TraceRequest
from semblend import SemBlend, SemBlendConfig
from semblend.eviction.adaptive import compile_adaptive


def compile_for_lookups() -> None:
    for eviction in ("lru", "adaptive"):
        with SemBlend(SemBlendConfig(embedder="none", eviction=eviction)) as made:
            made.warm_up()
    compile_adaptive()


def compile_for_simulations() -> None:
    blocks = [(0, 1, 2), (0, 3), (4, 5, 6), (0, 1, 2), (4, 7), (8, 9)]
    trace = Trace.from_requests(
        [TraceRequest(str(r), float(r), ids, (16,) * len(ids), ("user",) * len(ids)) for r, ids in enumerate(blocks)]
    )
    for mode in ("prefix", "block"):
        forest = build_forest(trace, mode)
        for name in POLICIES:
            for capacity in (Capacity.blocks(4), Capacity.tokens(64)):
                simulate(forest, name, capacity)


def main(wanted: str = "all") -> None:
    begun = time.perf_counter()
    compile_for_lookups()
    if wanted == "all":
        compile_for_simulations()
    print(f"kernels are compiled: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
