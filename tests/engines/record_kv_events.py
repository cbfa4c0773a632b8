"""Records what a real engine publishes while it serves a few prompts: python tests/engines/record_kv_events.py --help.

The file holds the batches as they came, and of each prompt its body, the engine's own tokens and what it had cached.
`tests/semantickv/engine_state` replays it without the engine.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import zmq


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=900) as answer:
        content = answer.read()
    return json.loads(content) if content.startswith(b"{") else None


def write_prompt(name: str, sentences: int) -> list[dict[str, str]]:
    """A chat about one made-up document; documents of different names share no sentence."""
    numbers = range(sentences)
    text = " ".join(f"In {name} {n} the keeper of gate {n * 7 % 97} counted {n * 31 % 89} boats." for n in numbers)
    return [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text + " How many boats?"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--events", required=True, help="tcp://host:port of the publisher")
    parser.add_argument("--engine", required=True, help="name and version, for the file")
    parser.add_argument("--sentences", type=int, default=20)
    parser.add_argument("--more", nargs="*", default=(), help="more documents before the first comes again")
    parser.add_argument("--flush", default="", help="path that empties the engine's cache, asked at the end")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(options.events)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    time.sleep(1)
    steps = []
    for name in ("spring", "summer", "spring", "autumn", "winter", *options.more, "spring", "FLUSH"):
        if name == "FLUSH":
            if options.flush:
                post(options.url + options.flush, {})
            body, tokens, usage = None, None, None
        else:
            body = {"model": "m", "messages": write_prompt(name, options.sentences)}
            tokens = post(options.url + "/tokenize", body)["tokens"]
            answer = post(options.url + "/v1/chat/completions", {**body, "max_tokens": 2, "temperature": 0})
            usage = answer["usage"]
        time.sleep(1)
        batches = []
        while socket.poll(500):
            batches.append(base64.b64encode(socket.recv_multipart()[2]).decode())
        steps.append({"name": name, "body": body, "tokens": tokens, "usage": usage, "batches": batches})
        print(name, usage, len(batches), "batches")
    options.output.write_text(json.dumps({"engine": options.engine, "steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
