"""Which edited histories does the default prefill, and why? Known from plans alone: no model runs.

    python research/quality/edit_refusals.py CASES.pkl.gz [TABLE]

CASES: as `bench/quality.py cases` writes them. TABLE: a model whose table the gate goes by. Before and after
`leave_out_repetitions`, and with one pass instead of two: the plan counts as another order; passes cost more than a
prefill of an engine that was not timed, or exceed `most_work`. Last: rows of `fast`, of two passes and of one, as a share of a prefix cache's.
"""

from __future__ import annotations

import gzip
import pickle
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import numpy as np
from lib.histories import EDITS
from lib.quality_cases import Case

from semblend import ReusePlan
from semblend.materialize.blend.passes import first_rows
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.gate import prefill_at_once
from semblend.materialize.gate.thresholds import choose_table
from semblend.plan.selection import leave_out_repetitions
from semblend.plan.times import PAYS_BELOW, ROW_PRICE
from semblend.quality import MODE_NATS
from semblend.session.sessions import count_work


def explain(case: Case, settings: QualitySettings, *, trim: bool, at_once: bool = False) -> tuple[str, tuple[float, float, float]]:
    plan = ReusePlan(case.spans, len(case.tokens), case.exact_tokens)
    plan = leave_out_repetitions(plan) if trim else plan
    spans = plan.spans
    cold, first = len(case.tokens) - case.exact_tokens, len(first_rows(len(case.tokens), case.exact_tokens, spans, settings))
    two, one = (count_work(plan, settings, 0.1, at_once=at_once).rows for at_once in (False, True))
    why = []
    if prefill_at_once(settings.thresholds, plan, MODE_NATS["balanced"]):
        why.append("another order")
    rows = one if at_once else two
    if ROW_PRICE * rows >= PAYS_BELOW * cold or rows > settings.most_work * (len(case.tokens) - spans[0].target_start):
        why.append("one pass" if at_once else "two passes")
    return " and ".join(why) or "begun", (first / cold, two / cold, one / cold)


def main(path: str, table: str = "qwen2.5-coder-1.5b") -> None:
    with gzip.open(path) as file:
        cases: list[Case] = [case for case in pickle.load(file) if case.spans]
    settings = QualitySettings(thresholds=replace(choose_table(table).thresholds))
    for how in EDITS:
        mine = [case for case in cases if case.scenario == how]
        for trim, at_once in ((False, False), (True, False), (True, True)) if mine else ():
            found = [explain(case, settings, trim=trim, at_once=at_once) for case in mine]
            shares = {why: round(count / len(mine), 3) for why, count in Counter(why for why, _ in found).most_common()}
            rows = np.mean([shares for _, shares in found], axis=0).round(2).tolist()
            print(f"{how:12} {len(mine):4} {'without repetitions' if trim else 'all spans':20} {'one pass' if at_once else 'two passes':10} {shares}  rows {rows}")


if __name__ == "__main__":
    main(*sys.argv[1:])
