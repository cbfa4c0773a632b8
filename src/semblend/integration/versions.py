"""Which versions of each engine this SemBlend knows, and how. Read at start-up and by the docs.

``docs/reference`` has a page for each engine that is made from it.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from enum import StrEnum

from semblend.errors import MissingDependencyError, SemBlendError


class VersionEvidence(StrEnum):
    """How a version was looked at."""

    RUN = "run"
    STATIC = "static"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Support:
    """One row of a table."""

    version: str
    evidence: VersionEvidence
    note: str

    @property
    def is_known(self) -> bool:
        """Whether somebody has looked at this version."""
        return self.evidence is not VersionEvidence.NONE


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The known versions of one engine, the oldest first. A row stands for a minor version, or for one release.

    >>> VLLM.find("0.32.1+cpu").evidence, VLLM.find("0.19.0").is_known, SGLANG.find("0.5.18").is_known
    (<VersionEvidence.RUN: 'run'>, False, False)
    """

    engine: str
    packages: tuple[str, ...]
    extra: str
    rows: tuple[Support, ...]
    by_release: bool = False
    otherwise: str = "install a newer semblend-suite, or {engine} {last}"

    def find(self, version: str) -> Support:
        """The row of a version; evidence ``none``, and what to do next, where there is none."""
        sought = version.split("+")[0]
        sought = sought if self.by_release else ".".join(sought.split(".")[:2])
        for row in self.rows:
            if row.version == sought:
                return row
        first, last = self.rows[0].version, self.rows[-1].version
        known = ", ".join(row.version for row in self.rows) if self.by_release else f"{first} to {last}"
        next_step = self.otherwise.format(engine=self.engine, last=last)
        note = f"{self.engine} {version} was never looked at, and this SemBlend knows {known}; {next_step}"
        return Support(sought, VersionEvidence.NONE, note)

    def find_installed(self) -> str | None:
        """The installed version, read from its package and not from its modules; None where there is none."""
        for name in self.packages:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def require_installed(self) -> str:
        """The installed version; `MissingDependencyError` where there is none."""
        version = self.find_installed()
        if version is None:
            hint = f"pip install 'semblend-suite[{self.extra}]'"
            raise MissingDependencyError(f"{self.engine} is not installed", hint=hint)
        return version

    def require(self) -> Support:
        """The row of the installed version; raises `SemBlendError` where it is missing, or nobody has looked at it."""
        version = self.require_installed()
        row = self.find(version)
        if not row.is_known:
            raise SemBlendError(f"{self.engine} {version} cannot be served by SemBlend", hint=row.note)
        return row


def _run(version: str, note: str) -> Support:
    return Support(version, VersionEvidence.RUN, note)


_SOURCES = "no split of hits by source"
_CPU = "the reuse and safety tests on a CPU, model runner V1, float32"

VLLM = EngineTable(
    "vLLM",
    ("vllm",),
    "vllm",
    (
        _run("0.26", f"bench/vllm_ttft.py on an H200, model runner V2, bfloat16, compiled; {_SOURCES}"),
        *(_run(f"0.{minor}", f"{_CPU}; {_SOURCES}") for minor in range(27, 32)),
        _run(
            "0.32",
            "all of tests/engines/vllm on a CPU at every change: model runner V1, eager, float32, bfloat16 and "
            "float16; HTTP server with eight clients at once, two ranks, LMCache and another connector beside us, a "
            "hybrid model, windows beside full attention, LoRA; bench/vllm_pays.py, bench/agents.py and four model "
            "classes on an H200, compiled, CUDA graphs",
        ),
    ),
)

SGLANG = EngineTable(
    "SGLang",
    ("sglang",),
    "sglang",
    (_run("0.5.23", "tests/engines/sglang on a CPU: real scheduler and HTTP server, float32, torch_native attention"),),
    by_release=True,  # SGLang changes its caches within a minor version
)

_TRTLLM = "never run. The connector's interface was read in its published sources; the base classes are in pyexecutor."

TRTLLM = EngineTable(
    "TensorRT-LLM",
    ("tensorrt-llm", "tensorrt_llm"),
    "trtllm",
    (
        *(Support(f"1.{minor}", VersionEvidence.STATIC, f"{_TRTLLM}kv_cache_connector") for minor in range(3)),
        *(Support(f"1.{minor}", VersionEvidence.STATIC, f"{_TRTLLM}connectors") for minor in range(3, 5)),
    ),
)

DYNAMO = EngineTable(
    "Dynamo",
    ("ai-dynamo-runtime",),
    "dynamo",
    (
        _run(
            "1.6.1",
            "tests/engines/dynamo: real frontend and KvRouter, mocker workers, one vLLM 0.32 on a CPU, on one machine",
        ),
    ),
    by_release=True,
    otherwise="requests are served all the same",
)

_GENERATE = "generate() with a Llama and a Qwen2 on a CPU, all three qualities"

TRANSFORMERS = EngineTable(
    "transformers",
    ("transformers",),
    "transformers",
    (
        _run("4.57", _GENERATE),
        _run("5.18", _GENERATE),
        _run("5.22", "tests/integration/transformers on a CPU: random models of every served type"),
    ),
)
"""One without a row is served where its model computes what a pass of ours computes, which is measured when they meet.

Versions before the first row lack what we call.
"""
