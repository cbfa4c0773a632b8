"""Replay a recorded trace through a cache of one size: what LRU, a semantic policy and the best possible would keep.

python examples/replay_trace.py [trace.jsonl]         simulated; `semantickv replay` writes files and pictures too
"""

import sys
from pathlib import Path

from semantickv.analysis.experiments import replay
from semantickv.simulator.capacity import Capacity
from semantickv.traces.trace import Trace

TRACE = Path(__file__).parent / "traces" / "rag_serving_trace.jsonl"


def main(path: Path) -> None:
    trace = Trace.read(path)
    print(f"{len(trace)} requests, a cache of 20,000 tokens")
    found = replay(trace, Capacity.tokens(20_000), ["lru", "adaptive_semantic", "belady"])
    for record in found.records:
        print(f"{record['policy']:18} {record['token_hit_rate']:6.1%} of the tokens, {record['evictions']} evictions")
    print("simulated: what would have been kept, not a measurement of a server")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE)
