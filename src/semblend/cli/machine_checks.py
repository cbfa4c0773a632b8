"""What `semblend doctor` says about the machine: memory, GPU, installed engines, models, and what to run next."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semblend.extras import installed_version
from semblend.integration.version_support import Support

ENGINES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "trtllm",
    "ai-dynamo": "dynamo",
    "transformers": "transformers",
}
"""Packages of engines, and the extra and folder of each."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver tells of it."""

    name: str
    memory: str
    driver: str


@dataclass(frozen=True, slots=True)
class EngineVersions:
    """What is known of one engine's versions. ``evidence``: of the installed one; empty where there is none."""

    installed: str | None
    known: str
    evidence: str = ""
    note: str = ""


def read_memory() -> tuple[int | None, int | None]:
    """Bytes of memory in all, and those that a program could still have; None where the system does not say."""
    total = available = None
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        available = page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, macOS not every name
        pass
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        available = found.get("MemAvailable", available)
    except (OSError, ValueError, IndexError):
        pass
    return total, available


def list_gpus(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> list[Gpu]:
    """The GPUs that nvidia-smi knows; none where it is missing, hangs or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == 3]


def read_engine(package: str) -> EngineVersions:
    """The installed version of an engine, and what its integration's table says of it."""
    rows, find = _read_table(package)
    known = ", ".join(row.version for row in rows) if len(rows) < 3 else f"{rows[0].version} to {rows[-1].version}"
    installed = installed_version(package)
    if installed is None:
        return EngineVersions(None, known)
    row = find(installed)
    return EngineVersions(installed, known, str(row.evidence), row.note)


def _read_table(package: str) -> tuple[Sequence[Support], Callable[[str], Support]]:
    """The rows of an engine's table of versions, and the function that finds the row of one."""
    table = importlib.import_module(f"semblend.integration.{ENGINES[package]}.versions")
    return table.SUPPORTED, table.support


def list_pulled() -> list[str]:
    """Names of the models that were pulled."""
    from semblend.models import MODELS, is_pulled

    return [model.name for model in MODELS.values() if is_pulled(model)]


def choose_next(engines: dict[str, EngineVersions], pulled: list[str]) -> tuple[str, str]:
    """The one command to run next, and why.

    >>> choose_next({"vllm": EngineVersions("0.32.0", "0.26 to 0.32", "run")}, [])[0].split()[:2]
    ['vllm', 'serve']
    >>> choose_next({}, [])
    ('semblend estimate prompts.jsonl', 'what reuse would save on a log of your prompts; needs nothing more')
    """
    served = [name for name, engine in engines.items() if engine.installed and engine.evidence in ("run", "static")]
    if "vllm" in served:
        option = """--kv-transfer-config '{"kv_connector":"SemBlendConnectorV1","kv_role":"kv_both"}'"""
        return f"vllm serve MODEL {option}", "vLLM is here, in a version that is known"
    if "sglang" in served:
        return "semblend-sglang --model-path MODEL", "SGLang is here, in a version that is known"
    if all(installed_version(package) for package in ("torch", "fastapi", "uvicorn")) and pulled:
        return f"semblend serve --model {pulled[0]}", "the embedded engine and a model are here"
    if engines.get("transformers") and "transformers" in served and not pulled:
        return "semblend models pull smollm2-135m", "a small model to try the embedded engine with"
    return "semblend estimate prompts.jsonl", "what reuse would save on a log of your prompts; needs nothing more"
