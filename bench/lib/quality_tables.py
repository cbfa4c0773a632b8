"""Tables of the quality benchmark, from its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import lib.reporting as reporting
from lib.histories import EDITS

Row = dict[str, Any]
MIN_PROMPTS = 20
"""Of a data set, for lines of its own."""
HARM_KL, HARM_F1 = 0.1, 0.5
"""A request that the gate let pass with more divergence, or less agreement with cold, is a false safe."""


def interval(rows: Sequence[Row], value: str, draws: int = 1000) -> tuple[float, float, float]:
    """Mean and 95 % interval, documents drawn with replacement."""
    clusters: dict[str, list[float]] = {}
    for row in rows:
        clusters.setdefault(row["cluster"], []).append(row[value])
    sums = np.array([(sum(kept), len(kept)) for kept in clusters.values()])
    rng = np.random.default_rng(0)
    drawn = sums[rng.integers(0, len(sums), (draws, len(sums)))].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return float(sums[:, 0].sum() / sums[:, 1].sum()), float(low), float(high)


def _ranged(rows: Sequence[Row], value: str) -> str:
    return "{:.3g} [{:.2g}, {:.2g}]".format(*interval(rows, value))


def _names(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _is_history(row: Row) -> bool:
    return row["scenario"].partition("_x")[0] in EDITS


def show(report: reporting.Report, rows: Sequence[Row]) -> None:
    _edited_histories(report, [row for row in rows if _is_history(row)])
    rows = [row for row in rows if not _is_history(row)]
    for scenario in _names(rows, "scenario"):
        _by_recipe(report, scenario, [row for row in rows if row["scenario"] == scenario])
    _by_dataset(report, rows)
    _gate(report, rows)
    _signals(report, rows)


def _by_recipe(report: reporting.Report, scenario: str, rows: Sequence[Row]) -> None:
    lines = []
    for recipe in _names(rows, "recipe"):
        kept = [row for row in rows if row["recipe"] == recipe]
        facts = [row["fact"] for row in kept if row["fact"] is not None]
        wrong = [row["donor_fact"] for row in kept if row["donor_fact"] is not None]
        lines.append([
            recipe, len(kept), interval(kept, "flops")[0], _ranged(kept, "kl_first"), _ranged(kept, "kl"),
            interval(kept, "top1")[0], _ranged(kept, "f1"), _ranged(kept, "task"),
            math.exp(interval(kept, "ppl_log")[0]), f"{sum(facts)}/{len(facts)}" if facts else "-",
            f"{sum(wrong)}/{len(wrong)}" if wrong else "-", false_safe(kept),
        ])  # fmt: skip
    columns = ["recipe", "n", "FLOPs", "KL first", "KL answer", "top-1", "F1 vs cold", "task F1", "PPL ratio", "facts",
               "donor's fact", "harmed"]  # fmt: skip
    report.table(f"{scenario} ({len(_names(rows, 'cluster'))} documents)", columns, lines)


def _edited_histories(report: reporting.Report, rows: Sequence[Row]) -> None:
    """By kind of edit, then all; runs are drawn with replacement."""
    lines = []
    for kind in [*_names(rows, "scenario"), *(["all"] if rows else [])]:
        mine = [row for row in rows if kind in (row["scenario"], "all")]
        for recipe in _names(mine, "recipe"):
            kept = [row for row in mine if row["recipe"] == recipe]
            calls = [row for row in kept if row["same_call"] is not None]
            flops, alone = interval(kept, "flops")[0], interval(kept, "prefix_flops")[0]
            is_floor = kept[0]["flops"] == 1.0 and recipe not in ("balanced", "fast")
            served = float(np.mean([row["decision"] in ("accepted", "fast") for row in kept]))
            lines.append([
                kind, recipe, len(kept), len(_names(kept, "cluster")), "-" if is_floor else served, flops,
                "-" if is_floor else flops / alone, _ranged(kept, "kl"),
                float(np.mean([row["kl"] > HARM_KL for row in kept])),
                _ranged(kept, "f1"), f"{interval(calls, 'same_call')[0]:.3f} of {len(calls)}" if calls else "-",
            ])  # fmt: skip
    if lines:
        columns = ["edit", "recipe", "n", "runs", "served", "FLOPs", "of a prefix cache's", "KL answer",
                   f"KL > {HARM_KL}", "F1 vs cold", "same tool call"]  # fmt: skip
        report.table(
            "Edited histories (FLOPs: of a full prefill, and of what a prefix cache alone computes)", columns, lines
        )
    sizes = [[name, len({r["case"] for r in rows if r["dataset"] == name}), *np.quantile(lengths, (0, 0.5, 1)).tolist()]
             for name in _names(rows, "dataset")
             if (lengths := [r["tokens"] for r in rows if r["dataset"] == name])]  # fmt: skip
    if sizes:
        report.table("Edited histories: prompts", ["data set", "n", "tokens, least", "median", "most"], sizes)


def false_safe(rows: Sequence[Row]) -> float:
    """Share of prompts that differ from cold by more than anybody should accept unseen."""
    return float(np.mean([row["kl"] > HARM_KL or row["f1"] < HARM_F1 for row in rows]))


def _by_dataset(report: reporting.Report, rows: Sequence[Row]) -> None:
    lines = []
    for dataset in _names(rows, "dataset"):
        if len({row["case"] for row in rows if row["dataset"] == dataset}) < MIN_PROMPTS:
            continue
        for recipe in ("cold", "rerun", "fast", "attended-10", "balanced"):
            kept = [row for row in rows if (row["dataset"], row["recipe"]) == (dataset, recipe)]
            if kept:
                flops = interval(kept, "flops")[0]
                lines.append([
                    dataset, recipe, len(kept), len(_names(kept, "cluster")), np.mean([r["tokens"] for r in kept]),
                    1 / flops, math.exp(interval(kept, "ppl_log")[0]), _ranged(kept, "f1"), _ranged(kept, "task"),
                    1 - false_safe(kept),
                ])  # fmt: skip
    columns = ["data set", "recipe", "prompts", "documents", "tokens", "times fewer FLOPs", "PPL ratio", "F1 vs cold",
               "task F1", "faithful"]  # fmt: skip
    report.table("By data set (faithful: KL <= .1 and F1 against cold >= .5)", columns, lines)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation, ties sharing their mean rank."""
    ranks = []
    for values in (np.asarray(a), np.asarray(b)):
        _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[index])
    return float(np.corrcoef(*ranks)[0, 1])


