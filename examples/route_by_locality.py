"""Four engines, one trace: which policy sends requests to where their KV is, and how even does it stay?

python examples/route_by_locality.py [trace.jsonl]         simulated; `semantickv router` does it in front of engines
"""

import sys
from pathlib import Path

from semantickv.analysis.placement import compare_policies
from semantickv.traces.trace import Trace

TRACE = Path(__file__).parent / "traces" / "rag_serving_trace.jsonl"


def main(path: Path) -> None:
    trace = Trace.read(path)
    print(f"{'policy':18} {'equal prefix':>12} {'any offset':>11} {'busiest':>8}")
    for result in compare_policies(trace, replicas=4, cache_tokens=20_000):
        row = f"{result.prefix_share:12.1%} {result.any_offset_share:11.1%} {result.busiest_over_mean:7.2f}x"
        print(f"{result.policy:18} {row}")
    print("shares are of the prompts' tokens; simulated, with four empty caches of 20,000 tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE)
