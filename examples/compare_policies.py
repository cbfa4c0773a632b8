"""Compare eviction policies over sizes of the cache, on a recorded trace.

python examples/compare_policies.py [trace.jsonl]         simulated
"""

import sys
from pathlib import Path

from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import build_forest
from semantickv.simulator.simulate import simulate
from semantickv.traces.trace import Trace

TRACE = Path(__file__).parent / "traces" / "rag_serving_trace.jsonl"
POLICIES = ("lru", "lfu", "s3fifo", "adaptive_semantic", "belady")
SIZES = (5_000, 10_000, 20_000, 40_000)


def main(path: Path) -> None:
    forest = build_forest(Trace.read(path), "prefix")
    print(f"{'policy':18}" + "".join(f"{size:>9,}" for size in SIZES) + "  tokens of cache")
    for policy in POLICIES:
        rates = [simulate(forest, policy, Capacity.tokens(size)).token_hit_rate for size in SIZES]
        print(f"{policy:18}" + "".join(f"{rate:9.1%}" for rate in rates))
    print("belady knows the future: no policy can keep more")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE)
