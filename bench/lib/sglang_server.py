"""An SGLang server on a CPU, with our cache or without, in processes of its own, and a client for it."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.server_process import ServerProcess, find_port

CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
)
"""What stock SGLang needs on a CPU; see .ci/engines/sglang-cpu."""


@dataclass(slots=True)
class SglangAnswer:
    """A streamed answer, when its first token came, and what SGLang says about its prompt."""

    request_id: str
    text: str = ""
    ttft_ms: float | None = None
    cpu_ms: float | None = None
    """CPU time of the server until the first token."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return int(self.facts.get("cached_tokens") or 0)


class SglangServer(ServerProcess):
    """One server; ``settings`` are those of our cache, None for stock SGLang. ``folder`` gets log and events."""

    def __init__(
        self, model: str, folder: Path, flags: Sequence[str] = (), settings: dict[str, Any] | None = None, **env: str
    ) -> None:
        self.port, self.events = find_port(), folder / "events.jsonl"
        launcher = [sys.executable, "-m", "sglang.launch_server"]
        if settings is not None:
            launcher = [str(Path(sys.executable).with_name("semblend-sglang"))]
            launcher += [word for name, value in settings.items() for word in ("--semblend", f"{name}={value}")]
        command = [*launcher, "--model-path", model, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        super().__init__(command, folder / "log.txt", **{"SEMBLEND_EVENTS": str(self.events)} | env)

    def wait(self, seconds: float = 600) -> None:
        """Until it answers; raises with the end of its log if it does not."""
        self.wait_until(lambda: self.stream([1, 2, 3], 1, "first"), seconds)

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> bytes:
        """The bytes of an answer: POST with a body, GET without."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            found: bytes = answer.read()
        return found

    def stream(
        self, prompt: Sequence[int], tokens: int, request_id: str, salt: str = "", timeout: float = 300, **asked: Any
    ) -> SglangAnswer:
        """Greedy continuation of token ids, read as a stream; ``asked`` goes to our cache."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": list(prompt), "stream": True, "rid": request_id}
        body |= {"sampling_params": parameters | ({"custom_params": {"semblend": asked}} if asked else {})}
        body |= {"extra_key": salt} if salt else {}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer, cpu, begun = SglangAnswer(request_id), self.read_cpu_ms(), time.perf_counter()
        with urllib.request.urlopen(request, timeout=timeout) as lines:
            for line in lines:
                data = line.decode().removeprefix("data: ").strip()
                if not data.startswith("{"):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RuntimeError(f"SGLang answers {chunk['error']}")
                if answer.ttft_ms is None:
                    answer.ttft_ms = (time.perf_counter() - begun) * 1e3
                    answer.cpu_ms = self.read_cpu_ms() - cpu
                answer.text, answer.facts = chunk["text"], chunk["meta_info"]
        return answer

    def find_receipt(self, request_id: str) -> dict[str, Any]:
        """The receipt of a request, from the audit stream; empty if there is none."""
        lines = self.events.read_text(encoding="utf-8").splitlines() if self.events.exists() else []
        found = [json.loads(line) for line in lines if request_id in line and '"receipt"' in line]
        return next((one["receipt"] for one in reversed(found) if one.get("request_id") == request_id), {})
