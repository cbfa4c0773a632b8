"""Writes the tables of docs/METRICS.md: ``python -m tools.reference.metric_pages docs/METRICS.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from sembench.gates import GATES
from sembench.result import RequestRecord
from sembench.witnesses.parsers import PARSERS
from tools.reference.metric_words import AGGREGATE, ENGINE_SUMMARY, PAIRED, RECORD
from tools.reference.support_tables import DOUBTS

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def build_tables() -> dict[str, str]:
    """Return every generated block by its name."""
    types = {field.name: str(field.type).removesuffix(" | None") for field in fields(RequestRecord)}
    once = {engine: make(engine).counted_once for engine, make in PARSERS.items()}
    fields_table = [(f"`{name}`", types.get(name, "?"), words) for name, words in RECORD.items()]
    bounds = [
        (f"`{gate.flag}`", f"`{gate.metric}`", _describe_bound(gate.bound, gate.unit), gate.needs) for gate in GATES
    ]
    return {
        "record": _format_table(("field", "type", "meaning"), fields_table),
        "aggregate": _format_words("metric", AGGREGATE),
        "paired": _format_words("metric", PAIRED),
        "engine_summary": _format_words("key", ENGINE_SUMMARY),
        "counted_once": _format_words("engine", once, meaning="what is one event"),
        "doubts": _format_words("name", {str(doubt): words for doubt, words in DOUBTS.items()}),
        "gates": _format_table(("flag", "reads", "passes when", "needs"), bounds),
    }


def fill_page(text: str) -> str:
    """Return the page with its generated blocks replaced."""
    made = build_tables()
    return _BLOCK.sub(lambda block: f"{block[1]}{made[block[2]]}\n{block[3]}", text)


def main(arguments: Sequence[str]) -> int:
    path = Path(arguments[0] if arguments else "docs/METRICS.md")
    path.write_text(fill_page(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def _describe_bound(bound: str, unit: str) -> str:
    if bound == "true":
        return "true"
    if unit == "flag":
        return "0"
    return "≥ the bound" if bound == "min" else "≤ the bound"


def _format_words(head: str, words: Mapping[str, str], meaning: str = "meaning") -> str:
    return _format_table((head, meaning), [(f"`{name}`", text) for name, text in words.items()])


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
