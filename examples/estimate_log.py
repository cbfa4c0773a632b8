"""What would reuse have saved on a log of prompts? The log beside this script was written by hand.

python examples/estimate_log.py [log.jsonl]

This is the loop of `semblend estimate log.jsonl` for its rows "exact prefix cache" and "reuse at any offset, fast":
the same counts, prompt by prompt. What is found in donors but saves less than a pass costs is not reused; the last
column shows it.
"""

import json
import sys
from pathlib import Path

from semblend import Namespace, Prompt
from semblend.estimate.any_offset import PASS_TOKENS, AnyOffsetReplay
from semblend.estimate.prefix_cache import BlockHasher
from semblend.text.tokenization import StableTokenizer

LOG = Path(__file__).parent / "data" / "ferry_desk.jsonl"
BLOCK = 16


def main(log: Path) -> None:
    encode, hasher = StableTokenizer().encode, BlockHasher(BLOCK)
    replay = AnyOffsetReplay("fast", cache_tokens=700_000, donor_tokens=700_000, block_tokens=BLOCK, counts_below=True)
    total = exact = moved = below = 0
    print("tokens  prefix cache  any offset  too little for a pass")
    for line in log.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = Prompt(encode(row["prompt"]), namespace=Namespace(tenant=row.get("tenant", "")))
        asked = (len(prompt) - 1) // BLOCK  # an engine computes at least the last token
        count = replay.add(prompt, hasher.hash(prompt.token_ids, prompt.namespace), asked)
        total, exact = total + len(prompt), exact + count.exact_tokens
        moved, below = moved + count.moved_tokens, below + count.below_tokens
        shown = f"{len(prompt):6}  {count.exact_tokens:12}  {count.moved_tokens:10}  {count.below_tokens:21}"
        print(f"{shown}  {row.get('note', '')}")
    replay.close()
    print(f"of {total} tokens, an exact prefix cache holds {exact}; reuse at any offset adds {moved}")
    print(f"{below} more stand in donors, in prompts that would save at most the {PASS_TOKENS} tokens a pass costs")
    print("an estimate from tokens alone: only an engine's receipt counts as reuse")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LOG)
