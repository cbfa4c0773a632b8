"""Which versions of transformers this integration knows, and how it knows them: one table, read at start-up.

A version without a row is served where its model computes what a pass of ours computes, which is measured when they
meet (`model_access.TransformersModel.measure_disagreement`). Versions before the first row lack what we call.
"""

from __future__ import annotations

from semblend.integration.version_support import Support, VersionEvidence, find_support

_RUN = "tests/integration/transformers on a CPU: random models of every served type"
SUPPORTED: tuple[Support, ...] = (
    Support("4.57", VersionEvidence.RUN, "generate() with a Llama and a Qwen2 on a CPU, all three qualities"),
    Support("5.18", VersionEvidence.RUN, "generate() with a Llama and a Qwen2 on a CPU, all three qualities"),
    Support("5.22", VersionEvidence.RUN, _RUN),
)

SERVED_TYPES: tuple[str, ...] = (
    *("arcee", "ernie4_5", "gemma", "glm", "glm4", "helium", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmoe"),
    *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "starcoder2"),
)
"""Values of ``config.model_type`` whose models were run through the contract of `semblend.materialize`."""


def is_too_old(version: str) -> bool:
    """Whether a version is older than every one that was run.

    >>> is_too_old("4.30.0"), is_too_old("5.1.0"), is_too_old("not a version")
    (True, False, False)
    """
    try:
        first, this = (tuple(int(part) for part in text.split(".")[:2]) for text in (SUPPORTED[0].version, version))
    except ValueError:
        return False
    return this < first


def support(version: str) -> Support:
    """The row of a version; evidence ``none``, and what to do next, where there is none.

    >>> support("5.22.2").evidence, support("4.30.0").evidence
    (<VersionEvidence.RUN: 'run'>, <VersionEvidence.NONE: 'none'>)
    """
    return find_support(version, SUPPORTED, "transformers")
