"""Which vLLM versions this connector knows, and how it knows them. One table, read at start-up and by the docs.

``docs/reference/vllm.md`` is made from it.
"""

from __future__ import annotations

from semblend.integration.version_support import Support, VersionEvidence, find_support

_SOURCES = "no split of hits by source"
_CPU = "the reuse and safety tests on a CPU, model runner V1, float32"

SUPPORTED: tuple[Support, ...] = (
    Support(
        "0.26", VersionEvidence.RUN, f"bench/vllm_ttft.py on an H200, model runner V2, bfloat16, compiled; {_SOURCES}"
    ),
    Support("0.27", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.28", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.29", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.30", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support("0.31", VersionEvidence.RUN, f"{_CPU}; {_SOURCES}"),
    Support(
        "0.32",
        VersionEvidence.RUN,
        "all of tests/engines/vllm on a CPU at every change: model runner V1, eager, float32, bfloat16 and float16; "
        "HTTP server with eight clients at once, two ranks, LMCache and another connector beside us, a hybrid model, "
        "LoRA",
    ),
)


def support(version: str) -> Support:
    """The row of a version such as ``0.32.0+cpu``; evidence ``none``, and what to do next, where there is none.

    >>> support("0.32.1").evidence, support("0.19.0").evidence
    (<VersionEvidence.RUN: 'run'>, <VersionEvidence.NONE: 'none'>)
    """
    return find_support(version, SUPPORTED, "vLLM")


def is_known(version: str) -> bool:
    """Whether somebody has looked at this version.

    >>> is_known("0.32.0+cpu"), is_known("0.99.0")
    (True, False)
    """
    return support(version).evidence is not VersionEvidence.NONE
