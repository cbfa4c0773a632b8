"""Tables of bench/arranged_answers.py, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _report
import numpy as np
from _quality_tables import interval

Row = dict[str, Any]
NAMES = {
    "retrieval cold": "retrieval order, cold",
    "retrieval rerun": "the same again, in chunks",
    "retrieval other order": "a third order, cold",
    "arranged cold": "arranged, cold",
    "arranged fast": "arranged, donor KV alone",
    "arranged attended-5": "arranged, 5 % repaired",
    "arranged attended-10": "arranged, 10 % repaired",
}


def show_arranged(report: _report.Report, rows: Sequence[Row]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        _show_scores(report, model, mine)
        _show_differences(report, model, mine)
        sets = {row["case"]: row["dataset"] for row in mine}
        counts = ", ".join(f"{name} {list(sets.values()).count(name)}" for name in dict.fromkeys(sets.values()))
        report.note(f"{model}: {len(sets)} questions ({counts})")


def _show_scores(report: _report.Report, model: str, rows: Sequence[Row]) -> None:
    lines = []
    for recipe, name in NAMES.items():
        kept = [row for row in rows if row["recipe"] == recipe]
        if kept:
            lines.append([name, len(kept), float(np.mean([row["tokens"] for row in kept])), interval(kept, "flops")[0],
                          _range(kept, "kl"), _range(kept, "f1"), float(np.mean([row["changed"] for row in kept])),
                          _range(kept, "task")])  # fmt: skip
    columns = ["prompt", "n", "tokens", "FLOPs", "KL from cold of its order", "F1 vs that cold", "answers changed",
               "task F1"]  # fmt: skip
    report.table(f"{model}: multi-document questions (a third order is compared with the retrieval order)", columns,
                 lines)  # fmt: skip


def _show_differences(report: _report.Report, model: str, rows: Sequence[Row]) -> None:
    lines = []
    base = {row["case"]: row for row in rows if row["recipe"] == "retrieval cold"}
    for recipe in (name for name in NAMES if name != "retrieval cold"):
        for dataset in ("all", *dict.fromkeys(row["dataset"] for row in rows)):
            paired = [{"cluster": row["case"], "difference": row["task"] - base[row["case"]]["task"]}
                      for row in rows if row["recipe"] == recipe and dataset in ("all", row["dataset"])
                      and row["case"] in base]  # fmt: skip
            if paired:
                mean, low, high = interval(paired, "difference", draws=4000)
                lines.append([NAMES[recipe], dataset, len(paired), mean, low, high])
    columns = ["prompt", "set", "n", "difference", "low", "high"]
    report.table(f"{model}: task F1 less that of the retrieval order, cold, paired; 95 % interval", columns, lines)


def _range(rows: Sequence[Row], value: str) -> str:
    return "{:.3g} [{:.2g}, {:.2g}]".format(*interval(rows, value))
