"""Four engines, one trace: which policy sends requests to where their KV is, and how even does the load stay?

python examples/route_by_locality.py [trace.jsonl]         simulated; `semantickv router` does it in front of engines

Requests come at their times in the trace, whether or not earlier ones have ended; in the second run eight times as
fast. Each cache holds a quarter of what the trace has: no replica could keep everything.
"""

import sys
from pathlib import Path

from semantickv.analysis.placement import place_trace
from semantickv.routing.policies import POLICIES
from semantickv.routing.router import EngineReuse
from semantickv.traces.trace import Trace

TRACE = Path(__file__).parent / "traces" / "rag_serving_trace.jsonl"
REPLICAS = 4
RUNS = [*((policy, EngineReuse.SPANS) for policy in POLICIES), ("semantic_locality", EngineReuse.PREFIX)]


def main(path: Path) -> None:
    trace = Trace.read(path)
    requests = list(trace.iter_requests())
    blocks = {block: size for one in requests for block, size in zip(one.block_ids, one.block_tokens, strict=True)}
    cache_tokens = sum(blocks.values()) // REPLICAS
    seconds = max(requests[-1].arrival_s, 1.0)
    print(f"{len(requests)} requests over {REPLICAS} empty caches of {cache_tokens:,} tokens, simulated")
    for speed in (1, 8):
        print(f"\n{len(requests) * speed / seconds:.0f} requests a second")
        print(f"{'policy':26} {'equal prefix':>12} {'any offset':>11} {'busiest over mean':>18}")
        for policy, reuse in RUNS:
            found = place_trace(trace, policy, replicas=REPLICAS, cache_tokens=cache_tokens, speed=speed, reuse=reuse)
            name = policy if reuse is EngineReuse.SPANS else f"{policy}, prefix"
            shares = f"{found.prefix_share:12.1%} {found.any_offset_share:11.1%}"
            print(f"{name:26} {shares} {found.busiest_over_mean:17.2f}x")
    print("\nshares are of the prompts' tokens: what a stock engine finds, and what an engine with semblend finds")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE)
