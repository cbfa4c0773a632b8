"""The dial on rows that bench/quality.py has measured: fitted on half of the documents, replayed on the other half.

    python bench/dial_replay.py bench/results/quality_h200_rows.jsonl.gz --measured-on "one H200"

Each way's FLOPs, divergence and F1 were measured alone; where one way follows another, its FLOPs count on top. The sign
after a repair is the expected divergence that the rows hold. Nothing runs: no model and no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _report  # first: it sets the number of threads
import numpy as np
from _dial_tables import WAYS, order_of
from quality import kept_rows

from semblend.materialize.fit_dial import Served, fit_dial, replay
from semblend.materialize.gate.dial import FALSE_SAFE_TIMES, NUMBERS
from semblend.materialize.gate.risk import RiskFeatures
from semblend.materialize.measure_ways import Moved, PromptMeasure, WayMeasure

Row = dict[str, Any]
BELOW_ORDER_NOISE = 0.15
"""Cold answers of this model move by .20 nats when passages change places (24 multi-hop prompts)."""


def make_measure(rows: dict[str, Row]) -> PromptMeasure | None:
    """The rows of one prompt as calibration has them; None where the gate never looked at it."""
    glance = rows.get("balanced", {}).get("glance")
    if glance is None or not all(name in rows for name in WAYS):
        return None
    ways = []
    for name, percent in WAYS.items():
        row = rows[name]
        seen = RiskFeatures(row["risk"], row["risk"], 1.0, 0.0) if percent and row["risk"] is not None else None
        moved = Moved(row["kl"], row["f1"] < 1)
        ways.append(WayMeasure(percent, moved, row["kl_first"], row["flops"], glance if percent else None, seen))
    return PromptMeasure(order_of(rows["cold"]), tuple(ways))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _report.add_common_arguments(parser, "dial_replay")
    parser.add_argument("rows", nargs="+", help="rows of bench/quality.py")
    parser.add_argument("--measured-on", default="", help="the machine")
    args = parser.parse_args()
    report = _report.Report("dial_replay", args)
    by_case: dict[str, dict[str, Row]] = {}
    for row in kept_rows(map(Path, args.rows)):
        by_case.setdefault(row["case"], {})[row["recipe"]] = row
    found = [(rows, measure) for rows in by_case.values() if (measure := make_measure(rows))]
    fitted = [measure for rows, measure in found if not rows["cold"]["held_out"]]
    held = [(rows, measure) for rows, measure in found if rows["cold"]["held_out"]]
    dial = fit_dial(fitted)
    columns = ["number", "n", "served", "FLOPs", "times saved", "KL answer", "F1 vs cold", "task F1", "cold's",
               "false safes"]  # fmt: skip
    for scenario in dict.fromkeys(rows["cold"]["scenario"] for rows, _ in held):
        mine = [(rows, measure) for rows, measure in held if rows["cold"]["scenario"] == scenario]
        lines = [
            [number, *_summarize(number, [(rows, replay(dial, measure, number)) for rows, measure in mine])]
            for number in sorted((*NUMBERS, BELOW_ORDER_NOISE))
        ]
        report.table(f"{scenario}, documents that nothing was fitted on", columns, lines)
    means = [[str(order), *(row[percent] for percent in WAYS.values())] for order, row in dial.means.items()]
    report.table("What the table expects of each way before anything is computed, nats (margin included)",
                 ["order of passages", *(f"{percent} %" for percent in WAYS.values())], means)  # fmt: skip
    report.note(f"{len(fitted)} prompts for the fit, {len(held)} of other documents replayed")
    report.write(args.out)


def _summarize(number: float, done: Sequence[tuple[dict[str, Row], Served]]) -> list[Any]:
    names = {percent: name for name, percent in WAYS.items()}
    served = [one for _, one in done if one.percent is not None]
    rows = [rows[names[one.percent]] if one.percent is not None else rows["cold"] for rows, one in done]
    flops = float(np.mean([one.work for _, one in done]))
    unsafe = float(np.mean([one.nats > FALSE_SAFE_TIMES * number for one in served])) if served else 0.0
    return [len(done), len(served), flops, 1 / flops, float(np.mean([row["kl"] for row in rows])),
            float(np.mean([row["f1"] for row in rows])), float(np.mean([row["task"] for row in rows])),
            float(np.mean([rows["cold"]["task"] for rows, _ in done])), unsafe]  # fmt: skip


if __name__ == "__main__":
    main()
