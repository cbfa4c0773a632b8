"""The page about TensorRT-LLM: versions, flags, settings, models and features."""

from __future__ import annotations

from semblend.integration.trtllm.engine_support import TrtllmSettings
from semblend.integration.trtllm.launcher import build_parser
from semblend.integration.versions import TRTLLM as TRTLLM_VERSIONS
from tools.reference.sglang_page import list_settings
from tools.reference.support_tables import TRTLLM


def trtllm_markdown() -> str:
    flags = [one for one in build_parser()._actions if one.option_strings[-1] != "--help"]
    lines = [
        "# TensorRT-LLM: versions, flags, settings, models",
        "",
        "[How to use it, and what was checked](../guides/tensorrt_llm.md). **It was never run on the real engine.** An "
        "engine that is not served runs as without us; its log says why.",
        "",
        "## Versions",
        "",
        "| TensorRT-LLM | how it is known |",
        "|---|---|",
        *(f"| {row.version} | {row.evidence}: {row.note} |" for row in reversed(TRTLLM_VERSIONS.rows)),
        "",
        "Any other version runs as without us and logs one line with what to do next; `semblend-trtllm` does not "
        "start it.",
        "",
        "## Flags of `semblend-trtllm`",
        "",
        "Every other word goes to `trtllm-serve`.",
        "",
        "| flag | meaning |",
        "|---|---|",
        *(
            f"| `{' '.join(str(word) for word in (one.option_strings[-1], one.metavar) if word)}` | {one.help} |"
            for one in flags
        ),
        "",
        "## Settings of the connector",
        "",
        "By `--semblend NAME=VALUE`, or in the variable `SEMBLEND_TRTLLM` as JSON, beside every `SEMBLEND_*` "
        "[setting](settings.md).",
        "",
        *list_settings(TrtllmSettings),
        "",
        "## Models and features",
        "",
        "| what | served | why, or how it is known |",
        "|---|---|---|",
        *(f"| {row.what} | {row.served} | {row.note} |" for row in TRTLLM),
    ]
    return "\n".join(lines)
