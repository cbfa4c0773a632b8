"""SGLang's HTTP server, started by our launcher in processes of its own: a document is moved there too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

MODEL = os.environ.get("SEMBLEND_TEST_SGLANG_MODEL", "")
FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
    *("--context-length", "2048", "--max-total-tokens", "6144", "--max-running-requests", "4", "--enable-cache-report"),
    *("--enable-metrics", "--host", "127.0.0.1"),
]
DOCUMENT = " ".join(f"Item {n} costs {3 * n + 1} dollars and ships on day {n % 28}." for n in range(16))
HEADS = ("You answer questions.\n", "Read the list of a small shop, then answer the question at its end.\n")
QUESTION = "\nQuestion: what does item 5 cost?\nAnswer:"


class Server:
    """A server and its log."""

    def __init__(self, log: Path, *more: str, **variables: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        launcher = str(Path(sys.executable).with_name("semblend-sglang"))
        command = [launcher, "--model-path", MODEL, *FLAGS, "--port", str(self.port), *more]
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | variables, start_new_session=True
            )
        deadline = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    pytest.fail("the server did not start:\n" + log.read_text()[-3000:])
                time.sleep(1)

    def generate(self, text: str, **more: Any) -> dict[str, Any]:
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 8, **more}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def test_the_launcher_serves_http_and_moves_a_document(tmp_path):
    server = Server(tmp_path / "server.log", "--semblend", "quality=fast")
    try:
        cold = server.generate(HEADS[1] + DOCUMENT + QUESTION, custom_params={"semblend": {"opt_out": True}})
        flush = urllib.request.Request(f"http://127.0.0.1:{server.port}/flush_cache", method="POST")
        urllib.request.urlopen(flush, timeout=30)
        server.generate(HEADS[0] + DOCUMENT + QUESTION)
        moved = server.generate(HEADS[1] + DOCUMENT + QUESTION)
        facts = moved["meta_info"]
        assert facts["cached_tokens"] == facts["prompt_tokens"] - 1
        assert facts["cached_tokens_details"]["host"] > 100, "what we provide is told apart from exact hits"
        assert moved["text"] == cold["text"]
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30).read().decode()
    finally:
        server.stop()
    log = server.log.read_text()
    assert "SemBlend serves this engine" in log
    assert "[FUZZY] Realized" in log, "the line that sembench summarize-engine-events reads"
    assert "semblend_tokens_total{" in metrics
