"""The machines of bench/day.py as processes: two embedded engines, one vLLM, two routers, one Redis."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _server_process import ServerProcess, find_port

VLLM = ".engines/vllm/bin/python"
SECRET = "one secret of this fleet"
CONNECTOR = {
    "kv_connector": "SemBlendConnectorV1",
    "kv_connector_module_path": "semblend.integration.vllm.connector_v1",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"quality": "balanced", "donor_host_bytes": 1 << 30},
}


class Machine:
    """One process that can be killed and started again under the same address."""

    def __init__(self, name: str, command: list[str], port: int, folder: Path, variables: Mapping[str, str]) -> None:
        self.name, self.port, self._command = name, port, ["nice", "-n", "10", *command]
        self._log, self._variables = folder / f"{name}.log", dict(variables)
        self._process: ServerProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = ServerProcess(self._command, self._log, **self._variables)

    def wait(self, seconds: float = 420) -> None:
        """Until it answers."""
        assert self._process is not None, "it was started"
        if self.name == "redis":
            time.sleep(1.0)
            return
        path = "/health"
        self._process.wait_until(lambda: urllib.request.urlopen(self.url + path, timeout=5).read(), seconds)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(5)

    def read_cpu_s(self) -> float:
        return self._process.read_cpu_ms() / 1e3 if self._process is not None else 0.0


def make_engine(name: str, folder: Path, model: str) -> Machine:
    """`semblend serve`, one thread."""
    port = find_port()
    command = [sys.executable, "-m", "semblend.cli.main", "serve", "--model", model, "--port", str(port)]
    command += ["--threads", "1", "--pool-tokens", "24576", "--quality", "balanced", "--donor-bytes", str(1 << 30)]
    return Machine(name, command, port, folder, {"OMP_NUM_THREADS": "1"})


def make_vllm(name: str, folder: Path, model: str, served: str) -> Machine:
    """vLLM on a CPU with our connector, in its own environment."""
    port = find_port()
    command = [os.path.abspath(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", served, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "2048", "--max-num-batched-tokens", "2048", "--max-num-seqs", "4"]
    command += ["--block-size", "32", "--kv-cache-memory-bytes", str(24576 * 30 * 3 * 64 * 2 * 4)]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(CONNECTOR)]
    variables = {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }  # fmt: skip
    return Machine(name, command, port, folder, variables)


def make_redis(folder: Path) -> Machine:
    port = find_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return Machine("redis", [*command, "--dir", str(folder)], port, folder, {})


def make_router(name: str, folder: Path, engines: list[Machine], redis: Machine) -> Machine:
    port = find_port()
    command = [sys.executable, "-m", "semantickv", "router", "--no-trace", "--port", str(port), "--replicas"]
    command.append(",".join(one.url for one in engines))
    variables = {
        "SEMANTICKV_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0", "SEMANTICKV_HASH_KEY": SECRET,
        "SEMANTICKV_SALT_SECRET": SECRET, "SEMANTICKV_HEALTH_SECONDS": "2",
    }  # fmt: skip
    return Machine(name, command, port, folder, variables)


def post(url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: float = 300) -> dict[str, Any]:
    """Status, headers and parsed body of an answer; an error of the server is an answer too."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return {"status": answer.status, "headers": dict(answer.headers), "body": json.load(answer)}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "headers": dict(error.headers), "body": {}, "error": error.read()[:300].decode()}
    except OSError as error:
        return {"status": 0, "headers": {}, "body": {}, "error": f"{type(error).__name__}: {error}"}


def get(url: str, timeout: float = 20) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
