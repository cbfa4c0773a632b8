"""A whole Dynamo deployment on one machine: mocker workers, the frontend, and our router and pin in front of them.

Runs in the environment of .ci/engines/dynamo. Discovery is a folder, and the planes are TCP and ZMQ: neither etcd nor
NATS. Each worker is a process of its own and can be killed by its id.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.server_process import ServerProcess, find_port
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BLOCK_SIZE = 16
STOCK, SEMANTIC = "stock", "semantic"
"""Names of the model: as the workers serve it, and as our router does."""
UP_S = 400.0
VLLM_UP_S = 1200.0
VLLM_STARTER = Path(__file__).with_name("start_vllm.py")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tokenizer_folder(folder: Path) -> Path:
    """Write what a frontend and mockers want of a model: a tokenizer with one token a byte, and a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    marks = ["<|start|>", "<|end|>"]
    words = {word: number for number, word in enumerate([*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": len(words),
            "max_position_embeddings": 131_072, "bos_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-5,
            "torch_dtype": "bfloat16",
        },
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": marks[0], "eos_token": marks[1],
            "model_max_length": 131_072, "chat_template": TEMPLATE,
        },
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return folder


@dataclass(frozen=True)
class Answer:
    """What came back: status, who computed it, cached and prompt tokens as the worker reports them, and our reason."""

    status: int
    worker: int | None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    reason: str = ""
    outcome: str = ""
    error: str = ""
    ttft_ms: float = 0.0
    receipt: dict[str, Any] = field(default_factory=dict)
    """Of an engine with SemBlend in it."""


class DynamoDeployment:
    """Started by ``with``; whatever it started is ended with it."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 3,
        router: bool = True,
        pin: bool = False,
        frontend_mode: str = "kv",
        mocker_flags: Sequence[str] = ("--speedup-ratio", "10"),
        blocks: int = 4096,
        block_size: int = BLOCK_SIZE,
        model: Path | None = None,
    ) -> None:
        self.folder = folder
        self._count = workers
        self._wants = {"router": router, "pin": pin}
        self._mode = frontend_mode
        self._mocker_flags = tuple(mocker_flags)
        self._blocks = blocks
        self.port, self.pin_port = find_port(), find_port()
        self.processes: dict[str, ServerProcess] = {}
        self._rpc_ports: dict[int, str] = {}
        self.block_size = block_size
        self.model = model or write_tokenizer_folder(folder / "model")

    def __enter__(self) -> DynamoDeployment:
        try:
            for number in range(self._count):
                self.start_worker(number)
            self._start(
                "frontend", "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port),
                "--router-mode", self._mode, "--kv-cache-block-size", str(self.block_size),
            )  # fmt: skip
            if self._wants["router"]:
                self.start_router()
            if self._count:
                self.wait_until_served(self._count)
            if self._wants["pin"]:
                self.start_pin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes.values()):
            process.kill()  # mockers wait for their leases when asked politely

    def start_worker(self, number: int) -> None:
        """Start a worker, or start it again."""
        port = self._take_rpc_port(f"worker{number}")
        self._start(
            f"worker{number}", "-m", "dynamo.mocker", "--model-path", str(self.model), "--model-name", STOCK,
            "--num-workers", "1", "--block-size", str(self.block_size), "--num-gpu-blocks-override", str(self._blocks),
            *self._mocker_flags, DYN_TCP_RPC_PORT=str(port),
        )  # fmt: skip

    def start_vllm_worker(self, python: str, *flags: str, **variables: str) -> None:
        """Start a real vLLM as a worker, in the environment of ``python``, with our connector in it."""
        connector = {
            "kv_connector": "SemBlendConnectorV1", "kv_role": "kv_both",
            "kv_connector_module_path": "semblend.integration.vllm.connector_v1",
        }  # fmt: skip
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{find_port()}"}
        self._start(
            "vllm", str(VLLM_STARTER), "--model", str(self.model), "--served-model-name", STOCK,
            "--block-size", str(self.block_size), "--kv-transfer-config", json.dumps(connector),
            "--kv-events-config", json.dumps(events), *flags,
            python=python, DYN_TCP_RPC_PORT=str(self._take_rpc_port("vllm")), **variables,
        )  # fmt: skip

    def start_vllm_worker_on_cpu(self) -> None:
        """The same with what .ci/engines/dynamo names, and the flags that a small machine needs."""
        library = os.environ["SEMBLEND_TEST_DYNAMO_LIBRARY"]
        self.start_vllm_worker(
            os.environ["SEMBLEND_TEST_DYNAMO_VLLM"], "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager",
            PYTHONPATH=f"{library}:{os.environ.get('PYTHONPATH', '')}", VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1",
        )  # fmt: skip

    def wait_until_served(self, count: int) -> None:
        """Until the frontend lists so many workers, and serves every model that it should."""
        self.wait_for_workers(count)
        self.wait_for_model(STOCK)
        if self._wants["router"]:
            self.wait_for_model(SEMANTIC)

    def start_router(self, name: str = "router", **variables: str) -> None:
        """Start our component, or one more of it."""
        self._start(
            name, "-m", "semantickv", "dynamo-router", "--model-name", SEMANTIC, "--model-path", str(self.model),
            "--block-size", str(self.block_size), **variables,
        )  # fmt: skip

    def start_pin(self) -> None:
        """Start our gateway in front of the frontend, and wait until it knows the workers."""
        url = f"http://127.0.0.1:{self.port}"
        self._start("pin", "-m", "semantickv", "dynamo-pin", "--frontend", url, "--port", str(self.pin_port))
        self.processes["pin"].wait_until(self._ask_pin, UP_S)

    def list_workers(self) -> dict[int, str]:
        """Id of every worker that the frontend lists, and the name of its process."""
        found = self._list_instances("backend")
        ports = {row["instance_id"]: int(row["transport"]["tcp"].partition("/")[0].rpartition(":")[2]) for row in found}
        return {worker: self._rpc_ports[port] for worker, port in ports.items()}

    def wait_for_routers(self, count: int) -> None:
        """Until the frontend lists so many of our routers."""

        def check() -> None:
            if len(self._list_instances("semblend_router")) != count:
                raise OSError("not yet")

        self.processes["frontend"].wait_until(check, UP_S)

    def _list_instances(self, component: str) -> list[dict[str, Any]]:
        rows = self._get(self.port, "/health")["instances"]
        return [row for row in rows if (row["component"], row["endpoint"]) == (component, "generate")]

    def kill_worker(self, worker: int) -> None:
        """kill -9."""
        self.processes[self.list_workers()[worker]].kill()

    def wait_for_workers(self, count: int) -> None:
        """Until the frontend lists so many."""

        def check() -> None:
            if len(self.list_workers()) != count:
                raise OSError("not yet")

        slowest = self.processes.get("vllm", self.processes["frontend"])  # whose log says why nothing comes
        slowest.wait_until(check, VLLM_UP_S if "vllm" in self.processes else UP_S)

    def wait_for_model(self, name: str) -> None:
        """Until the frontend serves it."""

        def check() -> None:
            if name not in [one["id"] for one in self._get(self.port, "/v1/models")["data"]]:
                raise OSError("not yet")

        self.processes["frontend"].wait_until(check, UP_S)

    def ask(
        self,
        messages: str | Sequence[tuple[str, str]],
        model: str = SEMANTIC,
        *,
        through_pin: bool = False,
        answer_tokens: int = 4,
        pin_to: int | None = None,
        **nvext: Any,
    ) -> Answer:
        """Ask one question over HTTP and read who answered."""
        request = self._write_request(messages, model, answer_tokens, through_pin=through_pin, **nvext)
        if pin_to is not None:
            request.add_header("x-dynamo-worker-instance-id", str(pin_to))
        try:
            with urllib.request.urlopen(request, timeout=400) as answer:
                value, reason = json.loads(answer.read()), answer.headers.get("x-route-reason", "")
                outcome = answer.headers.get("x-semantic-route", "")
        except urllib.error.HTTPError as error:
            return Answer(error.code, None, error=error.read().decode(errors="replace"))
        data = value["nvext"].get("engine_data") or {}
        own = data.get("semblend", {})
        usage = value["usage"]
        return Answer(
            200,
            own.get("worker_id") or value["nvext"]["worker_id"]["prefill_worker_id"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            usage["prompt_tokens"],
            own.get("reason", reason),
            own.get("outcome", outcome),
            ttft_ms=(value["nvext"].get("timing") or {}).get("ttft_ms") or 0.0,
            receipt=(data.get("kv_transfer_params") or {}).get("semblend") or {},
        )

    def ask_and_leave(self, text: str, model: str = SEMANTIC) -> None:
        """Ask for a long answer, read its beginning, and close the connection."""
        request = self._write_request(text, model, 20_000, stream=True)
        with urllib.request.urlopen(request, timeout=400) as answer:
            answer.read(64)

    def read_log(self, name: str) -> str:
        """What a process has printed."""
        return self.processes[name].log.read_text(errors="replace")

    def _take_rpc_port(self, name: str) -> int:
        port = find_port()
        self._rpc_ports[port] = name
        return port

    def _write_request(
        self,
        messages: str | Sequence[tuple[str, str]],
        model: str,
        answer_tokens: int,
        *,
        through_pin: bool = False,
        stream: bool = False,
        **nvext: Any,
    ) -> urllib.request.Request:
        if isinstance(messages, str):
            messages = [("user", messages)]
        body = {
            "model": model,
            "messages": [{"role": role, "content": text} for role, text in messages],
            "max_tokens": answer_tokens,
            "temperature": 0,
            "stream": stream,
            "nvext": {"extra_fields": ["worker_id", "engine_data", "timing"], **nvext},
        }
        url = f"http://127.0.0.1:{self.pin_port if through_pin else self.port}/v1/chat/completions"
        return urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})

    def make_environment(self, **variables: str) -> dict[str, str]:
        """The environment of a process that joins this deployment."""
        planes = {
            "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(self.folder / "discovery"), "DYN_LOG": "warn",
            "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_SELF_HOST_METADATA": "0", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        return os.environ | planes | variables

    def _start(self, name: str, *words: str, python: str = sys.executable, **variables: str) -> None:
        command = [python, "-W", "ignore", *words]
        environment = self.make_environment(**variables)
        self.processes[name] = ServerProcess(command, self.folder / f"{name}.log", **environment)

    def _ask_pin(self) -> None:
        if self._get(self.pin_port, "/health")["workers"] != self._count:
            raise OSError("not yet")

    def _get(self, port: int, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
            return json.loads(answer.read())
