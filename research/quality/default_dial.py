"""The dial of models that nobody measured: one fit on three models, each judged by a fit on the other two.

    python research/quality/default_dial.py [--write]

Nothing runs here: rows of research/quality/dial.py are read (one H200, bfloat16, 2026-11-16 and -17), in which every way
to reuse was measured alone on every prompt. `--write` puts the fit on all three, with the smallest margin at which no
model that the fit has not seen gets a false safe at any number, into `gate/default.json`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

from semblend.materialize.calibrate import MARGINS, Moved, PromptMeasure, WayMeasure, _fit, replay
from semblend.materialize.gate.thresholds import FALSE_SAFE_TIMES, DialTable, PassageOrder, RiskFeatures, Thresholds

HERE = Path(__file__).parent / "results"
DEFAULT = Path(__file__).parents[2] / "src/semblend/materialize/gate/default.json"
WAYS = {"fast": 0, "attended-10": 10, "product-20": 20, "product-40": 40}
ORDERS = {"reordered": PassageOrder.REORDERED, "several": PassageOrder.SEVERAL}
NUMBERS = (0.02, 0.05, 0.1, 0.3)


def read_measures() -> dict[str, list[PromptMeasure]]:
    """Prompts by model, those that were measured by every way."""
    ways: dict[tuple[str, str, str], dict[int, WayMeasure]] = {}
    for name in ("dial_h200_rows.jsonl.gz", "dial_tinyllama_h200_rows.jsonl.gz"):
        with gzip.open(HERE / name, "rt") as lines:
            for row in map(json.loads, lines):
                if (percent := WAYS.get(row["recipe"])) is None or (percent and not row["features"]):
                    continue
                features = RiskFeatures(**row["features"]) if percent else None
                moved = Moved(row["kl"], row["changed"])
                key = row["model"], row["case"], row["scenario"]
                ways.setdefault(key, {})[percent] = WayMeasure(percent, moved, row["kl_first"], row["work"] or 0.02, features)
    found: dict[str, list[PromptMeasure]] = {}
    for (model, _, scenario), mine in ways.items():
        if len(mine) == len(WAYS):
            order = ORDERS.get(scenario, PassageOrder.IN_ORDER)
            found.setdefault(model, []).append(PromptMeasure(order, tuple(mine[percent] for percent in WAYS.values())))
    return found


def judge_unseen(measures: dict[str, list[PromptMeasure]], margin: float) -> tuple[int, list[str]]:
    """False safes of all models, each judged by the others' fit, and a line for each model, number and order."""
    false_safes, lines = 0, []
    for model, mine in measures.items():
        table = _fit([one for other, some in measures.items() if other != model for one in some], 1.0).scale(margin)
        for number in NUMBERS:
            for order in PassageOrder:
                served = [replay(table, one, number) for one in mine if one.order is order]
                taken = [one for one in served if one.percent is not None]
                wrong = sum(one.nats > FALSE_SAFE_TIMES * number for one in taken)
                false_safes += wrong
                nats = sum(one.nats for one in taken) / max(1, len(taken))
                levels = dict(sorted(Counter("prefill" if one.percent is None else f"{one.percent} %" for one in served).items()))
                work = sum(one.work for one in served) / len(served)
                lines.append(f"{model:28} {number:5} {order:20} {levels!s:34} KL {nats:.4f}  false safes {wrong}  work {work:.2f}")
    return false_safes, lines


def fit_default_dial(measures: dict[str, list[PromptMeasure]]) -> tuple[DialTable, float, int]:
    """The fit on all models, the smallest margin without a false safe on unseen ones, and how many are left."""
    for margin in MARGINS:
        false_safes, lines = judge_unseen(measures, margin)
        print(f"margin {margin}: {false_safes} false safes on unseen models")
        if not false_safes:
            break
    print("\n".join(lines))
    return _fit([one for some in measures.values() for one in some], 1.0).scale(margin), margin, false_safes


def main() -> None:
    measures = read_measures()
    dial, margin, _ = fit_default_dial(measures)
    print({str(order): dict(row) for order, row in dial.means.items()}, dict(dial.repair), sep="\n")
    if "--write" in sys.argv:
        record = json.loads(DEFAULT.read_text())
        prompts = sum(map(len, measures.values()))
        note = (
            f"for models without a table. The dial: fitted on three models, margin {margin:g} "
            "(research/quality/default_dial.py, one H200; decisions/divergence-budget.md). Parts of a donor: the strictest "
            "thresholds of any model"
        )
        record["provenance"] |= {"date": "2026-11-18", "prompts": prompts, "note": note}
        for gone in ("begin_20", "begin_40", "begin_prefill"):
            record.pop(gone, None)
        record["dial"] = {
            "means": {str(order): {str(p): round(x, 6) for p, x in row.items()} for order, row in dial.means.items()},
            "repair": {str(p): [round(w, 4) for w in row] for p, row in dial.repair.items()},
        }
        DEFAULT.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        Thresholds.read(DEFAULT)


if __name__ == "__main__":
    main()
