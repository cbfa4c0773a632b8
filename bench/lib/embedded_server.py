"""`semblend serve` for a stream of prompts, stock or with reuse, and a client that measures its answers.

A stock server reuses exact prefixes alone; so does a request without a quality to the other one. Arms that use the same
server have a ``cache_salt`` each, so they share neither blocks nor donors.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.server_process import ServerProcess, find_port, read_cpu_ms

KINDS = ("exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens")


@dataclass(slots=True)
class Reply:
    """A streamed answer. CPU is that of all the server's processes, up to the first token and in all."""

    text: str = ""
    ttft_ms: float = 0.0
    cpu_ms: float = 0.0
    cpu_all_ms: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    receipt: dict[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """What is kept of it: times, tokens by what became of them, and the answer."""
        counts = {kind: self.receipt.get(kind) for kind in KINDS}
        said = {name: self.receipt.get(name) for name in ("outcome", "reason", "escalations")}
        return {"ttft_ms": self.ttft_ms, "cpu_ms": self.cpu_ms, "cpu_all_ms": self.cpu_all_ms,
                **counts, **said, "answer": self.text}  # fmt: skip


class EmbeddedArms(ServerProcess):
    """`semblend serve`; stock means quality exact, and no donors are kept."""

    def __init__(self, model: str, folder: Path, *, stock: bool, pool_tokens: int, flags: Sequence[str] = ()) -> None:
        port = find_port()
        command = [sys.executable, "-m", "semblend.cli.main", "serve", "--model", model, "--port", str(port)]
        command += ["--threads", "1", "--pool-tokens", str(pool_tokens)]
        command += ["--quality", "exact"] if stock else list(flags)
        self._model, self._address = model, f"http://127.0.0.1:{port}"
        super().__init__(command, folder / "log.txt")

    def wait(self) -> None:
        """Until it answers; raises with the end of its log if it ends instead."""
        self.wait_until(lambda: urllib.request.urlopen(f"{self._address}/health", timeout=5).read())

    def ask(self, prompt: str | list[int], tokens: int, *, name: str, salt: str, quality: str = "") -> Reply:
        body = _make_body(self._model, prompt, tokens, salt)
        # Without reuse: the exact prefix alone, and no donor is kept.
        body["semblend"] = {"quality": quality} if quality else {"reuse": False}
        return _stream(self._address, body, name, self.process.pid)


def _make_body(model: str, prompt: str | list[int], tokens: int, salt: str) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    return body | ({"cache_salt": salt} if salt else {})


def _stream(address: str, body: dict[str, Any], name: str, group: int) -> Reply:
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    reply, used, begun = Reply(), read_cpu_ms(group), time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as lines:
        for line in lines:
            data = line.decode().removeprefix("data: ").strip()
            if not data.startswith("{"):
                continue
            chunk = json.loads(data)
            if chunk.get("choices") and not reply.ttft_ms:
                reply.ttft_ms = (time.perf_counter() - begun) * 1e3
                reply.cpu_ms = read_cpu_ms(group) - used
            reply.text += "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))
            reply.usage = chunk.get("usage") or reply.usage
            reply.receipt = chunk.get("semblend") or reply.receipt
    reply.cpu_all_ms = read_cpu_ms(group) - used
    return reply
