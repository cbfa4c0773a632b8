"""Which TensorRT-LLM versions this connector knows, and how it knows them. One table, read at start-up and by the docs.

All of it is known from published sources. Nothing was run: the package needs an NVIDIA GPU to be imported.
"""

from __future__ import annotations

import importlib.metadata

from semblend.integration.version_support import Support, VersionEvidence, find_support

_NEVER_RUN = "never run. The connector's interface was read in its published sources"

SUPPORTED: tuple[Support, ...] = (
    Support("1.0", VersionEvidence.STATIC, f"{_NEVER_RUN}; the base classes are in pyexecutor.kv_cache_connector"),
    Support("1.1", VersionEvidence.STATIC, f"{_NEVER_RUN}; the base classes are in pyexecutor.kv_cache_connector"),
    Support("1.2", VersionEvidence.STATIC, f"{_NEVER_RUN}; the base classes are in pyexecutor.kv_cache_connector"),
    Support("1.3", VersionEvidence.STATIC, f"{_NEVER_RUN}; the base classes are in pyexecutor.connectors"),
    Support("1.4", VersionEvidence.STATIC, f"{_NEVER_RUN}; the base classes are in pyexecutor.connectors"),
)


def find_version() -> str | None:
    """The installed version; None where TensorRT-LLM is not installed."""
    for name in ("tensorrt-llm", "tensorrt_llm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def support(version: str) -> Support:
    """The row of a version such as ``1.2.1``; evidence ``none``, and what to do next, where there is none.

    >>> support("1.4.0rc1").evidence, support("0.21.0").evidence
    (<VersionEvidence.STATIC: 'static'>, <VersionEvidence.NONE: 'none'>)
    """
    return find_support(version, SUPPORTED, "TensorRT-LLM")
