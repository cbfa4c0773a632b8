"""Several models on the same kinds of prompts: what reuse does to each, its thresholds, and whose table fits whom.

    PYTHONPATH=src:bench python bench/carry_over.py [ROWS ...] [--measured-on MACHINE]

    # rows of a model; prompts of 600 tokens or more, because shorter ones do not pay every way
    PYTHONPATH=src:bench python bench/dial.py --model FILE.gguf --name NAME --phase ways --tokens 1000 --rows ROWS

Nothing runs here: rows of bench/dial.py are read, in which every way to reuse was measured alone on every prompt,
beside cold, cold again in chunks and cold in another order. *Thresholds* are those that `semblend calibrate` makes of
such rows, by its own code. *Whose table fits whom*: the table of one model judges the prompts of another, replayed; a
model judges its own prompts by fits that have not seen them (four folds). `unknown model` is what a model without a
table gets. False safe: served with more than five times the number of nats. Intervals: bootstrap over documents.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import _report  # first: it sets the number of threads
import numpy as np
import torch
from _dial_runs import read_rows
from _dial_tables import FLOORS, WAYS, measures_of
from _quality_tables import HARM_F1, HARM_KL, interval, spearman

from semblend.materialize.calibrate import list_pairs, table_of
from semblend.materialize.fit_dial import LEAST_TO_FIT, MOST_WORK, Served, fit_dial, replay, replay_unseen, summarize
from semblend.materialize.gate.dial import DialTable
from semblend.materialize.gate.thresholds import DEFAULT, STEPS, Thresholds
from semblend.materialize.measure_ways import PromptMeasure
from semblend.materialize.pool import Pool

DEFAULT_ROWS = ("bench/results/dial_h200_rows.jsonl.gz",)
NUMBERS = (0.02, 0.1)
"""Mode balanced, and a number that saves more."""
UNKNOWN = "unknown model"

Row = dict[str, Any]
Judge = Callable[[PromptMeasure, float], Served]


def show_quality(report: _report.Report, rows: Sequence[Row]) -> None:
    """A line for each model, class and way; the noise floors first."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        lines = []
        for scenario in dict.fromkeys(row["scenario"] for row in mine):
            for recipe in (*FLOORS, *WAYS):
                kept = [row for row in mine if (row["scenario"], row["recipe"]) == (scenario, recipe)]
                if kept:
                    lines.append([scenario, recipe, *summarize_rows(kept)])
        tokens = sorted(row["tokens"] for row in mine if row["recipe"] == "cold")
        title = f"{model}: prompts of {tokens[0]:,} to {tokens[-1]:,} tokens (median {tokens[len(tokens) // 2]:,})"
        columns = ["class", "prepared by", "prompts", "documents", "FLOPs", "KL answer", "F1 vs cold", "task F1",
                   "PPL ratio", "facts", "harmed"]  # fmt: skip
        report.table(title, columns, lines)


def summarize_rows(rows: Sequence[Row]) -> list[Any]:
    ranged = ["{:.3g} [{:.2g}, {:.2g}]".format(*interval(rows, name)) for name in ("kl", "f1", "task")]
    facts = [row["fact"] for row in rows if row["fact"] is not None]
    harmed = float(np.mean([row["kl"] > HARM_KL or row["f1"] < HARM_F1 for row in rows]))
    return [len(rows), len({row["cluster"] for row in rows}), interval(rows, "flops")[0], *ranged,
            math.exp(interval(rows, "ppl_log")[0]), f"{sum(facts)}/{len(facts)}" if facts else "-", harmed]  # fmt: skip


def make_thresholds(model: str, rows: Sequence[Row], measures: Sequence[PromptMeasure]) -> Thresholds:
    """Return what `semblend calibrate` would write for these prompts."""
    dtype = getattr(torch, model.rpartition(" ")[2])
    where = cast("Pool", SimpleNamespace(device=torch.device("cpu"), dtype=dtype))  # table_of notes both, no more
    pairs = [pair for one in measures for pair in list_pairs(one)]
    tokens = sum(row["tokens"] for row in rows if row["recipe"] == "cold")
    return table_of(pairs, pool=where, model_name=model, prompts=len(measures), tokens=tokens, dial=fit_dial(measures))


