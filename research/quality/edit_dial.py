"""The dial for edited histories: fitted on half of the runs, judged on the other half.

    python research/quality/edit_dial.py ROWS.jsonl … [--signs] [--write src/semblend/materialize/gate/known/MODEL.json [--half]]

Nothing runs here: rows of bench/quality.py are read, in which every way was measured alone (`--recipes fast at-once-10
at-once-20 at-once-40`). Edited is what begins as its donor does (`PlanShape.is_edited`): histories that were handed over to
another agent, and passages of which some were left out under another instruction (`subset`), are judged like documents.
What a repair shows of a prompt is not weighed: each way is expected to be as far from cold as such prompts were on
average, times the smallest margin at which, fitted on other prompts, no number serves more divergence or more false safes
than it says. `--signs` weighs them, to see what they are worth. `--write` puts the fit on all rows into a table.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semblend.materialize.calibrate import (
    MARGINS,
    Moved,
    PromptMeasure,
    WayMeasure,
    _fit,
    _is_honest,
    replay,
)
from semblend.materialize.gate.thresholds import (
    FALSE_SAFE_TIMES,
    MIN_BEGINNING,
    DialTable,
    PassageOrder,
    RiskFeatures,
    Thresholds,
)

WAYS = {"fast": 0, "at-once-10": 10, "at-once-20": 20, "at-once-40": 40}
NUMBERS = (0.01, 0.02, 0.05, 0.1)
HARM = 0.1
FOLDS = 4


@dataclass(frozen=True)
class Measured:
    """One prompt: ``alone``, what a prefix cache alone computes, and ``flops`` of each way, both of a full prefill."""

    model: str
    kind: str
    held_out: bool
    alone: float
    flops: dict[int, float]
    prompt: PromptMeasure


def read_rows(paths: Iterable[str]) -> list[Measured]:
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for path in paths:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as lines:
            for row in map(json.loads, filter(str.strip, lines)):
                cases.setdefault((row["model"], row["case"]), {})[row["recipe"]] = row
    found = []
    for (model, _), rows in cases.items():
        ways = tuple(make_way(percent, rows[name]) for name, percent in WAYS.items() if rows.get(name, {}).get("passes"))
        if len(ways) == len(WAYS) and rows["cold"]["exact"] >= MIN_BEGINNING:
            cold = rows["cold"]
            flops = {percent: rows[name]["flops"] for name, percent in WAYS.items()}
            prompt = PromptMeasure(PassageOrder.IN_ORDER, ways)
            found.append(Measured(model, cold["scenario"], cold["held_out"], cold["prefix_flops"], flops, prompt))
    return found


def make_way(percent: int, row: dict[str, Any]) -> WayMeasure:
    features = RiskFeatures(**row["features"]) if row["features"] else None
    return WayMeasure(percent, Moved(row["kl"], row["changed"]), row["kl_first"], row["work"], features)


def choose_margin(prompts: Sequence[PromptMeasure], *, signs: bool) -> float:
    """The smallest that is honest where each prompt is judged by a fit on others; ends the program where none is."""
    unseen = []
    for fold in range(FOLDS):
        table = fit_with(1.0, [one for number, one in enumerate(prompts) if number % FOLDS != fold], signs=signs)
        unseen += [(table, one) for one in prompts[fold::FOLDS]]
    margin = next((one for one in MARGINS if _is_honest(unseen, one, 0.02)), None)
    if margin is None:
        raise SystemExit(f"no margin up to {MARGINS[-1]:g} is enough for {len(prompts)} prompts")
    print(f"{len(prompts)} prompts, margin {margin:g}")
    return margin


def fit_with(margin: float, prompts: Sequence[PromptMeasure], *, signs: bool) -> DialTable:
    table = _fit(prompts, 1.0)
    means = table.means[PassageOrder.IN_ORDER]
    plain = {percent: (0.0, 0.0, 0.0, 0.0, math.log(means[percent])) for percent in table.repair}
    return DialTable(table.means, table.repair if signs else plain).scale(margin)


def judge(table: DialTable, some: Sequence[Measured], number: float) -> str:
    served = [(one, replay(table, one.prompt, number)) for one in some]
    taken = [done for _, done in served if done.percent is not None]
    nats = np.array([done.nats for done in taken])
    flops = np.mean([one.alone if done.percent is None else one.flops[done.percent] for one, done in served])
    alone = np.mean([one.alone for one in some])
    levels = dict(sorted(Counter("prefill" if done.percent is None else f"{done.percent} %" for _, done in served).items()))
    return (
        f"n {len(some):4}  served {len(taken) / len(some):.3f}  KL {nats.mean() if len(nats) else 0:.4f}  above {HARM}: "
        f"{(nats > HARM).sum():2}  false safes {(nats > FALSE_SAFE_TIMES * number).sum():2}  "
        f"FLOPs {flops / alone:.2f} of a prefix cache's  {levels}"
    )


def rank(pairs: Sequence[tuple[float, float]]) -> float:
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0, kind="stable"), axis=0)
    return float(np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1])


def show(table: DialTable, some: Sequence[Measured], what: str, *, signs: bool) -> None:
    print(f"\n{what}")
    if signs:
        for percent in (10, 20):
            ways = [way for one in some if (way := one.prompt.find_way(percent)) and way.features]
            pairs = [(table.expect_by_repair(PassageOrder.IN_ORDER, percent, way.features), way.moved.nats) for way in ways]
            print(f"  rank correlation of what is expected after {percent} % with what it was: {rank(pairs):.2f}")
    for number in NUMBERS:
        for kind in sorted({one.kind for one in some}) if number == 0.02 else ():
            print(f"  {number:5} {kind:12} {judge(table, [one for one in some if one.kind == kind], number)}")
        print(f"  {number:5} {'all':12} {judge(table, some, number)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--judge", nargs="+", metavar="ROWS", help="of another model: only judged, by a fit on all of ROWS")
    parser.add_argument("--signs", action="store_true", help="weigh what a repair shows of itself")
    parser.add_argument("--write", type=Path, help="a table of the gate")
    parser.add_argument("--half", action="store_true", help="write the fit on half: then judge the other half live")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    found = read_rows(args.rows)
    margin = choose_margin([one.prompt for one in found], signs=args.signs)
    half = fit_with(margin, [one.prompt for one in found if not one.held_out], signs=args.signs)
    show(half, [one for one in found if one.held_out], "fitted on half of the runs, judged on the other half", signs=args.signs)
    whole = fit_with(margin, [one.prompt for one in found], signs=args.signs)
    if args.judge:
        show(whole, read_rows(args.judge), "fitted on all runs, judged on another model", signs=args.signs)
    chosen = half if args.half else whole
    rounded = {
        "means": {str(order): {str(p): round(x, 6) for p, x in row.items()} for order, row in chosen.means.items()},
        "repair": {str(p): [round(w, 4) for w in row] for p, row in chosen.repair.items()},
    }
    print("\nthe fit on", "half:" if args.half else "all:", json.dumps(rounded))
    if args.write:
        record = json.loads(args.write.read_text())
        record["edit_dial"] = rounded
        record["provenance"]["edit_dial"] = {
            "date": args.date, "models": sorted({one.model for one in found}),
            "prompts": sum(not (args.half and one.held_out) for one in found),
            "note": "research/quality/edit_dial.py, rows of bench/quality.py; decisions/divergence-budget.md",
        }  # fmt: skip
        args.write.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        Thresholds.read(args.write)


if __name__ == "__main__":
    main()
