"""Tables of `one_pass.py`'s rows: the divergence and the work of every rule, and what a gate sees inside one pass.

python research/one_pass/tables.py
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

ROWS = Path(__file__).parent / "results" / "rows.jsonl.gz"
GROUPS = {
    "documents": ("one_document", "edits", "code"),
    "edited histories": ("cleared", "dropped", "handoff"),
    "passages": ("several", "reordered"),
}
WRONG = 0.1


def read_rows() -> list[dict[str, Any]]:
    with gzip.open(ROWS, "rt") as lines:
        return [json.loads(line) for line in lines]


def show_rules(rows: list[dict[str, Any]]) -> None:
    for group, kinds in GROUPS.items():
        mine = [row for row in rows if row["scenario"] in kinds]
        print(f"\n{group}: {len({row['case'] for row in mine})} prompts ({', '.join(kinds)})")
        print(
            f"  {'rule':26} {'%':>3} {'FLOPs':>6} {'KL mean':>8} {'median':>8} {'p90':>7} {'> 0.1':>6} {'top-1':>6}  against attended"
        )
        today = {(r["case"], r["percent"]): r["kl"] for r in mine if r["rule"] == "attended"}
        for percent in (0, 10, 20):
            lines = []
            for rule in dict.fromkeys(row["rule"] for row in mine if row["percent"] == percent):
                some = [row for row in mine if row["rule"] == rule and row["percent"] == percent]
                kl = np.array([row["kl"] for row in some])
                ratio = ""
                if percent and rule != "attended":
                    pairs = np.array([(row["kl"], today[row["case"], percent]) for row in some])
                    ratio = interval(pairs, [row["cluster"] for row in some])
                lines.append((kl.mean(), f"  {rule:26} {percent:3} {np.mean([r['flops'] for r in some]):6.3f} {kl.mean():8.4f} "
                              f"{np.median(kl):8.4f} {np.percentile(kl, 90):7.3f} {(kl > WRONG).mean():6.3f} "
                              f"{np.mean([r['top1'] for r in some]):6.3f}  {ratio}"))  # fmt: skip
            print("\n".join(line for _, line in sorted(lines)))


def interval(pairs: np.ndarray, clusters: list[str]) -> str:
    """The ratio of mean divergences, with a bootstrap over documents."""
    rng, names = np.random.default_rng(1), sorted(set(clusters))
    by = {name: pairs[[i for i, one in enumerate(clusters) if one == name]] for name in names}
    drawn = []
    for _ in range(500):
        some = np.concatenate([by[names[i]] for i in rng.integers(0, len(names), len(names))])
        drawn.append(some[:, 0].mean() / some[:, 1].mean())
    low, high = np.percentile(drawn, (2.5, 97.5))
    return f"{pairs[:, 0].mean() / pairs[:, 1].mean():5.2f} [{low:.2f}, {high:.2f}]"


def rank(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def predict(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    found, x = np.zeros(len(y)), (x - x.mean(0)) / (x.std(0) + 1e-9)
    for group in np.unique(groups):
        out = groups == group
        a = np.column_stack([x[~out], np.ones((~out).sum())])
        weights = np.linalg.solve(a.T @ a + np.diag([1.0] * x.shape[1] + [1e-9]), a.T @ y[~out])
        found[out] = np.column_stack([x[out], np.ones(out.sum())]) @ weights
    return found


def show_signals(rows: list[dict[str, Any]]) -> None:
    families = {
        "two looks: kl_last": ["kl_last"],
        "two looks: all": ["kl_last", "entropy", "margin", "repaired_dev@28", "exposure@28"],
    }
    for depth in (2, 4, 8, 14, 28):
        families[f"one look, {depth} of 28 layers"] = [
            f"{name}@{depth}" for name in ("repaired_dev", "last_dev", "exposure", "repaired_mass")
        ]
    families["one look, whole + entropy"] = [*families["one look, 28 of 28 layers"], "entropy", "margin"]
    for rule in ("attended", "attended@8", "donor_all", "donor_all x attended@4", "deviation"):
        some = [r for r in rows if r["rule"] == rule and r["percent"] == 10 and r["signals"]]
        kl, groups = np.array([r["kl"] for r in some]), np.array([r["cluster"] for r in some])
        half = np.array([hashlib.sha256(name.encode()).digest()[0] % 2 for name in groups], bool)
        print(
            f"\nsignals in a pass that repairs 10 % by {rule!r}: {len(some)} prompts, {(kl > WRONG).sum()} above {WRONG}"
        )
        print(f"  {'signals':32} {'rho':>6}  served without the other half's worst; wrong among them")
        for name, names in families.items():
            x = np.log(np.clip([[r["signals"][n] for n in names] for r in some], 1e-7, None))
            guess = predict(x, np.log(kl + 1e-5), groups)
            served = wrong = 0
            for mine in (half, ~half):
                bad = guess[~mine & (kl > WRONG)]
                limit = bad.min() if len(bad) else np.inf
                served += int((guess[mine] < limit).sum())
                wrong += int((kl[mine & (guess < limit)] > WRONG).sum())
            print(
                f"  {name:32} {np.corrcoef(rank(guess), rank(kl))[0, 1]:6.3f}  {served / len(some):.2f}; {wrong} of {served}"
            )


if __name__ == "__main__":
    everything = read_rows()
    show_rules(everything)
    show_signals(everything)
