"""Two questions about one text, under two instructions, to a vLLM that runs with the connector. What was reused?

python examples/ask_vllm.py http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request

SERVER = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
GOODS = ("amber", "cedar", "flint", "honey", "linen", "salt")
TEXT = "\n".join(
    f"Shelf {n}: {n * 37 % 90} boxes of {GOODS[n * 5 % 6]}, counted on day {n * 11 % 28}." for n in range(32)
)


def call(path: str, body: dict | None = None) -> dict:
    request = urllib.request.Request(SERVER + path, body and json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.URLError as error:
        sys.exit(
            f"{SERVER} does not answer: {error}\nhint: start vLLM as docs/guides/vllm.md shows, then give its address"
        )


def ask(instruction: str, question: str) -> str:
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": f"{TEXT}\n\n{question}"}]
    begun = time.perf_counter()
    answer = call("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0})
    seconds = time.perf_counter() - begun
    receipt = (answer.get("kv_transfer_params") or {}).get("semblend")
    if receipt is None:
        sys.exit(
            "the answer has no receipt\nhint: was vLLM started with --kv-transfer-config, as docs/guides/vllm.md shows?"
        )
    kinds = ", ".join(f"{receipt[f'{kind}_tokens']} {kind}" for kind in ("exact", "reused", "recomputed", "prefill"))
    why = f" ({receipt['reason']})" if receipt["reason"] else ""
    return f"{seconds:6.2f} s  {receipt['outcome']}{why}: of {receipt['prompt_tokens']} tokens {kinds}"


MODEL = call("/v1/models")["data"][0]["id"]
print("first ", ask("You are brief.", "Which shelf holds most boxes?"))
print("second", ask("You are a careful archivist. Answer in one sentence.", "How many shelves hold salt?"))
