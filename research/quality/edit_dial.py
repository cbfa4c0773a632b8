"""The dial for edited histories and parts of a donor: fitted on half of the runs, judged on the other half.

    python research/quality/edit_dial.py ROWS.jsonl … [--write src/semblend/materialize/gate/known/MODEL.json [--half]]

Nothing runs here: rows of bench/quality.py are read, in which every way was measured alone (`--recipes fast at-once-10
at-once-20 at-once-40`). Passages of which some were left out (`subset`) belong to the fit: the gate cannot tell
them from an agent's history by the plan, and they are further away. `--write` puts the fit on all rows into a table.
Means, by which a repair begins, are of the kind that is furthest from cold: no kind is served unprobed because others are
close. `--plain`: what a repair shows of a prompt is not weighed at all, to see what the signs are worth (fits give the
deviation a weight of 1 at least, which is a rule and no measurement).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semblend.materialize.calibrate import Moved, PromptMeasure, WayMeasure, _fit, fit_dial, replay
from semblend.materialize.gate.thresholds import (
    FALSE_SAFE_TIMES,
    MIN_OF_AN_ORDER,
    RECOMPUTE_LEVELS,
    DialTable,
    PassageOrder,
    RiskFeatures,
    Thresholds,
)

WAYS = {"fast": 0, "at-once-10": 10, "at-once-20": 20, "at-once-40": 40}
NUMBERS = (0.01, 0.02, 0.05, 0.1)
HARM = 0.1
SMALL_MARGIN = 1.5


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
        if not any(name == "deviation" for name, *_ in (rows.get("at-once-10") or {}).get("passes") or ()):
            continue  # declined, or little of it is new, so that it is looked at and judged like a document
        rows.setdefault("fast", rows.get("fast, all spans", {}))  # further away, where nothing else was measured
        ways = tuple(make_way(percent, rows[name]) for name, percent in WAYS.items() if rows.get(name, {}).get("passes"))
        if len(ways) == len(WAYS):
            cold = rows["cold"]
            flops = {percent: rows[name]["flops"] for name, percent in WAYS.items()}
            prompt = PromptMeasure(PassageOrder.IN_ORDER, ways)
            found.append(Measured(model, cold["scenario"], cold["held_out"], cold["prefix_flops"], flops, prompt))
    return found


def make_way(percent: int, row: dict[str, Any]) -> WayMeasure:
    features = RiskFeatures(**row["features"]) if row["features"] else None
    return WayMeasure(percent, Moved(row["kl"], row["changed"]), row["kl_first"], row["work"], features)


def fit(some: Sequence[Measured], *, plain: bool = False) -> DialTable:
    """Weights of all, and of each way the mean of the kind that is furthest."""
    table = fit_dial([one.prompt for one in some])
    if not table.repair:
        print(f"{len(some)} prompts are too few to choose a margin by: it is {SMALL_MARGIN:g}")
        table = _fit([one.prompt for one in some], SMALL_MARGIN)
    margin = table.means[PassageOrder.IN_ORDER][0] / np.mean([one.prompt.ways[0].moved.nats for one in some])
    kinds = [[one for one in some if one.kind == kind] for kind in {one.kind for one in some}]
    groups = [list(some), *(mine for mine in kinds if len(mine) >= MIN_OF_AN_ORDER)]
    means = {
        percent: max(float(np.mean([one.prompt.find_way(percent).moved.nats for one in mine])) for mine in groups)
        for percent in RECOMPUTE_LEVELS
    }
    means = {percent: float(margin * nats) for percent, nats in means.items()}
    repair = {percent: (0.0, 0.0, 0.0, 0.0, float(np.log(means[percent]))) for percent in table.repair} if plain else table.repair
    return DialTable({PassageOrder.IN_ORDER: means}, repair)


def judge(table: DialTable, some: Sequence[Measured], number: float) -> str:
    served = [(one, replay(table, one.prompt, number)) for one in some]
    taken = [done for _, done in served if done.percent is not None]
    nats = np.array([done.nats for done in taken])
    work = np.mean([done.work for _, done in served])
    flops = np.mean([one.alone if done.percent is None else one.flops[done.percent] for one, done in served])
    alone = np.mean([one.alone for one in some])
    levels = dict(sorted(Counter("prefill" if done.percent is None else f"{done.percent} %" for _, done in served).items()))
    return (
        f"n {len(some):4}  served {len(taken) / len(some):.3f}  KL {nats.mean() if len(nats) else 0:.4f}  above {HARM}: "
        f"{(nats > HARM).sum():2}  false safes {(nats > FALSE_SAFE_TIMES * number).sum():2}  work {work:.2f}  "
        f"FLOPs {flops / alone:.2f} of a prefix cache's  {levels}"
    )


def rank(pairs: Sequence[tuple[float, float]]) -> float:
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0, kind="stable"), axis=0)
    return float(np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1])


def show(table: DialTable, some: Sequence[Measured], what: str) -> None:
    print(f"\n{what}")
    for percent in (10, 20):
        ways = [(table.expect_by_repair(PassageOrder.IN_ORDER, percent, way.features), way.moved.nats) for one in some if (way := one.prompt.find_way(percent)).features]
        print(f"  rank correlation of what is expected after {percent} % with what it was: {rank(ways):.2f}")
    edited = [one for one in some if one.kind != "subset"]
    for number in NUMBERS:
        kinds = dict.fromkeys(one.kind for one in some) if number == 0.02 else {}
        for kind in kinds:
            print(f"  {number:5} {kind:12} {judge(table, [one for one in some if one.kind == kind], number)}")
        for name, mine in (("all edits", edited), ("subset", [one for one in some if one.kind == "subset"])):
            if mine:
                print(f"  {number:5} {name:12} {judge(table, mine, number)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--judge", nargs="+", metavar="ROWS", help="of another model: only judged, by a fit on all of ROWS")
    parser.add_argument("--write", type=Path, help="a table of the gate")
    parser.add_argument("--plain", action="store_true", help="weigh no sign")
    parser.add_argument("--half", action="store_true", help="write the fit on half: then judge the other half live")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    found = read_rows(args.rows)
    half = fit([one for one in found if not one.held_out], plain=args.plain)
    show(half, [one for one in found if one.held_out], "fitted on half of the runs, judged on the other half")
    whole = fit(found, plain=args.plain)
    if args.judge:
        show(whole, read_rows(args.judge), "fitted on all runs, judged on another model")
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
