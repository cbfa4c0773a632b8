"""Two questions about one text, under two instructions, to a vLLM that runs with the connector. What was reused?

python examples/ask_vllm.py http://127.0.0.1:8000 [fast]    # a mode for these questions; without it, the server's

A GPU computes a short prompt sooner than reuse could help. So 24,000 tokens of our guides are sent; fewer where the
model takes fewer, or where the server computes fewer in ten seconds (on a CPU).
"""

import json
import secrets
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SERVER = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
WISH = {"kv_transfer_params": {"semblend": {"quality": sys.argv[2]}}} if len(sys.argv) > 2 else {}
GUIDES = "".join(page.read_text("utf-8") for page in sorted(Path(__file__).parents[1].glob("docs/guides/*.md")))
NEXT = {
    "below_break_even": "this mode saves too little here: send a longer prompt, or add `fast` to the command",
    "quality_risk": "reuse would have moved the answer too far, so vLLM computed it; `fast` does not measure that",
    "nothing_shared": "donor_host_bytes must hold the prompt: 1.3 GiB for 24,000 tokens of a 7B, 7.3 for a 70B",
    "unsupported_mode": "vLLM's log says why, in a line that begins with `SemBlend reuses nothing in this engine`",
}


def call(path: str, body: dict | None = None) -> dict:
    request = urllib.request.Request(SERVER + path, body and json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)
    except urllib.error.URLError as error:
        sys.exit(f"{SERVER} does not answer: {error}\nhint: start vLLM as docs/guides/vllm.md shows; give its address")


def ask(salt: str, instruction: str, text: str, tokens: int = 8) -> tuple[float, dict]:
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": text}]
    body = {"model": MODEL["id"], "messages": messages, "max_tokens": tokens, "temperature": 0, "cache_salt": salt}
    begun = time.perf_counter()
    answer = call("/v1/chat/completions", body | WISH)
    return time.perf_counter() - begun, answer


MODEL, SALT = call("/v1/models")["data"][0], secrets.token_hex(8)  # the salt: earlier runs are no donors of this one
samples = [ask(secrets.token_hex(8), "Be quick.", GUIDES[start:][:2000], tokens=1) for start in (-4000, -2000)]
took, size = min((seconds, answer["usage"]["prompt_tokens"]) for seconds, answer in samples)  # one may have warmed up
wanted = min(24_000, int(0.8 * (MODEL.get("max_model_len") or 30_000)), max(600, int(10 * size / took)))
for name, lead in (("first ", "You are brief."), ("second", "You are a careful clerk. Say it in one sentence.")):
    seconds, answer = ask(SALT, lead, f"{GUIDES[: 2000 * wanted // size]}\n\nWhat do you make of the {name} page?")
    if (receipt := (answer.get("kv_transfer_params") or {}).get("semblend")) is None:
        sys.exit("the answer has no receipt\nhint: start vLLM with --kv-transfer-config, as docs/guides/vllm.md shows")
    kinds = ", ".join(f"{receipt[f'{kind}_tokens']} {kind}" for kind in ("exact", "reused", "recomputed", "prefill"))
    why = f" ({receipt['reason']})" if receipt["reason"] else ""
    print(f"{name} {seconds:6.2f} s  {receipt['outcome']}{why}: of {receipt['prompt_tokens']} tokens {kinds}")
if not receipt["reused_tokens"]:
    hint = NEXT.get(receipt["reason"], "set SEMBLEND_EVENTS=events.jsonl where vLLM is started: it has the details")
    sys.exit(f"nothing was reused: {receipt['reason'] or receipt['outcome']}\nhint: {hint}")