def _gate(report: reporting.Report, rows: Sequence[Row]) -> None:
    """Does the expected divergence rank the true one, and what of what `balanced` served should it not have served."""
    lines = []
    for half, of_half in (("tuning", False), ("held out", True)):
        mine = [row for row in rows if row["held_out"] == of_half]
        for recipe in ("attended-10", "product-20", "product-40"):
            kept = [row for row in mine if row["recipe"] == recipe and row["risk"] is not None]
            if len(kept) > 3:
                risk = [row["risk"] for row in kept]
                lines.append([half, recipe, len(kept), spearman(risk, [row["kl_first"] for row in kept]),
                              spearman(risk, [row["kl"] for row in kept])])  # fmt: skip
    report.table("Gate: Spearman of the expected divergence against the true one",
                 ["documents", "after", "n", "first token", "whole answer"], lines)  # fmt: skip
    lines = []
    for half, of_half in (("tuning", False), ("held out", True)):
        mine = [row for row in rows if row["held_out"] == of_half]
        for scenario in [*_names(mine, "scenario"), "all"]:
            kept = [row for row in mine if row["recipe"] == "balanced" and scenario in (row["scenario"], "all")]
            served = [row for row in kept if row["decision"] == "accepted"]
            again = {row["case"]: row for row in mine if row["recipe"] == "rerun"}
            if served:
                lines.append([
                    half, scenario, len(kept), len(served), interval(kept, "flops")[0], interval(kept, "f1")[0],
                    float(np.mean([row["kl"] > HARM_KL for row in served])), false_safe(served),
                    false_safe([again[row["case"]] for row in served if row["case"] in again]),
                ])  # fmt: skip
    columns = ["documents", "setting", "n", "served", "FLOPs of all", "F1 vs cold of all", "served with KL > .1",
               "false safe", "the same of a rerun"]  # fmt: skip
    report.table("Gate: what `balanced` let pass (false safe: KL > .1 or F1 against cold < .5)", columns, lines)


def _signals(report: reporting.Report, rows: Sequence[Row]) -> None:
    """How well each signal, after each step, ranks the damage of what would be served."""
    lines = []
    for recipe in _names([row for row in rows if row.get("signals")], "recipe"):
        kept = [row for row in rows if row["recipe"] == recipe and row.get("signals")]
        for signal in kept[0]["signals"] if len(kept) > 3 else ():
            seen = [row["signals"][signal] for row in kept]
            lines.append([
                recipe, len(kept), signal, spearman(seen, [row["kl_first"] for row in kept]),
                spearman(seen, [row["kl"] for row in kept]), spearman(seen, [-row["f1"] for row in kept]),
            ])  # fmt: skip
    if not lines:
        return
    columns = ["after", "n", "signal", "rank of first-token KL", "of answer KL", "of 1 - F1"]
    report.table("Signals: Spearman against the true damage", columns, lines)
