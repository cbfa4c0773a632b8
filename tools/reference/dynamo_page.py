"""The page about Dynamo: versions, reasons, and what a deployment may have."""

from __future__ import annotations

from semblend.integration.versions import DYNAMO as DYNAMO_VERSIONS
from tools.reference.support_tables import DYNAMO, DYNAMO_REASONS


def dynamo_markdown() -> str:
    lines = [
        "# Dynamo: versions, reasons, features",
        "",
        "[How to use it, and what was run](../guides/dynamo.md). The flags of `semantickv dynamo-router` and "
        "`semantickv dynamo-pin` are in [the list of commands](semantickv-cli.md).",
        "",
        "## Versions",
        "",
        "| Dynamo | how it is known |",
        "|---|---|",
        *(f"| {row.version} | {row.evidence}: {row.note} |" for row in reversed(DYNAMO_VERSIONS.rows)),
        "",
        "Any other version is served too; the router says at its start that nobody has looked at it.",
        "",
        "## Why a request goes where it goes",
        "",
        "Under `engine_data.semblend.reason` of an answer whose request asked for "
        '`nvext.extra_fields: ["engine_data"]`; from `dynamo-pin` in the header `x-route-reason`.',
        "",
        "| reason | meaning |",
        "|---|---|",
        *(f"| `{reason.value}` | {meaning} |" for reason, meaning in DYNAMO_REASONS.items()),
        "",
        "## What a deployment may have",
        "",
        "| what | served | how | shown in |",
        "|---|---|---|---|",
        *(f"| {row.what} | {row.served} | {row.note} | {f'`{row.test}`' if row.test else ''} |" for row in DYNAMO),
    ]
    return "\n".join(lines)
