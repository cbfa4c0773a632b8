"""Which optional packages there are, which extra brings them, and which command wants them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

DISTRIBUTION = "semblend-suite"
MODULES = {"yaml": "pyyaml", "zmq": "pyzmq", "nats": "nats-py", "opentelemetry": "opentelemetry-api"}
"""Modules whose package has another name."""

# What each extra is for. docs/reference/extras.md is made from this table; a test fails when an extra is missing here.
NEEDED_BY: dict[str, str] = {
    "embedder": "`SEMBLEND_EMBEDDER=minilm` or `static`: paraphrase evidence on the CPU",
    "onnx-gpu": "`SEMBLEND_EMBEDDER=onnx_gpu`: paraphrase evidence on a GPU",
    "gpu": "`semblend serve` on a GPU: the Triton kernels",
    "local": "`semblend serve`, `demo` and `calibrate`: the embedded engine, its API and its dashboard",
    "vllm": "running beside vLLM; no command of this version needs it",
    "sglang": "`semblend-sglang`, which knows SGLang 0.5.23",
    "trtllm": "`semblend-trtllm`, whose integration was never run on the real engine",
    "transformers": "`semblend.integration.transformers`: reuse around `model.generate()`",
    "dynamo": "`semantickv dynamo-router`, which knows Dynamo 1.6.1; `dynamo-pin` needs `edge` alone",
    "langchain": "`semblend.integration.langchain`: a document transformer that arranges",
    "llama-index": "`semblend.integration.llama_index`: a node postprocessor that arranges",
    "benchmarks": "all that `sembench` may need: live runs, tokenizers",
    "tokenizer": "`semblend estimate`, `explain` and `explore` with `--tokenizer` other than `stable`",
    "longbench": "`sembench build --profile longbench-v1` or `longbench-v2` from the hub; a local folder needs nothing",
    "live": "`sembench run-live-sglang`, `run-live-gateway`, `run-load` and what else speaks to a server",
    "telemetry": "`SEMBLEND_METRICS`, `SEMBLEND_NATS_URL` and OpenTelemetry spans, in every command and in the library",
    "edge": "`semantickv proxy`, `router`, `dynamo-pin`, `api`; pyzmq, msgspec for KV events, redis for more routers",
    "lab": "`semblend demo --plot`: its picture",
    "k8s": "`sembench collect-k8s-engine-events`: it needs `kubectl` and no package",
    "docs": "`make docs`: the site of the documentation, and its tests",
    "dev": "`make test`",
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """One package and the versions of it that are accepted; ``extra`` is empty for what always comes along."""

    package: str
    versions: str
    extra: str


def requirements() -> tuple[Requirement, ...]:
    """What the installed distribution asks for; empty when the code runs without being installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return ()
    return tuple(_parse(line) for line in lines)


def extras() -> dict[str, tuple[Requirement, ...]]:
    """Extra to its packages, in the order of the table above; an extra may bring none."""
    found: dict[str, list[Requirement]] = {name: [] for name in _read_declared_extras()}
    for one in requirements():
        if one.extra:
            found.setdefault(one.extra, []).append(one)
    known = [name for name in NEEDED_BY if name in found]
    return {name: tuple(found[name]) for name in [*known, *sorted(found.keys() - NEEDED_BY.keys())]}


def find_extra(module: str) -> str | None:
    """The extra that brings the package of a module, or None where none does.

    >>> find_extra("no_such_module") is None
    True
    """
    package = MODULES.get(module.partition(".")[0], module.partition(".")[0]).replace("_", "-").lower()
    for extra, wanted in extras().items():
        if extra != "dev" and package in {one.package.partition("[")[0].lower() for one in wanted}:
            return extra
    return None


def _read_declared_extras() -> list[str]:
    try:
        return metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _parse(line: str) -> Requirement:
    """``'triton>=3.0; platform_system == "Linux" and extra == "gpu"'`` in parts."""
    wanted, _, marker = line.partition(";")
    name = re.match(r"\s*([A-Za-z0-9._-]+(?:\[[^\]]*\])?)\s*(.*)", wanted)
    extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", marker)
    if name is None:
        raise ValueError(f"unreadable requirement {line!r}")
    return Requirement(name[1], name[2].strip().strip("()"), extra[1] if extra else "")
