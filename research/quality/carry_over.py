"""Several models on the same kinds of prompts: what reuse does to each, its thresholds, and whose table fits whom.

    PYTHONPATH=src:bench python bench/carry_over.py [ROWS ...] [--measured-on MACHINE]

    # rows of a model; prompts of 600 tokens or more, because shorter ones do not pay every way
    PYTHONPATH=src:bench python bench/dial.py --model FILE.gguf --name NAME --phase ways --tokens 1000 --rows ROWS

Nothing runs here: rows of bench/dial.py are read, in which every way to reuse was measured alone on every prompt,
beside cold, cold again in chunks and cold in another order. *Thresholds* are those that `semblend calibrate` makes of
such rows, by its own code. *Whose table fits whom*: the table of one model judges the prompts of another, replayed; a
model judges its own prompts by fits that have not seen them (four folds); `the others together` is one fit on the
moved passages of all other models. Fitted on those of all models it is `gate/default.json`, which a model without a
table gets. *An unknown model, live* are rows of bench/quality.py, made when such a model had thresholds alone.
False safe: served with more than five times the number of nats. Intervals: bootstrap over documents.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import _report  # first: it sets the number of threads
import numpy as np
import torch
from _dial_runs import read_rows
from _dial_tables import FLOORS, WAYS, measures_of, order_of
from _quality_tables import HARM_F1, HARM_KL, false_safe, interval, spearman
from quality import kept_rows

from semblend.materialize.calibrate import list_pairs, table_of
from semblend.materialize.fit_dial import LEAST_TO_FIT, MOST_WORK, Served, fit_dial, replay, replay_unseen, summarize
from semblend.materialize.gate.dial import FALSE_SAFE_TIMES, DialTable, choose_way
from semblend.materialize.gate.plan_shape import PassageOrder
from semblend.materialize.gate.thresholds import STEPS, Thresholds
from semblend.materialize.measure_ways import PromptMeasure
from semblend.materialize.pool import Pool

DEFAULT_ROWS = ("bench/results/dial_h200_rows.jsonl.gz", "bench/results/dial_tinyllama_h200_rows.jsonl.gz")
LIVE_ROWS = ("bench/results/quality_tinyllama_h200_rows.jsonl.gz", "bench/results/quality_qwen05_h200_rows.jsonl.gz")
NUMBERS = (0.02, 0.1)
"""Mode balanced, and a number that saves more."""
OTHERS = "the others together, moved passages"

Row = dict[str, Any]
Measured = Mapping[str, Sequence[PromptMeasure]]


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


def fit_moved(measured: Measured, *, without: str = "") -> DialTable:
    """One dial for passages that moved, fitted on all models but one."""
    return fit_dial([one for model, own in measured.items() for one in own if model != without and is_moved(one)])


def is_moved(measure: PromptMeasure) -> bool:
    """Whether passages stand in another order than in their donor, or come from several."""
    return measure.order is not PassageOrder.IN_ORDER


def compare_signs(table: DialTable, measures: Sequence[PromptMeasure]) -> list[float]:
    """Rank correlation of what the table expects after 10 % with what happened, and how many times more happened."""
    pairs = [
        (table.expect_by_repair(one.order, 10, way.features), way.moved.nats + 1e-5)
        for one in measures
        if (way := one.find_way(10)) and way.features is not None
    ]
    expected, true = zip(*pairs, strict=True)
    return [spearman(expected, true), float(np.exp(np.mean(np.log(true) - np.log(expected))))]


def show_carrying(report: _report.Report, tables: dict[str, Thresholds], measured: Measured) -> None:
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
        others, moved = fit_moved(measured, without=model), [one for one in measures if is_moved(one)]
        if others.glance and moved:
            cells = [summarize(n, "all", [replay(others, one, n) for one in moved]) for n in NUMBERS]
            lines.append([model, OTHERS, len(moved), *compare_signs(others, moved), *_list_cells(cells)])
    columns = ["prompts of", "table of", "prompts", "rank correlation", "true over expected"]
    columns += [
        f"{name} at {number:g}" for number in NUMBERS for name in ("served", "work", "KL of all", "false safes")
    ]
    report.table("Whose table fits whom: a table of one model judges the prompts of another", columns, lines)


def _list_cells(rows: Sequence[Any]) -> list[Any]:
    return [cell for row in rows for cell in (row.served / row.prompts, row.work, row.nats, row.false_safe)]


def show_live(report: _report.Report, rows: Sequence[Row]) -> None:
    """What mode balanced served of a model that it had no table of, by class, then by order of the passages."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        gated = [row for row in mine if row["recipe"] == "balanced"]
        classes = {name: [row for row in gated if name_class(row) == name] for name in map(name_class, gated)}
        classes["all in order"] = [row for row in gated if order_of(row) is PassageOrder.IN_ORDER]
        classes["all moved"] = [row for row in gated if order_of(row) is not PassageOrder.IN_ORDER]
        floors = {floor: {row["case"]: row for row in mine if row["recipe"] == floor} for floor in FLOORS}
        lines = [[name, *summarize_live(kept, floors)] for name, kept in classes.items()]
        columns = ["class", "prompts", "documents", "served", "work", "KL of all", "F1 vs cold of all", "order noise",
                   "false safes", "harmed of served", "of their reruns"]  # fmt: skip
        report.table(f"An unknown model, live: {model}, mode balanced by thresholds alone", columns, lines)


