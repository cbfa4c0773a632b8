"""Writes the tables of docs/METRICS.md: ``python -m tools.reference.metric_pages docs/METRICS.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from sembench.gates.table import GATES
from sembench.result import RequestRecord
from sembench.witnesses.parsers import PARSERS
from tools.reference.metric_words import AGGREGATE, ENGINE_SUMMARY, PAIRED, RECORD

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Every generated block by its name."""
    types = {field.name: str(field.type).removesuffix(" | None") for field in fields(RequestRecord)}
    once = {engine: make(engine).counted_once for engine, make in PARSERS.items()}
    return {
        "record": _table(("field", "type", "meaning"), [(f"`{n}`", types.get(n, "?"), w) for n, w in RECORD.items()]),
        "aggregate": _named("metric", AGGREGATE),
        "paired": _named("metric", PAIRED),
        "engine_summary": _named("key", ENGINE_SUMMARY),
        "counted_once": _table(("engine", "what is one event"), [(f"`{name}`", words) for name, words in once.items()]),
        "gates": _table(
            ("flag", "reads", "passes when", "needs"),
            [(f"`{gate.flag}`", f"`{gate.metric}`", _passes(gate.bound, gate.unit), gate.needs) for gate in GATES],
        ),
    }


def filled(text: str) -> str:
    """The page with its blocks written anew."""
    made = tables()
    return _BLOCK.sub(lambda block: f"{block[1]}{made[block[2]]}\n{block[3]}", text)


def main(arguments: Sequence[str]) -> int:
    path = Path(arguments[0] if arguments else "docs/METRICS.md")
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def _passes(bound: str, unit: str) -> str:
    if bound == "true":
        return "true"
    if unit == "flag":
        return "0"
    return "≥ the bound" if bound == "min" else "≤ the bound"


def _named(head: str, words: Mapping[str, str]) -> str:
    return _table((head, "meaning"), [(f"`{name}`", meaning) for name, meaning in words.items()])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
