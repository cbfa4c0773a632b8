"""What the gate would take of prompts that hold a part of an earlier prompt's passages, or one of them moved ahead.

    python bench/gate_in_part.py

Nothing runs here: rows of bench/arranged_answers.py are read, in which 10 % was repaired whatever the gate said, with
the signs that it sees then. Each line asks one gate at .02 nats (mode balanced) whether it would stop there: the dial
of the model's own table for passages in order, the thresholds of the same table, and those of the default table.
The second table asks the dial for reordered passages at .1 nats, where the passage in front was reused or computed.
Refused prompts go on to the next repair, which these rows do not show; nor do they have the look at layer 1.
False safe: taken with more than five times the number of nats.
"""

from __future__ import annotations

import argparse
from typing import Any

import _report
import numpy as np
from _dial_runs import read_rows
from _quality_tables import spearman

from semblend.materialize.gate.chosen_table import choose_table
from semblend.materialize.gate.dial import FALSE_SAFE_TIMES
from semblend.materialize.gate.gate import DialGate, Gate, ThresholdGate
from semblend.materialize.gate.plan_shape import PassageOrder
from semblend.materialize.gate.risk import RiskFeatures
from semblend.materialize.gate.thresholds import DEFAULT
from semblend.quality import MODE_NATS

RESULTS = "bench/results/"
PERCENT, NATS, LOOSE = 10, MODE_NATS["balanced"], 0.1
KINDS = {
    "all of them": ("arranged_alone_h200_rows.jsonl.gz", ("arranged free",)),
    "some were left out": ("arranged_answers_h200_rows.jsonl.gz", ("arranged",)),
    "one was left out and is new in front": ("arranged_best_h200_rows.jsonl.gz", ("arranged first-anew",)),
    "one was left out and is new at the end": ("arranged_best_h200_rows.jsonl.gz", ("arranged last",)),
}

MOVED = {
    "reused": ("arranged_kept_h200_rows.jsonl.gz", ("arranged first",)),
    "computed": KINDS["one was left out and is new in front"],
}


def list_gates(model: str) -> dict[str, Gate]:
    own = choose_table(model).thresholds
    return {
        "own dial, in order": DialGate(own.dial, PassageOrder.IN_ORDER, NATS),
        "own thresholds": ThresholdGate(own, NATS),
        "default thresholds": ThresholdGate(DEFAULT, NATS),
    }


def read_repaired(name: str, phases: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Rows with 10 % repaired, by model."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows([RESULTS + name]):
        if row["recipe"] == "arranged attended-10" and row["phase"] in phases:
            found.setdefault(row["model"], []).append(row)
    return dict(sorted(found.items()))


def judge(gate: Gate, rows: list[dict[str, Any]], number: float) -> list[Any]:
    expected = np.array([gate.expect(PERCENT, RiskFeatures(**row["features"])) for row in rows])
    nats = np.array([row["kl"] for row in rows])
    taken = np.array([gate.accepts(PERCENT, one) for one in expected])
    mean = float(nats[taken].mean()) if taken.any() else 0.0
    false_safes = int((nats[taken] > FALSE_SAFE_TIMES * number).sum())
    return [int(taken.sum()), mean, false_safes, spearman(expected, nats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _report.add_common_arguments(parser, "gate_in_part")
    args = parser.parse_args()
    report = _report.Report("gate_in_part", args)
    taken = ["taken", "KL of these", "false safes", "rank correlation"]
    lines = []
    for kind, (name, phases) in KINDS.items():
        for model, rows in read_repaired(name, phases).items():
            nats = [row["kl"] for row in rows]
            for gate_name, gate in list_gates(model.split()[0]).items():
                lines.append([kind, model, len(rows), float(np.mean(nats)), float(np.median(nats)), gate_name,
                              *judge(gate, rows, NATS)])  # fmt: skip
    columns = ["of the earlier prompt's passages", "model", "prompts", "KL of all", "median", "gate", *taken]
    report.table(f"after {PERCENT} % repaired, at {NATS:g} nats", columns, lines)
    lines = []
    for kind, (name, phases) in MOVED.items():
        for model, rows in read_repaired(name, phases).items():
            gate = DialGate(choose_table(model.split()[0]).thresholds.dial, PassageOrder.REORDERED, LOOSE)
            lines.append([kind, model, len(rows), *judge(gate, rows, LOOSE)])
    columns = ["the passage that moved ahead", "model", "prompts", *taken]
    report.table(f"after {PERCENT} % repaired, at {LOOSE:g} nats, by the dial for reordered passages", columns, lines)
    report.note("measured on one H200, embedded engine; replayed")
    report.write(args.out)


if __name__ == "__main__":
    main()
