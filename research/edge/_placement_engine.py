"""Engines of bench/edge_placement.py: they compute nothing, remember prompts as real ones do, and take time.

    python _placement_engine.py CACHE_TOKENS MICROSECONDS_PER_TOKEN prefix|spans PORT…

What is modelled: an LRU of blocks of 16 tokens (64 bytes of the prompt), found by the hash of everything up to their
end, the ends of prompts evicted first; an LRU of passages (paragraphs of 200 bytes and more) of the same size; one
prompt at a time is prefilled, at a fixed rate for each token that is not reused; 5 ms for the answer, side by side.
``prefix``: what is reused is the longest known beginning. ``spans``: known passages are reused wherever they stand.
What is not modelled: batches, decoding that slows prefill, blocks pinned by running requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import OrderedDict

from _request_reader import RequestReader

BLOCK_BYTES = 64
TOKENS_PER_BLOCK = 16
LEAST_PASSAGE_BYTES = 200
ANSWER_S = 0.005


class SizedLru:
    """Keys with sizes in tokens, least recently used first."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.tokens = 0
        self.of: OrderedDict[int, int] = OrderedDict()

    def touch(self, key: int, tokens: int) -> None:
        if key in self.of:
            self.of.move_to_end(key)
            return
        self.of[key] = tokens
        self.tokens += tokens
        while self.tokens > self.most_tokens:
            self.tokens -= self.of.popitem(last=False)[1]


class EngineModel:
    """The memory and the clock of one engine."""

    def __init__(self, name: int, cache_tokens: int, us_per_token: float, spans: bool) -> None:
        self.name, self.us_per_token, self.spans = name, us_per_token, spans
        self.blocks, self.passages = SizedLru(cache_tokens), SizedLru(cache_tokens)
        self.free_at = 0.0

    def take(self, text: bytes) -> tuple[dict[str, int], float]:
        """Reuse what is known of a prompt, remember the rest; return the counts, and seconds until its answer."""
        chains, chain = [], 0
        for at in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
            chain = hash((chain, text[at : at + BLOCK_BYTES]))
            chains.append(chain)
        known = 0
        while known < len(chains) and chains[known] in self.blocks.of:
            known += 1
        for one in reversed(chains):
            self.blocks.touch(one, TOKENS_PER_BLOCK)
        parts = [(hash(part), len(part) // 4) for part in text.split(b"\n\n") if len(part) >= LEAST_PASSAGE_BYTES]
        found = sum(tokens for key, tokens in parts if key in self.passages.of)
        for key, tokens in parts:
            self.passages.touch(key, tokens)
        total, prefix = max(1, len(text) // 4), known * TOKENS_PER_BLOCK
        reused = max(prefix, found) if self.spans else prefix
        now = time.monotonic()
        self.free_at = max(now, self.free_at) + 1e-6 * self.us_per_token * (total - reused)
        counts = {"tokens": total, "prefix": prefix, "passages": found, "in_passages": sum(t for _, t in parts)}
        return {**counts, "computed": total - reused}, self.free_at - now + ANSWER_S


class Connection(RequestReader):
    """A client of one engine."""

    def __init__(self, engine: EngineModel) -> None:
        super().__init__()
        self.engine = engine

    def take(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"post /v1/"):
            self.answer({"object": "list", "data": [{"id": "m", "object": "model"}], "status": "ok"})
            return
        text = "\n\n".join(message["content"] for message in json.loads(body)["messages"]).encode()
        counts, wait_s = self.engine.take(text)
        usage = {"prompt_tokens": counts["tokens"], "completion_tokens": 1, "total_tokens": counts["tokens"] + 1}
        usage["prompt_tokens_details"] = {"cached_tokens": counts["tokens"] - counts["computed"]}
        choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "ok"}}
        told = json.dumps({"engine": self.engine.name, "wait_ms": 1000 * wait_s, **counts})
        value = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        choice["message"]["content"] = told  # type: ignore[index]  # the one field that every router passes on
        asyncio.get_running_loop().call_later(wait_s, self.answer, value)

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        if not self.transport.is_closing():
            self.transport.write(head + body)


async def main(cache_tokens: int, us_per_token: float, spans: bool, ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    engines = [EngineModel(number, cache_tokens, us_per_token, spans) for number in range(len(ports))]
    servers = [
        await loop.create_server(lambda engine=engine: Connection(engine), "127.0.0.1", port)  # type: ignore[misc]
        for engine, port in zip(engines, ports, strict=True)
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(
        main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "spans", [int(word) for word in sys.argv[4:]])
    )
