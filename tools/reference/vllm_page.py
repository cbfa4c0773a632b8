"""The page about vLLM: which versions, which settings, which models and features."""

from __future__ import annotations

from dataclasses import fields

from semblend.integration.versions import VLLM as VLLM_VERSIONS
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.materialize.donors.places import AUTO
from tools.reference.support_tables import VLLM


def vllm_markdown() -> str:
    lines = [
        "# vLLM: versions, settings, models",
        "",
        "[How to use it](../guides/vllm.md). An engine that is not served runs as without us; its log says why.",
        "",
        "## Versions",
        "",
        "| vLLM | how it is known |",
        "|---|---|",
        *(f"| {row.version} | {row.evidence}: {row.note} |" for row in reversed(VLLM_VERSIONS.rows)),
        "",
        "In any other version the connector loads, logs one line with what to do next, and reuses nothing. "
        "`.ci/engines/vllm-cpu versions` runs the older ones again.",
        "",
        "## Settings of the connector",
        "",
        "In `kv_connector_extra_config`, beside every `SEMBLEND_*` [setting](settings.md).",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    settings = [setting for setting in fields(ConnectorSettings) if setting.name != "config"]
    lines += [f"| `{one.name}` | {show_default(one.default)} | {one.metadata['help']} |" for one in settings]
    lines += ["", "## Models and features", "", "| what | served | why, or how it is known |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.served} | {row.note} |" for row in VLLM]
    return "\n".join(lines)


def show_default(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value == AUTO:
        return "decided at start"
    if isinstance(value, int) and value and value % (1 << 30) == 0:
        return f"{value >> 30} GiB"
    return f"`{value}`" if value != "" else "empty"
