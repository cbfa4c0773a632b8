"""Can a gate decide by what one pass shows? Replays the stored rows of every repair step, with the signals of each.

    python research/one_pass/replay_signals.py

Two families of signals. `two looks` compares a pass with the pass before it (how far the next-token distribution and the
KV of the prompt's end moved). `one look` reads what a single pass that computes new and repaired tokens together can see:
the attention that stays on donor tokens, how far the repaired tokens' KV was off, entropy, margin, and the deviation at
layer 1. For each family a ridge regression of log divergence, left out document by document; then the threshold that
lets no prompt above 0.1 nats through on the other half of the documents, and what it serves on this half.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

ROWS = Path(__file__).parents[2] / "bench" / "results" / "quality_repairs_h200_rows.jsonl.gz"
TWO = ("kl_last", "kl_tail", "kl_tail_max", "kl_tail_4", "tail_dev", "tail_dev_late", "last_dev")
ONE = ("exposure", "mass_repaired", "repaired_dev", "residual", "entropy", "margin", "stale_share")
LAYER_1 = ("dev_1", "dev_1_top", "dev_1_plain")
FAMILIES = {
    "two looks": TWO + ONE, "kl_last alone": ("kl_last",), "one look": ONE, "one look + layer 1": ONE + LAYER_1,
    "repaired_dev alone": ("repaired_dev",), "residual alone": ("residual",),
}  # fmt: skip
WRONG = 0.1


def read_rows(recipe: str) -> list[dict[str, Any]]:
    with gzip.open(ROWS, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["recipe"] == recipe and row["signals"]]


def features(rows: list[dict[str, Any]], names: tuple[str, ...]) -> np.ndarray:
    values = np.array([[row["signals"][name] for name in names] for row in rows])
    logs = np.log(np.clip(values, 1e-7, None))
    return (logs - logs.mean(0)) / (logs.std(0) + 1e-9)


def predict_left_out(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    found = np.zeros(len(y))
    for group in np.unique(groups):
        out = groups == group
        a, mean = np.column_stack([x[~out], np.ones((~out).sum())]), y[~out].mean()
        weights = np.linalg.solve(a.T @ a + np.diag([1.0] * x.shape[1] + [1e-9]), a.T @ (y[~out] - mean))
        found[out] = np.column_stack([x[out], np.ones(out.sum())]) @ weights + mean
    return found


def rank(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def main() -> None:
    print(f"{'stage':10} {'signals':20} {'n':>4} {'rho':>6} {'served':>7} {'wrong among served':>19}")
    for recipe in ("stage 10", "stage 20", "stage 40"):
        rows = read_rows(recipe)
        kl = np.array([row["kl"] for row in rows])
        groups = np.array([row["cluster"] for row in rows])
        half = np.array([hashlib.sha256(name.encode()).digest()[0] % 2 for name in groups], bool)
        for family, names in FAMILIES.items():
            if any(name not in row["signals"] for row in rows for name in names):
                continue
            guess = predict_left_out(features(rows, names), np.log(kl + 1e-5), groups)
            served = wrong = 0
            for mine in (half, ~half):
                bad = guess[~mine & (kl > WRONG)]
                limit = bad.min() if len(bad) else np.inf
                served += int((guess[mine] < limit).sum())
                wrong += int((kl[mine & (guess < limit)] > WRONG).sum())
            rho = np.corrcoef(rank(guess), rank(kl))[0, 1]
            print(f"{recipe:10} {family:20} {len(rows):4} {rho:6.3f} {served / len(rows):7.2f} {wrong:4} of {served}")
            if family in ("two looks", "one look", "one look + layer 1"):
                easy = np.array([row["scenario"] in ("one_document", "edits", "code", "summarization") for row in rows])
                print(
                    f"{'':10} {'  easy classes':20} {easy.sum():4} {np.corrcoef(rank(guess[easy]), rank(kl[easy]))[0, 1]:6.3f}"
                )


if __name__ == "__main__":
    main()
