"""What the gate would take of prompts that hold a part of an earlier prompt's passages, in its order.

    python bench/gate_in_part.py

Nothing runs here: rows of bench/arranged_answers.py are read, in which 10 % was repaired whatever the gate said, with
the signs that it sees then. Each line asks one gate at .02 nats (mode balanced) whether it would stop there: the dial
of the model's own table for passages in order, the thresholds of the same table, and those of the default table.
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
PERCENT, NATS = 10, MODE_NATS["balanced"]
KINDS = {
    "all of them": ("arranged_alone_h200_rows.jsonl.gz", ("arranged free",)),
    "some were left out": ("arranged_answers_h200_rows.jsonl.gz", ("arranged",)),
    "one was left out and is new in front": ("arranged_best_h200_rows.jsonl.gz", ("arranged first-anew",)),
    "one was left out and is new at the end": ("arranged_best_h200_rows.jsonl.gz", ("arranged last",)),
}


def list_gates(model: str) -> dict[str, Gate]:
    own = choose_table(model).thresholds
    return {
        "own dial, in order": DialGate(own.dial, PassageOrder.IN_ORDER, NATS),
        "own thresholds": ThresholdGate(own, NATS),
        "default thresholds": ThresholdGate(DEFAULT, NATS),
    }


def judge(gate: Gate, rows: list[dict[str, Any]]) -> list[Any]:
    expected = np.array([gate.expect(PERCENT, RiskFeatures(**row["features"])) for row in rows])
    nats = np.array([row["kl"] for row in rows])
    taken = np.array([gate.accepts(PERCENT, one) for one in expected])
    mean = float(nats[taken].mean()) if taken.any() else 0.0
    false_safes = int((nats[taken] > FALSE_SAFE_TIMES * NATS).sum())
    return [int(taken.sum()), mean, false_safes, spearman(expected, nats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _report.add_common_arguments(parser, "gate_in_part")
    args = parser.parse_args()
    report = _report.Report("gate_in_part", args)
    lines = []
    for kind, (name, phases) in KINDS.items():
        rows = [row for row in read_rows([RESULTS + name]) if row["recipe"] == "arranged attended-10"]
        for model in sorted({row["model"] for row in rows}):
            mine = [row for row in rows if row["model"] == model and row["phase"] in phases]
            mean = float(np.mean([row["kl"] for row in mine]))
            for gate_name, gate in list_gates(model.split()[0]).items():
                lines.append([kind, model, len(mine), mean, gate_name, *judge(gate, mine)])
    columns = ["of the earlier prompt's passages", "model", "prompts", "KL of all", "gate", "taken", "KL of these",
               "false safes", "rank correlation"]  # fmt: skip
    report.table(f"after {PERCENT} % repaired, at {NATS:g} nats", columns, lines)
    report.note("measured on one H200, embedded engine; replayed")
    report.write(args.out)


if __name__ == "__main__":
    main()
