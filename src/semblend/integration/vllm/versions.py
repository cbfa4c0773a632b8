"""Which vLLM versions this connector knows, and how it knows them. One table, read at start-up and by the docs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class VersionEvidence(StrEnum):
    """How a version was looked at."""

    RUN = "run"
    STATIC = "static"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the table."""

    version: str
    evidence: VersionEvidence
    note: str


_SOURCES = "no split of hits by source"
_CPU = "tests/engines/vllm on a CPU, model runner V1, float32"

SUPPORTED: tuple[Support, ...] = (
    Support(
        "0.26", VersionEvidence.RUN, f"bench/vllm_ttft.py on an H200, model runner V2, bfloat16, compiled; {_SOURCES}"
    ),
    Support("0.27", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.28", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.29", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.30", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.31", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.32", VersionEvidence.RUN, f"{_CPU} and half precision; HTTP server, two ranks, other connectors, LoRA"),
)


def support(version: str) -> Support:
    """The row of a version such as ``0.32.0+cpu``; evidence ``none`` where there is none.

    >>> support("0.32.1").evidence, support("0.19.0").evidence
    (<VersionEvidence.RUN: 'run'>, <VersionEvidence.NONE: 'none'>)
    """
    minor = ".".join(version.split("+")[0].split(".")[:2])
    for row in SUPPORTED:
        if row.version == minor:
            return row
    known = ", ".join(row.version for row in SUPPORTED)
    return Support(minor, VersionEvidence.NONE, f"vLLM {version} was never looked at; known: {known}")
