"""SGLang's HTTP server in processes of its own, for tests: started, asked, stopped.

By our launcher or by SGLang's own, both of which are forked from a process that has imported SGLang (see
`warm_servers`), unless ``is_warm`` is false; or by another program.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from warm_servers import WarmProcess

MODEL = os.environ.get("SEMBLEND_TEST_SGLANG_MODEL", "")
FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
    *("--context-length", "2048", "--max-total-tokens", "6144", "--max-running-requests", "4", "--enable-cache-report"),
    *("--enable-metrics", "--host", "127.0.0.1"),
]
LAUNCHER = [str(Path(sys.executable).with_name("semblend-sglang"))]
STOCK = [sys.executable, "-m", "sglang.launch_server"]
BUSY_PORT = "address already in use"


class Server:
    """A server and its log; ``command`` starts it, without the flags that every server of the tests has."""

    def __init__(
        self,
        log: Path,
        *more: str,
        command: Sequence[str] = LAUNCHER,
        flags: Sequence[str] = FLAGS,
        is_warm: bool = True,
        **variables: str,
    ) -> None:
        self.log = log
        is_warm = is_warm and command in (LAUNCHER, STOCK)
        environment = os.environ | variables
        self.process: WarmProcess | subprocess.Popen[bytes]
        for _ in range(3):  # somebody may take the port while SGLang loads its model
            self.port = find_port()
            given = ["--model-path", MODEL, *flags, "--port", str(self.port), *more]
            if is_warm:
                self.process = WarmProcess(given, log, environment, is_ours=command is LAUNCHER)
            else:
                with log.open("w") as out:
                    self.process = subprocess.Popen(
                        [*command, *given], stdout=out, stderr=out, env=environment, start_new_session=True
                    )
            if self._wait():
                return
            self.stop()
            if BUSY_PORT not in log.read_text():
                break
            print(f"port {self.port} was taken while the server started: once more", file=sys.stderr)
        pytest.fail("the server did not start:\n" + log.read_text()[-3000:])

    def _wait(self) -> bool:
        deadline = time.monotonic() + 1500
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=30)
                return True
            except OSError:
                time.sleep(0.2)
        return False

    def generate(self, text: str, *, salt: str | None = None, **more: Any) -> dict[str, Any]:
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 8, **more}}
        return self.post("/generate", body | ({"extra_key": salt} if salt else {}))

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode() if body is not None else b"",
            {"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            content = answer.read()
        try:
            found: dict[str, Any] = json.loads(content)
        except ValueError:
            found = {"text": content.decode()}
        return found

    def flush(self) -> None:
        """Empty the cache; SGLang refuses for a moment after an answer, while it puts the request away."""
        deadline = time.monotonic() + 300
        while True:
            try:
                self.post("/flush_cache")
                return
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def read_metrics(self) -> str:
        found: bytes = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=300).read()
        return found.decode()

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def find_port() -> int:
    """A free port below those that the kernel gives to whoever asks for any.

    SGLang binds it only when its model is loaded. Meanwhile a port that the kernel had given us was given to a listener
    of somebody else (a server next door; torch's rendezvous takes some too): SGLang then asked that one to freeze its
    memory, waited ten seconds, and ended.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(max(1024, lowest - 16_000), lowest), 100):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")
