"""The openai client, unchanged, against `semblend serve`: two questions about one text under two instructions.

python examples/openai_client.py http://127.0.0.1:8000         needs pip install openai, and make serve
"""

from __future__ import annotations

import sys

try:
    import openai
except ModuleNotFoundError:
    sys.exit("the package openai is not installed\nhint: pip install openai")

SERVER = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
TEXT = "\n".join(f"Shelf {n}: {n * 37 % 90} boxes of goods, counted on day {n * 11 % 28}." for n in range(32))


def main() -> None:
    client = openai.OpenAI(base_url=f"{SERVER}/v1", api_key="any", max_retries=0)
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        sys.exit(f"{SERVER} does not answer\nhint: start a server with make serve, then give its address")
    for instruction, question in (
        ("You are brief.", "Which shelf holds most boxes?"),
        ("You are a careful archivist. Answer in one sentence.", "Which shelf was counted first?"),
    ):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": instruction}, {"role": "user", "content": f"{TEXT}\n\n{question}"}],
            max_tokens=8,
            temperature=0,
            extra_body={"semblend": {"quality": "fast"}, "cache_salt": "team-7"},  # both may be left out
        )
        receipt = (answer.model_extra or {}).get("semblend") or {}
        print(f"{answer.usage.prompt_tokens} tokens: {receipt.get('outcome')}, {receipt.get('reused_tokens')} reused")


if __name__ == "__main__":
    main()
