"""Two questions about one text, under two instructions, to an SGLang that runs with our cache. What was reused?

python examples/ask_sglang.py http://127.0.0.1:30000
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request

SERVER = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:30000"
GOODS = ("amber", "cedar", "flint", "honey", "linen", "salt")
TEXT = "\n".join(
    f"Shelf {n}: {n * 37 % 90} boxes of {GOODS[n * 5 % 6]}, counted on day {n * 11 % 28}." for n in range(32)
)


NEXT = {
    "below_break_even": "what can be moved saves less than it costs: send a longer text",
    "nothing_shared": "no donor holds the text: donor_host_bytes, 4 GiB unless set, must hold the KV of the prompt",
    "disabled": "reuse is switched off: SEMBLEND_DISCOVERY_ONLY, or an opt-out",
    "unsupported_mode": "SGLang's log says why this engine is declined",
}


def ask(instruction: str, question: str) -> tuple[str, dict]:
    wishes = {"max_new_tokens": 8, "temperature": 0, "custom_params": {"semblend": {"quality": "fast"}}}
    body = {"text": f"{instruction}\n\n{TEXT}\n\n{question}", "sampling_params": wishes}
    request = urllib.request.Request(f"{SERVER}/generate", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    begun = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            told = json.load(answer)["meta_info"].get("semblend")
    except urllib.error.URLError as error:
        sys.exit(
            f"{SERVER} does not answer: {error}\nhint: start SGLang as docs/guides/sglang.md shows, give its address"
        )
    if not told:
        sys.exit("the answer has no receipt\nhint: was SGLang started as docs/guides/sglang.md shows?")
    seconds, receipt = time.perf_counter() - begun, told[0]
    kinds = ", ".join(f"{receipt[f'{kind}_tokens']} {kind}" for kind in ("exact", "reused", "recomputed", "prefill"))
    why = f" ({receipt['reason']})" if receipt["reason"] else ""
    return f"{seconds:6.2f} s  {receipt['outcome']}{why}: of {receipt['prompt_tokens']} tokens {kinds}", receipt


print("first ", ask("Be brief.", "Which shelf holds most boxes?")[0])
line, receipt = ask("You are a careful archivist. Answer in one sentence.", "How many shelves hold salt?")
print("second", line)
if not receipt["reused_tokens"]:
    reason = receipt["reason"] or receipt["outcome"]
    more = "SEMBLEND_EVENTS=events.jsonl, set where SGLang is started, records the details"
    sys.exit(f"nothing was reused: {reason}\nhint: {NEXT.get(reason, more)}")
