"""Arrange retrieved passages on the client, and send them to any server with a prefix cache: vLLM as it is.

python examples/arrange_on_the_client.py                         counts with a stand-in for the server's prefix cache
python examples/arrange_on_the_client.py http://127.0.0.1:8000   asks a server, and adds up its cached_tokens
"""

from __future__ import annotations

import json
import random
import sys
import urllib.request

from semblend.arrange import Arranger, arrange_messages

SERVER = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else ""
CORPUS = [f"Passage {n}. " + f"Shelf {n} holds {n * 37 % 90} boxes of goods. " * 20 for n in range(16)]
SEEN: set[tuple[str, ...]] = set()


def count_hits(messages: list) -> int:
    """Characters of a prompt that earlier ones began with, or the server's own word for it in tokens."""
    if SERVER:
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{SERVER}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return (json.load(answer)["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    texts = [part["text"] for message in messages for part in message["content"]]
    held = [end for end in range(1, len(texts) + 1) if tuple(texts[:end]) in SEEN]
    SEEN.update(tuple(texts[:end]) for end in range(1, len(texts) + 1))
    return sum(map(len, texts[: max(held, default=0)]))


def write(turn: str, passages: list[str], question: str) -> list:
    marked = [{"type": "text", "text": text, "semblend": {"commutes": "passages"}} for text in passages]
    first, last = ({"type": "text", "text": text} for text in (f"{turn} Answer from these passages.", question))
    return [{"role": "user", "content": [first, *marked, last]}]


rng, arranger = random.Random(7), Arranger()
hits = {"as retrieved": 0, "arranged": 0}
asked = [(rng.sample(CORPUS, 5), f"Question {number}?") for number in range(60)]
for passages, question in asked:
    kept = arrange_messages(Arranger(), write("Kindly:", passages, question))  # nothing sent before: nothing moves
    hits["as retrieved"] += count_hits(kept.messages)
for passages, question in asked:
    found = arrange_messages(arranger, write("Please:", passages, question))
    hits["arranged"] += count_hits(found.messages)
    for one in found.sent:
        arranger.record(one)
    cited = found.groups[0].order[0]  # the model cites the first passage it saw: the caller's number of it
    assert found.messages[0]["content"][1]["text"] == passages[cited]
for name, count in hits.items():
    print(f"{name:12} {count:7} {'tokens' if SERVER else 'characters'} from the prefix cache")
