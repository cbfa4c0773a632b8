"""What would reuse have saved on a log of prompts? The log beside this script was written by hand.

python examples/estimate_log.py [log.jsonl]

The command `semblend estimate --prompts log.jsonl` tells more; this shows the same from Python.
"""

import json
import sys
from pathlib import Path

from semblend import Namespace, Prompt
from semblend.estimate import EstimateOptions, Estimator
from semblend.text.tokenization import StableTokenizer

LOG = Path(__file__).parent / "data" / "ferry_desk.jsonl"


def main(log: Path) -> None:
    encode = StableTokenizer().encode
    total = prefix = reused = 0
    print("tokens  prefix cache  any offset")
    with Estimator(EstimateOptions(block_tokens=16)) as estimator:
        for line in log.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            prompt = Prompt(encode(row["prompt"]), namespace=Namespace(tenant=row["tenant"]))
            held = estimator.add(prompt)
            total, prefix, reused = total + len(prompt), prefix + held.prefix_tokens, reused + held.reused_tokens
            print(f"{len(prompt):6}  {held.prefix_tokens:12}  {held.reused_tokens:10}  {row['note']}")
    print(f"of {total} tokens, an exact-prefix cache holds {prefix}, donors at any offset {reused}")
    print("an estimate from tokens alone: only an engine's receipt counts as reuse")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LOG)
