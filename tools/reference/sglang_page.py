"""The page about SGLang: versions, flags, settings, models and features, what can be read."""

from __future__ import annotations

from dataclasses import fields

from semblend.integration.sglang.launcher import build_parser
from semblend.integration.sglang.settings import PageOptions, SglangSettings
from semblend.integration.versions import SGLANG as SGLANG_VERSIONS
from tools.reference.support_tables import SGLANG
from tools.reference.vllm_page import show_default


def sglang_markdown() -> str:
    flags = [one for one in build_parser()._actions if one.option_strings[-1] != "--help"]
    lines = [
        "# SGLang: versions, flags, settings, models",
        "",
        "[How to use it](../guides/sglang.md). An engine that is not served runs as without us; its log says why.",
        "",
        "## Versions",
        "",
        "| SGLang | how it is known |",
        "|---|---|",
        *(f"| {row.version} | {row.evidence}: {row.note} |" for row in reversed(SGLANG_VERSIONS.rows)),
        "",
        "Any other version runs as without us and logs one line with what to do next; `semblend-sglang` does not "
        "start it.",
        "",
        "## Flags of `semblend-sglang`",
        "",
        "Every other flag is SGLang's. `--radix-cache-backend semblend` is added where none is given.",
        "",
        "| flag | meaning |",
        "|---|---|",
        *(f"| `{one.option_strings[-1]} {one.metavar}` | {one.help} |" for one in flags),
        "",
        "## Settings of the cache",
        "",
        "By `--semblend NAME=VALUE`, or in the variable `SEMBLEND_SGLANG` as JSON, beside every `SEMBLEND_*` "
        "[setting](settings.md).",
        "",
        *list_settings(SglangSettings),
        "",
        "## Options of the HiCache storage",
        "",
        "In `--hicache-storage-backend-extra-config`, beside SGLang's own keys.",
        "",
        *list_settings(PageOptions),
        "",
        "## Models and features",
        "",
        "| what | served | why, or how it is known |",
        "|---|---|---|",
        *(f"| {row.what} | {row.served} | {row.note} |" for row in SGLANG),
        "",
        "## What can be read",
        "",
        "| where | what |",
        "|---|---|",
        "| `meta_info.semblend` of an answer of `/generate` | the receipt, in a list of one |",
        "| `meta_info.cached_tokens_details` | `device`: SGLang's own hit; `host`: what we provided |",
        "| `/metrics` with `--enable-metrics` | [metrics](metrics.md) |",
        "| `SEMBLEND_EVENTS` | [events](events.md), each receipt in full |",
        "| the log, `sglang.semblend` | one line at start-up, one for each reuse "
        "(`sembench summarize-engine-events --engine sglang`) |",
    ]
    return "\n".join(lines)


def list_settings(kind: type) -> list[str]:
    rows = [one for one in fields(kind) if one.name != "config"]
    return [
        "| key | default | meaning |",
        "|---|---|---|",
        *(f"| `{one.name}` | {show_default(one.default)} | {one.metadata['help']} |" for one in rows),
    ]
