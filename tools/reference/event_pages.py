"""The generated pages: docs/reference/events.md, docs/reference/metrics.md and the JSON Schema file.

``python -m tools.reference.event_pages`` rewrites the schema that ships with the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from semblend.confirm.events import SCHEMA_VERSION
from semblend.confirm.metrics import METRICS
from semblend.confirm.outcome import Outcome
from semblend.plan.reuse_plan import DeclineReason
from tools.reference.event_schema import (
    ENVELOPE,
    EVICTION_REASONS,
    KINDS,
    RECEIPT_FIELDS,
    SPAN_FIELDS,
    Field,
    event_schema,
)

SCHEMA_FILE = Path(__file__).parents[2] / "src" / "semblend" / "confirm" / "events.schema.json"


def schema_json() -> str:
    """The text of ``events.schema.json``."""
    return json.dumps(event_schema(), indent=2) + "\n"


def events_markdown() -> str:
    """The body of docs/reference/events.md."""
    lines = [
        "# Events",
        "",
        f"One JSON object a line, schema version {SCHEMA_VERSION}. The JSON Schema ships as",
        "`semblend/confirm/events.schema.json`. A field that is not known is left out, never written as zero.",
        "No event holds prompt text or the salt of a namespace.",
        "",
        "## Every event",
        "",
        *_field_table(ENVELOPE),
    ]
    for kind, spec in KINDS.items():
        lines += ["", f"## {kind}", "", spec.help, "", *_field_table(spec.fields)]
    lines += ["", "## Receipt", "", "Every field is present; null means not measured, which is not zero.", ""]
    lines += _field_table(RECEIPT_FIELDS)
    lines += ["", "## Span", "", *_field_table(SPAN_FIELDS)]
    lines += ["", "## Words", ""]
    lines += [f"- outcome: {_words(Outcome)}", f"- decline reason: {_words(DeclineReason)}"]
    lines += [f"- eviction reason: {_words(EVICTION_REASONS)}", ""]
    return "\n".join(lines)


def metrics_markdown() -> str:
    """The body of docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Prometheus metrics, kept when `prometheus_client` is installed (`pip install 'semblend-suite[telemetry]'`)",
        "and `SEMBLEND_METRICS` is on. Tokens and the reuse ratio are counted from receipts only, never from plans.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{spec.name}` | {spec.kind} | {_words(spec.labels)} | {_cell(spec.help)} |" for spec in METRICS]
    lines += ["", "## Buckets", ""]
    for spec in METRICS:
        if spec.buckets:
            lines.append(f"- `{spec.name}`: {', '.join(f'{edge:g}' for edge in spec.buckets)}")
    return "\n".join([*lines, ""])


def _field_table(fields: Iterable[Field]) -> list[str]:
    rows = ["| field | type | always there | meaning |", "|---|---|---|---|"]
    for row in fields:
        kind = row.type.replace("?", " or null")
        rows.append(f"| `{row.name}` | {kind} | {'yes' if row.required else 'no'} | {_cell(row.help)} |")
    return rows


def _words(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_json(), encoding="utf-8")