def show_held_out(report: _report.Report, tables: Mapping[str, Thresholds], rows: Sequence[Row]) -> None:
    """Let each table judge documents that none was fitted on, in mode balanced."""
    lines: list[list[Any]] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model and row["held_out"]]
        measures = [one for _, one in measures_of(mine)]
        for owner, table in tables.items():
            done = summarize(NUMBERS[0], "all", [replay_without_glance(table.dial, one) for one in measures])
            unsafe = f"{round(done.false_safe * done.served)} of {done.served}"
            lines.append([model, "its own" if owner == model else owner, done.prompts, done.served, done.work,
                          done.nats, done.changed, unsafe])  # fmt: skip
    columns = ["prompts of", "table of", "prompts", "served", "work", "KL of all", "answers changed", "false safes"]
    report.table("Mode balanced on documents that no table was fitted on, replayed without the glance", columns, lines)


def replay_without_glance(table: DialTable, measure: PromptMeasure) -> Served:
    """What mode balanced does with a prompt, begun with the smallest repair.

    Rows of an unknown model hold no look at layer 1, which may only begin with more, or prefill.
    """
    number = NUMBERS[0]
    if not table.knows(measure.order) or choose_way(table.expect_by_plan(measure.order), number).percent is None:
        return Served(None, 1.0, 0.0, changed=False)
    splice = measure.find_way(0)
    work = before = splice.work if splice else 0.0
    for way in measure.ways:
        if way.features is None:
            continue
        if work + way.work - before > MOST_WORK:
            break
        work += way.work - before
        expected = table.expect_by_repair(measure.order, way.percent, way.features)
        if expected <= number:
            return Served(way.percent, work, way.moved.nats, way.moved.changed, expected)
    return Served(None, 1.0 + work, 0.0, changed=False)


def name_class(row: Row) -> str:
    """The scenario; summaries are two, because some of them have passages that moved."""
    if row["scenario"] != "summarization":
        return str(row["scenario"])
    return "summaries" if order_of(row) is PassageOrder.IN_ORDER else "summaries, passages moved"


def summarize_live(rows: Sequence[Row], floors: Mapping[str, Mapping[str, Row]]) -> list[Any]:
    served = [row for row in rows if row["decision"] == "accepted"]
    unsafe = sum(row["kl"] > FALSE_SAFE_TIMES * NUMBERS[0] for row in served)
    rerun = [floors["rerun"][row["case"]] for row in served]
    order = [one for row in rows if (one := floors["other order"].get(row["case"]))]
    return [
        len(rows), len({row["cluster"] for row in rows}), len(served), interval(rows, "flops")[0],
        *("{:.3g} [{:.2g}, {:.2g}]".format(*interval(rows, name)) for name in ("kl", "f1")),
        interval(order, "kl")[0] if order else None, f"{unsafe} of {len(served)}",
        false_safe(served) if served else None, false_safe(rerun) if rerun else None,
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(DEFAULT_ROWS), help="rows of bench/dial.py")
    parser.add_argument("--live", nargs="*", default=list(LIVE_ROWS), help="rows of bench/quality.py, unknown models")
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
    live = kept_rows(map(Path, args.live))
    show_held_out(report, tables, live)
    show_live(report, live)
    report.add("thresholds", {model: json.loads(table.to_json()) for model, table in tables.items()})
    report.add("dial of moved passages, all models", fit_moved(measured).to_record())
    report.note("rerun: cold again in chunks; other order: cold with the passages in a third order, where they moved")
    report.note("harmed: KL above .1 or word F1 against cold below .5; expected and true: after 10 % computed again")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