def show_thresholds(report: _report.Report, tables: dict[str, Thresholds]) -> None:
    lines: list[list[Any]] = []
    for model, table in tables.items():
        steps = table.provenance["steps"]
        begins = [None if value == math.inf else value for value in (table.begin_20, table.begin_40)]
        lines.append([model, table.provenance["prompts"], *(table.after(step) for step in STEPS), *begins,
                      "/".join(f"{steps[str(step)]['passing']:.2f}" for step in STEPS),
                      "fitted" if table.risk.weights else "still moving"])  # fmt: skip
    columns = ["model", "prompts", *(f"most nats, {step} %" for step in STEPS), "begin with 20 % from deviation",
               "40 % from", "share that passes 10/20/40 %", "judged by"]  # fmt: skip
    report.table("Thresholds by `semblend calibrate`, at most 2 % of what passes damaged", columns, lines)


def replay_steps(table: Thresholds, measure: PromptMeasure) -> Served:
    """What mode balanced does with a measured prompt by thresholds alone, as for a model without a dial."""
    splice = measure.find_way(0)
    work = before = splice.work if splice else 0.0
    first = table.first_step(measure.glance or math.nan) if table.glances else STEPS[0]
    for way in measure.ways:
        if first is None or way.features is None or way.percent < first:
            continue
        if work + way.work - before > MOST_WORK:
            break
        work += way.work - before
        expected = table.expect(way.percent, way.features)
        if expected <= table.after(way.percent):
            return Served(way.percent, work, way.moved.nats, way.moved.changed, expected)
    return Served(None, 1.0 + work, 0.0, changed=False)


def compare_signs(table: DialTable, measures: Sequence[PromptMeasure]) -> list[float]:
    """Rank correlation of what the table expects after 10 % with what happened, and how many times more happened."""
    pairs = [
        (table.expect_by_repair(one.order, 10, way.features), way.moved.nats + 1e-5)
        for one in measures
        if (way := one.find_way(10)) and way.features is not None
    ]
    expected, true = zip(*pairs, strict=True)
    return [spearman(expected, true), float(np.exp(np.mean(np.log(true) - np.log(expected))))]


def show_carrying(
    report: _report.Report, tables: dict[str, Thresholds], measured: dict[str, list[PromptMeasure]]
) -> None:
    lines: list[list[Any]] = []
    for model, measures in measured.items():
        for owner, table in tables.items():
            if not table.dial.glance:
                continue
            if owner == model:
                by_number = {row.number: row for row in replay_unseen(measures) if row.kind == "all"}
                cells = [by_number[number] for number in NUMBERS]
            else:
                cells = [summarize(n, "all", [replay(table.dial, one, n) for one in measures]) for n in NUMBERS]
            signs = compare_signs(table.dial, measures)
            lines.append([model, "its own" if owner == model else owner, len(measures), *signs, *_list_cells(cells)])
        unknown = summarize(NUMBERS[0], "all", [replay_steps(DEFAULT, one) for one in measures])
        lines.append([model, UNKNOWN, len(measures), None, None, *_list_cells([unknown]), *[None] * 4])
    columns = ["prompts of", "table of", "prompts", "rank correlation", "true over expected"]
    columns += [
        f"{name} at {number:g}" for number in NUMBERS for name in ("served", "work", "KL of all", "false safes")
    ]
    report.table("Whose table fits whom: a table of one model judges the prompts of another", columns, lines)


def _list_cells(rows: Sequence[Any]) -> list[Any]:
    return [cell for row in rows for cell in (row.served / row.prompts, row.work, row.nats, row.false_safe)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(DEFAULT_ROWS), help="rows of bench/dial.py")
    parser.add_argument("--measured-on", default="one H200, embedded engine", help="the machine of the rows")
    parser.add_argument("--out", default="bench/results/carry_over.json", help="JSON result file; '' writes none")
    args = parser.parse_args()
    report = _report.Report("carry_over", args)
    rows = [row for row in read_rows(args.rows) if row["phase"] == "ways"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_model = {model: [row for row in rows if row["model"] == model] for model in models}
    show_quality(report, rows)
    measured = {}
    for model, own in by_model.items():
        measures = [one for _, one in measures_of(own) if len(one.ways) == len(WAYS)]
        if len(measures) < LEAST_TO_FIT:
            report.note(f"{model}: {len(measures)} prompts with every way are too few for a table; {LEAST_TO_FIT} do")
        if measures:
            measured[model] = measures
    tables = {model: make_thresholds(model, by_model[model], measures) for model, measures in measured.items()}
    show_thresholds(report, tables)
    show_carrying(report, tables, measured)
    report.note("rerun: cold again in chunks; other order: cold with the passages in a third order, where they moved")
    report.note("harmed: KL above .1 or word F1 against cold below .5; expected and true: after 10 % computed again")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
