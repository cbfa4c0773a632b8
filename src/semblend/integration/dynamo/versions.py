"""Which Dynamo versions this integration knows, and how it knows them. One table, read at start-up and by the docs."""

from __future__ import annotations

from semblend.integration.version_support import Support, VersionEvidence

SUPPORTED: tuple[Support, ...] = (
    Support(
        "1.6.1",
        VersionEvidence.RUN,
        "tests/engines/dynamo: real frontend and KvRouter, mocker workers, one vLLM 0.32 on a CPU, on one machine",
    ),
)


def support(version: str) -> Support:
    """The row of a version such as ``1.6.1``; evidence ``none``, and what to do next, where there is none.

    >>> support("1.6.1").evidence, support("0.9.0").evidence
    (<VersionEvidence.RUN: 'run'>, <VersionEvidence.NONE: 'none'>)
    """
    for row in SUPPORTED:
        if row.version == version.split("+")[0]:
            return row
    known = ", ".join(row.version for row in SUPPORTED)
    note = f"Dynamo {version} was never looked at, and this SemBlend knows {known}; requests are served all the same"
    return Support(version, VersionEvidence.NONE, note)
