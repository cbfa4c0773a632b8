"""A vLLM server with our connector, in processes of its own, and a client that reads what it says over HTTP."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.server_process import ServerProcess, find_port

LINE = {
    "kv_connector": "SemBlendConnectorV1",
    "kv_connector_module_path": "semblend.integration.vllm.connector_v1",
    "kv_role": "kv_both",
}


@dataclass(slots=True)
class Answer:
    """A streamed answer: its tokens' texts and log probabilities, when the first one came, and how long after each the
    next did."""

    request_id: str
    text: str = ""
    ttft_ms: float | None = None
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int | None = None
    gaps_ms: list[float] = field(default_factory=list)


class VllmServer(ServerProcess):
    """One server; ``extra`` is the connector's configuration, None for stock vLLM. ``folder`` gets log and events."""

    def __init__(
        self, model: str, folder: Path, flags: Sequence[str] = (), extra: dict[str, Any] | None = None, **variables: str
    ) -> None:
        self.port, self.events = find_port(), folder / "events.jsonl"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enable-prompt-tokens-details", *flags]
        if extra is not None:
            extra = {"reset_drops_donors": False, **extra}  # `forget` says which of them go
            command += ["--kv-transfer-config", json.dumps(LINE | {"kv_connector_extra_config": extra})]
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "SEMBLEND_EVENTS": str(self.events)}
        super().__init__(command, folder / "log.txt", **own | variables)

    def wait(self, seconds: float = 600) -> None:
        """Until it answers; raises with the end of its log if it does not."""
        first = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}
        self.wait_until(lambda: self.post("/v1/completions", first), seconds)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        """The JSON of an answer; None for one without a body."""
        with urllib.request.urlopen(self._make_request(path, body or {}), timeout=timeout) as answer:
            text = answer.read()
        return json.loads(text) if text.strip() else None

    def stream(self, prompt: Sequence[int], tokens: int, request_id: str, **more: Any) -> Answer:
        """Greedy completion of token ids, read as a stream."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}, **more}  # fmt: skip
        request = self._make_request("/v1/completions", body)
        request.add_header("X-Request-Id", request_id)
        answer, begun = Answer(request_id), time.perf_counter()
        try:
            lines = urllib.request.urlopen(request, timeout=300)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{request_id}: {error.code} {error.read(2000).decode(errors='replace')}") from error
        with lines:
            for line in lines:
                data = line.decode().removeprefix("data: ").strip()
                if data.startswith("{"):
                    self._read_chunk(json.loads(data), answer, begun)
        return answer

    @staticmethod
    def _read_chunk(chunk: dict[str, Any], answer: Answer, begun: float) -> None:
        for choice in chunk.get("choices", ()):
            came = (time.perf_counter() - begun) * 1e3
            if answer.ttft_ms is None:
                answer.ttft_ms = came
            else:
                answer.gaps_ms.append(came - answer.ttft_ms - sum(answer.gaps_ms))
            answer.text += choice.get("text") or ""
            answer.logprobs += [
                one for one in (choice.get("logprobs") or {}).get("token_logprobs", ()) if one is not None
            ]
        details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)

    def forget(self, *, donors: bool = False, seconds: float = 20) -> None:
        """Empty vLLM's prefix cache, and the connector's donors; vLLM refuses while a step is under way."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done = self.post(f"/reset_prefix_cache?reset_external={str(donors).lower()}")
            if not isinstance(done, dict) or done.get("success", True):
                return
            self.post("/v1/completions", {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1})
        raise RuntimeError("vLLM does not empty its prefix cache")

    def read_receipts(self) -> dict[str, dict[str, Any]]:
        """Whole receipts by request id, from the audit stream."""
        lines = self.events.read_text(encoding="utf-8").splitlines() if self.events.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return {event["request_id"]: event["receipt"] for event in events if "receipt" in event}

    def find_receipt(self, request_id: str) -> dict[str, Any]:
        """The receipt of a request whose client gave it this id; empty if there is none."""
        found = [receipt for name, receipt in self.read_receipts().items() if request_id in name]
        return found[-1] if found else {}

    def kill(self) -> None:
        """kill -9 of every process of the server. Removes the shared memory that vLLM would have removed itself."""
        mapped = {path for pid in self.list_processes() for path in _list_shared_memory(pid)}
        super().kill()
        for path in mapped:
            path.unlink(missing_ok=True)

    def kill_one(self, title: str) -> bool:
        """kill -9 of its first process with this title, such as VLLM::Worker; False where it has none."""
        for pid in self.list_processes():
            try:
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                    os.kill(pid, signal.SIGKILL)
                    return True
            except OSError:  # it has ended
                continue
        return False

    def _make_request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        address = f"http://127.0.0.1:{self.port}{path}"
        return urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _list_shared_memory(pid: int) -> list[Path]:
    """What a process has mapped of vLLM's and Python's own shared memory."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return [Path(path) for path in paths if path.startswith(("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_"))]
