"""Which SGLang versions this integration knows, and how it knows them. One table, read at start-up and by the docs."""

from __future__ import annotations

import importlib.metadata

from semblend.errors import MissingDependencyError, SemBlendError
from semblend.integration.version_support import Support, VersionEvidence

SUPPORTED: tuple[Support, ...] = (
    Support(
        "0.5.23",
        VersionEvidence.RUN,
        "tests/engines/sglang on a CPU: real scheduler and HTTP server, float32, torch_native attention",
    ),
)


def support(version: str) -> Support:
    """The row of a version such as ``0.5.23``; evidence ``none``, and what to do next, where there is none.

    SGLang changes its caches within a minor version, so every release counts as one of its own.

    >>> support("0.5.23").evidence, support("0.5.18").evidence
    (<VersionEvidence.RUN: 'run'>, <VersionEvidence.NONE: 'none'>)
    """
    for row in SUPPORTED:
        if row.version == version.split("+")[0]:
            return row
    known = ", ".join(row.version for row in SUPPORTED)
    return Support(
        version,
        VersionEvidence.NONE,
        f"SGLang {version} was never looked at, and this SemBlend knows {known}; "
        f"install a newer semblend-suite, or SGLang {SUPPORTED[-1].version}",
    )


def require_supported() -> Support:
    """The row of the installed SGLang, read from its package and not from its modules.

    Raises `SemBlendError` where SGLang is missing, or is a release whose caches nobody has looked at.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        hint = "pip install 'semblend-suite[sglang]'"
        raise MissingDependencyError("SGLang is not installed", hint=hint) from None
    row = support(version)
    if row.evidence is VersionEvidence.NONE:
        raise SemBlendError(f"SGLang {version} cannot be served by SemBlend", hint=row.note)
    return row
