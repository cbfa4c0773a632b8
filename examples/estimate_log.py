"""What would reuse have saved on a log of prompts? The log beside this script was written by hand.

python examples/estimate_log.py [log.jsonl]

The command `semblend estimate log.jsonl` replays a log step by step, with bounded memory; this shows the idea.
"""

import json
import sys
from pathlib import Path

from semblend import Namespace, Prompt, ReusePlan, SemBlend
from semblend.estimate.prefix_cache import BlockHasher, make_cache
from semblend.text.tokenization import StableTokenizer

LOG = Path(__file__).parent / "data" / "ferry_desk.jsonl"


def main(log: Path) -> None:
    encode, hasher, prefix_cache = StableTokenizer().encode, BlockHasher(16), make_cache([10_000])
    total = prefix = reused = 0
    print("tokens  prefix cache  any offset")
    with SemBlend() as donors:
        for number, line in enumerate(log.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            prompt = Prompt(encode(row["prompt"]), namespace=Namespace(tenant=row["tenant"]))
            most = len(prompt) - 1  # an engine computes at least the last token
            held = 16 * prefix_cache.replay(hasher.hash(prompt.token_ids, prompt.namespace), most // 16)[0]
            plan = donors.lookup(prompt)
            spans = plan.spans if isinstance(plan, ReusePlan) else ()
            found = held + sum(max(0, min(s.target_end, most) - max(s.target_start, held)) for s in spans)
            donors.register(prompt, donor_id=f"prompt-{number}")
            total, prefix, reused = total + len(prompt), prefix + held, reused + found
            print(f"{len(prompt):6}  {held:12}  {found:10}  {row['note']}")
    print(f"of {total} tokens, an exact-prefix cache holds {prefix}, donors at any offset {reused}")
    print("an estimate from tokens alone: only an engine's receipt counts as reuse")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LOG)
