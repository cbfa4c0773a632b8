"""Tables of bench/dial.py, from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import _report
import numpy as np
from _quality_tables import interval

from semblend.materialize.fit_dial import fit_dial
from semblend.materialize.gate.dial import FALSE_SAFE_TIMES, NUMBERS
from semblend.materialize.gate.plan_shape import PassageOrder
from semblend.materialize.gate.risk import RiskFeatures
from semblend.materialize.measure_ways import Moved, PromptMeasure, WayMeasure

Row = dict[str, Any]
WAYS = {"fast": 0, "attended-10": 10, "product-20": 20, "product-40": 40}
ORDERS = {"reordered": PassageOrder.REORDERED, "several": PassageOrder.SEVERAL}
MOVED = {"multi_news": PassageOrder.REORDERED, "samsum": PassageOrder.SEVERAL}
"""Data sets of the class of summaries whose passages moved."""
FLOORS = ("rerun", "other order")


def order_of(row: Row) -> PassageOrder:
    """How the passages of a row's prompt stand beside those of its donors."""
    return ORDERS.get(row["scenario"], MOVED.get(row["dataset"], PassageOrder.IN_ORDER))


def measures_of(rows: Sequence[Row]) -> Iterator[tuple[str, PromptMeasure]]:
    """The rows of phase ``ways`` as calibration has them, by case."""
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["recipe"]] = row
    for case, mine in by_case.items():
        ways = tuple(
            WayMeasure(
                percent, Moved(row["kl"], row["changed"]), row["kl_first"], row["flops"], row["glance"],
                RiskFeatures(**row["features"]) if row["features"] else None,
            )
            for name, percent in WAYS.items()
            if (row := mine.get(name)) and row["work"] is not None
        )  # fmt: skip
        floors = [Moved(mine[name]["kl"], mine[name]["changed"]) if name in mine else None for name in FLOORS]
        yield case, PromptMeasure(order_of(mine["cold"]), ways, *floors)


def show_dial(report: _report.Report, rows: Sequence[Row]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        fitted = [row for row in mine if row["phase"] == "ways"]
        held = [row for row in mine if row["phase"] == "numbers"]
        _show_numbers(report, model, held)
        _show_ways(report, model, fitted)
        _show_floors(report, model, mine)
        if fitted:
            dial = fit_dial([measure for _, measure in measures_of(fitted)])
            report.add(f"dial {model}", dial.to_record() if dial.glance else None)
        report.note(f"{model}: {len({r['case'] for r in fitted})} prompts for the fit, "
                    f"{len({r['case'] for r in held})} of other documents through the gate")  # fmt: skip


def _show_numbers(report: _report.Report, model: str, rows: Sequence[Row]) -> None:
    names = ["cold", *FLOORS, *(f"{number:g}" for number in NUMBERS), "balanced before", "fast"]
    columns = ["number", "n", "served", "FLOPs", "times saved", "KL answer", "F1 vs cold", "answers changed", "task",
               "false safes"]  # fmt: skip
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        mine = [row for row in rows if row["scenario"] == scenario]
        lines = [
            [recipe, *_summarize(kept, recipe)]
            for recipe in names
            if (kept := [row for row in mine if row["recipe"] == recipe])
        ]
        documents = len({row["cluster"] for row in mine})
        report.table(f"{model}: {scenario}, {documents} documents that nothing was fitted on", columns, lines)


def _summarize(rows: Sequence[Row], recipe: str) -> list[Any]:
    flops = interval(rows, "flops")[0]
    served = [row for row in rows if row["decision"] in ("accepted", "fast")]
    try:
        limit = FALSE_SAFE_TIMES * float(recipe)
        unsafe: Any = float(np.mean([row["kl"] > limit for row in served])) if served else 0.0
    except ValueError:
        unsafe = "-"
    counts = len(served) if recipe not in ("cold", *FLOORS) else "-"
    return [len(rows), counts, flops, 1 / flops, _range(rows, "kl"), _range(rows, "f1"),
            float(np.mean([row["changed"] for row in rows])), _range(rows, "task"), unsafe]  # fmt: skip


def _show_ways(report: _report.Report, model: str, rows: Sequence[Row]) -> None:
    lines = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        for recipe in WAYS:
            kept = [row for row in rows if (row["scenario"], row["recipe"]) == (scenario, recipe)]
            if kept:
                lines.append([scenario, recipe, len(kept), interval(kept, "flops")[0], _range(kept, "kl"),
                              _range(kept, "f1"), float(np.mean([row["changed"] for row in kept]))])  # fmt: skip
    if lines:
        columns = ["class", "way", "n", "FLOPs", "KL answer", "F1 vs cold", "answers changed"]
        report.table(f"{model}: every way alone, documents of the fit", columns, lines)


def _show_floors(report: _report.Report, model: str, rows: Sequence[Row]) -> None:
    lines = []
    for recipe in FLOORS:
        kept = [row for row in rows if row["recipe"] == recipe]
        if kept:
            lines.append([recipe, len(kept), _range(kept, "kl"), float(np.mean([r["changed"] for r in kept])),
                          _range(kept, "f1")])  # fmt: skip
    report.table(f"{model}: what cold prompts do by themselves", ["yardstick", "n", "KL", "answers changed", "F1"],
                 lines)  # fmt: skip


def _range(rows: Sequence[Row], value: str) -> str:
    return "{:.3g} [{:.2g}, {:.2g}]".format(*interval(rows, value))
