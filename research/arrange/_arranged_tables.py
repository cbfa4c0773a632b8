"""Tables of bench/arranged_answers.py, from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "arranged attended-10": "arranged, 10 % repaired",
}


ARRANGED = "arranged"
"""The phase of a run's rows: this, and what became of the passage that was retrieved first."""


def show_arranged(report: _report.Report, rows: Sequence[Row]) -> None:
    arms = list(dict.fromkeys(row["phase"] for row in rows if row["recipe"] == "arranged cold"))
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        if len(arms) > 1:
            _show_arms(report, model, mine, arms)
        else:
            _show_scores(report, model, mine)
            _show_differences(report, model, mine)
        sets = {row["case"]: row["dataset"] for row in mine}
        counts = ", ".join(f"{name} {list(sets.values()).count(name)}" for name in dict.fromkeys(sets.values()))
        report.note(f"{model}: {len(sets)} questions ({counts})")


def _show_arms(report: _report.Report, model: str, rows: Sequence[Row], arms: Sequence[str]) -> None:
    """What becomes of the passage that was retrieved first, a line each: the price of the order, and of reuse."""
    base = {row["case"]: row for row in rows if row["recipe"] == "retrieval cold"}
    lines = []
    for arm in arms:
        line: list[Any] = [arm.removeprefix(ARRANGED).strip() or "free"]
        for recipe in ("arranged cold", "arranged fast", "arranged attended-10"):
            mine = [row for row in rows if (row["phase"], row["recipe"]) == (arm, recipe)]
            if not mine:
                break
            task = "{:.3f} [{:.3f}, {:.3f}]".format(*interval(_pair(mine, base), "difference", draws=4000))
            cold = recipe == "arranged cold"
            line += [len(mine), task] if cold else [interval(mine, "flops")[0], _range(mine, "kl"), task]
        else:
            lines.append(line)
    apart = "task F1 less retrieval order"
    columns = ["the first retrieved", "n", f"arranged, cold: {apart}", "donor KV alone: FLOPs", "KL", apart,
               "10 % repaired: FLOPs", "KL", apart]  # fmt: skip
    report.table(f"{model}: what becomes of the passage that was retrieved first", columns, lines)


def _pair(rows: Sequence[Row], base: Mapping[str, Row]) -> list[Row]:
    return [
        {"cluster": row["case"], "difference": row["task"] - base[row["case"]]["task"]}
        for row in rows
        if row["case"] in base
    ]


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
            paired = _pair([r for r in rows if r["recipe"] == recipe and dataset in ("all", r["dataset"])], base)
            if paired:
                mean, low, high = interval(paired, "difference", draws=4000)
                lines.append([NAMES[recipe], dataset, len(paired), mean, low, high])
    columns = ["prompt", "set", "n", "difference", "low", "high"]
    report.table(f"{model}: task F1 less that of the retrieval order, cold, paired; 95 % interval", columns, lines)


def _range(rows: Sequence[Row], value: str) -> str:
    return "{:.3g} [{:.2g}, {:.2g}]".format(*interval(rows, value))
