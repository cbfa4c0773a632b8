"""What follows from the times of a cell: paired ratios, miss overhead, break-even hit rate, distance from the floor."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import lib.reporting as reporting

Cell = Mapping[str, Any]
HITS = ("fast", "balanced")


def overhead(cell: Cell, measure: str = "ttft_ms") -> np.ndarray:
    """Share by which a miss took longer than the same prompt with reuse off, one number a round."""
    miss, cold = (np.array(cell["arms"][arm][measure]) for arm in ("miss", "cold"))
    return miss / cold - 1


def interval(samples: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(samples, (draws, len(samples))), axis=1)
    return float(np.percentile(medians, 2.5)), float(np.percentile(medians, 97.5))


def break_even(cold: float, miss: float, hit: float) -> float | None:
    """The share of requests that must hit, so that the mean TTFT is no worse than without reuse; None: no share helps.

    >>> break_even(cold=100.0, miss=102.0, hit=2.0)
    0.02
    >>> break_even(cold=100.0, miss=99.0, hit=20.0)
    0.0
    >>> break_even(cold=100.0, miss=102.0, hit=150.0) is None
    True
    """
    if miss <= cold:
        return 0.0
    return (miss - cold) / (miss - hit) if hit < cold else None


def floor_ms(cell: Cell) -> float:
    return float(cell["floor"]["copy_ms"] + cell["floor"]["gap_ms"])


def median(cell: Cell, arm: str, name: str = "ttft_ms") -> float:
    return statistics.median(value or 0 for value in cell["arms"][arm][name])


def times_faster(cell: Cell, arm: str, measure: str = "ttft_ms") -> float:
    """Median over rounds of cold / arm: both from one round, so that a slow minute slows both."""
    pairs = zip(cell["arms"]["cold"][measure], cell["arms"][arm][measure], strict=True)
    return statistics.median(cold / other for cold, other in pairs)


def arm_table(report: reporting.Report, title: str, cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        for arm, found in cell["arms"].items():
            ttft = found["ttft_ms"]
            rows.append(
                [cell["tokens"], cell["tier"], arm, len(ttft), median(cell, arm), min(ttft), max(ttft),
                 times_faster(cell, arm), times_faster(cell, arm, "cpu_ms"), median(cell, arm, "lookup_ms"),
                 median(cell, arm, "load_ms"),
                 *(int(median(cell, arm, f"{kind}_tokens")) for kind in ("exact", "reused", "recomputed", "prefill")),
                 sum(value > 0 for value in found["escalations"])]
            )  # fmt: skip
    report.table(
        title,
        ["tokens", "tier", "arm", "n", "p50 ms", "min", "max", "times faster", "in CPU time", "lookup ms", "load ms",
         "exact", "reused", "recomputed", "prefilled", "escalated"],
        rows,
    )  # fmt: skip
    report.note("in CPU time: the same ratio of CPU seconds; on a CPU it holds when other programs compute beside us")


def miss_table(report: reporting.Report, cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        first, whole = overhead(cell), overhead(cell, "wall_ms")
        low, high = interval(first)
        rows.append(
            [cell["tokens"], cell["tier"], len(first), median(cell, "cold"), median(cell, "miss"),
             100 * float(np.median(first)), 100 * low, 100 * high, median(cell, "miss", "lookup_ms"),
             100 * float(np.median(whole))]
        )  # fmt: skip
    report.table(
        "Miss overhead: a prompt nobody has seen, reuse on against reuse off, in pairs",
        ["tokens", "tier", "n", "off p50 ms", "on p50 ms", "TTFT overhead %", "95 % from", "to", "lookup ms",
         "with donor kept %"],
        rows,
    )  # fmt: skip
    report.note("with donor kept: until the engine takes the next request; a donor is copied after the first token")


def break_even_table(report: reporting.Report, cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        cold = median(cell, "cold")
        miss = cold * (1 + float(np.median(overhead(cell))))
        shares = [break_even(cold, miss, median(cell, arm)) for arm in HITS]
        rows.append([cell["tokens"], cell["tier"], *(None if share is None else 100 * share for share in shares)])
    report.table(
        "Break-even hit rate: the share of requests that must hit for the mean TTFT to be no worse than without reuse",
        ["tokens", "tier", "fast %", "balanced %"],
        rows,
    )


def floor_table(report: reporting.Report, cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        floor, least = cell["floor"], floor_ms(cell)
        apart = [value for arm in HITS for value in (median(cell, arm) - least, median(cell, arm) / least)]
        rows.append([cell["tokens"], cell["tier"], floor["bytes"] / 1e6, floor["gb_per_s"], floor["copy_ms"],
                     floor["gap_ms"], least, *apart])  # fmt: skip
    report.table(
        "Distance from the floor: donor bytes at the copy bandwidth of this run, and one pass over the gap tokens",
        ["tokens", "tier", "MB", "GB/s", "copy ms", "gap ms", "floor ms", "fast: ms above", "fast / floor",
         "balanced: ms above", "balanced / floor"],
        rows,
    )  # fmt: skip


def vllm_table(report: reporting.Report, cells: Sequence[Cell], theirs: Mapping[str, Any]) -> None:
    """Beside vLLM, measured in the same session on the same machine; see `lib/ttft_vllm.py`."""
    by_tokens = {one["tokens"]: one for one in theirs["cells"]}
    rows = []
    for cell in cells:
        one = by_tokens.get(cell["tokens"])
        if one is None or "error" in one:
            report.note(f"vLLM has no figure for {cell['tokens']} tokens: {one['error'] if one else 'not measured'}")
            continue
        cold, hit = statistics.median(one["cold_ms"]), statistics.median(one["exact_ms"])
        ours = [median(cell, arm) for arm in ("cold", *HITS)]
        rows.append([cell["tokens"], cell["tier"], len(one["cold_ms"]), cold, hit, *ours, ours[0] / cold,
                     cold / ours[1], cold / ours[2]])  # fmt: skip
    report.table(
        f"Beside vLLM {theirs.get('versions', {}).get('vllm', '')}: TTFT in ms, the same shape and lengths, eager",
        ["tokens", "tier", "n", "vLLM cold", "vLLM exact hit", "cold", "fast", "balanced", "cold / vLLM cold",
         "vLLM cold / fast", "vLLM cold / balanced"],
        rows,
    )  # fmt: skip
    report.add("vllm", theirs)
