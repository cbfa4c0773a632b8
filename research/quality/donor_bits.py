"""Claim: donors at 8 bits take half the memory, and cost answers nothing that can be told from 16 bits.

    semblend models pull smollm2-135m
    PYTHONPATH=src:bench python bench/donor_bits.py --data-dir DATA
    PYTHONPATH=src:bench python bench/donor_bits.py --data-dir DATA --model qwen2.5-0.5b-instruct --prompts 5

Every prompt is answered from the same donors at 16 and at 8 bits, in modes fast and balanced. Against cold: divergence
(mean KL a token over the greedy answer of cold, teacher forced) and how often the likeliest token agrees. The first
table compares ways to share scales: relative error of real keys and values, and divergence of mode fast.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _report  # first: it sets the number of threads
import torch
from _quality_cases import Case, cases
from _quality_lab import Lab, Recipe
from _report import Report, progress, spread
from quality import default_model

from semblend.engine.model.model import DecoderModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.chosen_table import choose_table
from semblend.materialize.gate.thresholds import Thresholds
from semblend.materialize.kv.eight_bits import SCALES, Scales, count_packed_bytes, pack, unpack_rows

Rows = Mapping[str, dict[str, Any]]
WAYS = {
    "both by dimension / 64 tokens": (Scales(64, True), Scales(64, True)),
    "keys by dimension / 64 tokens, values by token": (Scales(64, True), Scales(1, False)),
    "both by token": (Scales(1, False), Scales(1, False)),
    "both by head / 64 tokens": (Scales(64, False), Scales(64, False)),
}


@contextmanager
def share_scales(keys: Scales, values: Scales) -> Iterator[None]:
    """While it lasts, donors are packed with these scales."""
    kept = dict(SCALES)
    SCALES.update(k=keys, v=values)
    try:
        yield
    finally:
        SCALES.update(kept)


def make_recipes(thresholds: Thresholds) -> tuple[Recipe, ...]:
    """Modes fast and balanced at 16 and at 8 bits; the canary measures and refuses nothing."""
    fast = QualitySettings(mode="fast", canary_tolerance=1e9, deep_tolerance=1e9)
    balanced = QualitySettings(thresholds=thresholds, canary_tolerance=1e9, deep_tolerance=1e9)
    return tuple(
        Recipe(f"{name}, {width} bits", settings, bits=width)
        for name, settings in (("fast", fast), ("balanced", balanced))
        for width in (16, 8)
    )


def measure_error(lab: Lab, case: Case, keys: Scales, values: Scales) -> tuple[float, float]:
    """Largest over the layers of the relative error of real keys and values."""
    blocks: list[int] = []
    slots = lab._slots(len(case.donors[0]), blocks)
    lab._prefill(case.donors[0], slots)
    worst = [0.0, 0.0]
    for layer in range(lab.pool.layout.layers):
        for at, (x, scales) in enumerate(zip(lab.pool.layout.gather(layer, slots), (keys, values), strict=True)):
            numbers, scale = pack(x, scales)
            found = unpack_rows(numbers, scale, slice(0, len(x)), scales.group_tokens)
            worst[at] = max(worst[at], float((found - x.float()).norm() / x.float().norm()))
    lab.pool.free(blocks)
    return worst[0], worst[1]


def compare_ways(lab: Lab, chosen: Sequence[Case], report: Report, *, errors_only: bool) -> None:
    """The first table: how scales are shared, by error and by divergence."""
    rows = []
    for name, (keys, values) in WAYS.items():
        with share_scales(keys, values):
            shape = (1, 6400, 1, lab.model.spec.head_dim)
            share = count_packed_bytes(*shape) / (2 * torch.Size(shape).numel() * 2)
            errors = [measure_error(lab, case, keys, values) for case in chosen]
            ran = [] if errors_only else [row for case in chosen for row in lab.run(case)]
            found = [row for row in ran if row["recipe"] == "fast, 8 bits"]
        progress(f"{name}: {errors}")
        worst = [max(error[at] for error in errors) for at in range(2)]
        kl = statistics.mean(row["kl"] for row in found) if found else None
        rows.append([name, share, *worst, kl, max((row["canary"] for row in found), default=None)])
    report.table(
        "Ways to share scales",
        ["scales", "share of 16 bits", "error of keys", "error of values", "KL of fast", "canary, largest"],
        rows,
    )


def show_bits(rows: Sequence[dict[str, Any]], report: Report, seed: int) -> None:
    """The second table: 8 bits beside 16, mode by mode."""
    table = []
    for mode in ("fast", "balanced"):
        wide, packed = (
            {row["case"]: row for row in rows if row["recipe"] == f"{mode}, {bits} bits"} for bits in (16, 8)
        )
        low, high = bootstrap_difference(wide, packed, seed)
        for bits, found in ((16, wide), (8, packed)):
            table.append(
                [
                    f"{mode}, {bits} bits",
                    len(found),
                    statistics.mean(row["kl"] for row in found.values()),
                    spread([row["kl"] for row in found.values()])["p95"],
                    statistics.mean(row["top1"] for row in found.values()),
                    statistics.mean(row["f1"] for row in found.values()),
                    statistics.mean(row["flops"] for row in found.values()),
                    f"{low:+.4f} to {high:+.4f}" if bits == 8 else None,
                ]
            )
    report.table(
        "Answers from donors at 16 and at 8 bits, against cold",
        ["recipe", "n", "KL", "KL p95", "top-1 agrees", "F1", "FLOPs", "KL above 16 bits, 95 %"],
        table,
    )
    held = [row["canary"] for row in rows if row["recipe"].endswith("8 bits") and row["canary"] is not None]
    report.note(f"largest canary error at 8 bits: {max(held):.4f} over {len(held)} prompts")


def bootstrap_difference(wide: Rows, packed: Rows, seed: int) -> tuple[float, float]:
    """95 % interval of the mean difference of divergences, resampled by document."""
    clusters: dict[str, list[float]] = {}
    for case, row in packed.items():
        clusters.setdefault(row["cluster"], []).append(row["kl"] - wide[case]["kl"])
    chance, groups = random.Random(seed), list(clusters.values())
    means = []
    for _ in range(2000):
        drawn = [value for group in chance.choices(groups, k=len(groups)) for value in group]
        means.append(statistics.mean(drawn))
    means.sort()
    return means[50], means[1949]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="GGUF file or folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16; default: float32 on a CPU")
    parser.add_argument("--prompts", type=int, default=5, help="of each scenario (default: 5)")
    parser.add_argument("--tokens", type=int, default=600, help="of a document (default: 600)")
    parser.add_argument("--scenarios", nargs="+", default=["one_document", "edits", "several", "reordered"])
    parser.add_argument("--ways", type=int, default=2, help="prompts on which ways to share scales are compared")
    parser.add_argument("--errors-only", action="store_true", help="only the error of keys and values, no answers")
    parser.add_argument("--threads", type=int, default=1)
    _report.add_common_arguments(parser, "donor_bits")
    args = parser.parse_args()
    if not args.model:
        _report.fail("no model found", hint="pass --model, or `semblend models pull smollm2-135m`")
    if args.quick:
        args.prompts, args.tokens, args.ways = 1, 200, 1
    torch.set_num_threads(args.threads)
    report = Report("donor_bits", args)
    tokenizer = ModelTokenizer.load(args.model)
    model = DecoderModel.load(args.model, args.device, getattr(torch, args.dtype) if args.dtype else None)
    chosen = make_recipes(choose_table(Path(args.model).name).thresholds)
    made = list(
        cases(
            _report.data_dir(args),
            lambda text: tokenizer.encode(text, add_special=False),
            scenarios=args.scenarios,
            prompts=args.prompts,
            tokens=args.tokens,
            seed=args.seed,
        )
    )
    longest = max(len(tokens) for case in made for tokens in (case.tokens, *case.donors))
    if args.ways:
        fast = [recipe for recipe in chosen if recipe.name == "fast, 8 bits"]
        ways = Lab(model, tokenizer, fast, longest)
        compare_ways(ways, made[: args.ways], report, errors_only=args.errors_only)
    if not args.errors_only:
        lab, rows = Lab(model, tokenizer, chosen, longest), []
        for case in made:
            rows += lab.run(case)
            progress(f"{case.case_id}: {len(case.tokens)} tokens")
        show_bits(rows, report, args.seed)
        report.add("rows", [{k: v for k, v in row.items() if k not in ("answer", "signals")} for row in rows])
    report.note(
        f"{Path(args.model).name} {model.dtype}; {len(made)} prompts of {len({c.cluster for c in made})} documents"
    )
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
