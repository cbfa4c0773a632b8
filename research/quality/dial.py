"""The dial: what a number of nats buys and costs, by class of prompt, on documents that nothing was fitted on.

    python bench/dial.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data-dir DATA --prompts 12 --tokens 600
    python bench/dial.py --model qwen2.5-coder-1.5b.gguf --device cuda --dtype bfloat16 --prompts 60 --tokens 3000

Two phases. `ways`: half of the documents are prepared by every way alone (donor KV, 10, 20, 40 %), and the dial is
fitted on them, as `semblend calibrate` does it. `numbers`: the other half goes through the gate at every number, live,
beside cold, a cold rerun in chunks, cold with the passages in another order, today's balanced, and fast.
Against cold: FLOPs, divergence over the cold answer, F1, answers changed, task score. False safe: above 5 x the number.
Rows go to --rows as they come; a second run goes on from there; --shard i/n splits a run; --fit-rows names the rows of
all shards for the fit. --tables-only prints. Intervals: bootstrap over documents.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import _report  # first: it sets the number of threads
from _dial_runs import RowFile, add_run_arguments, load_model, read_rows, run_cases
from _dial_tables import WAYS, measures_of, show_dial
from _quality_cases import Case, cases, choose_chat_form
from _quality_lab import Lab, Recipe, recipes

from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.fit_dial import LEAST_TO_FIT, fit_dial
from semblend.materialize.gate.chosen_table import choose_table
from semblend.materialize.gate.dial import NUMBERS
from semblend.materialize.gate.thresholds import Thresholds

CLASSES = ("one_document", "edits", "code", "reordered", "several")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser, "dial")
    parser.add_argument("--prompts", type=int, default=12, help="of each class, half of them for the fit")
    parser.add_argument("--tokens", type=int, default=600, help="of a document, at most")
    parser.add_argument("--classes", nargs="+", default=list(CLASSES), choices=CLASSES)
    parser.add_argument("--phase", default="both", choices=("both", "ways", "numbers"))
    parser.add_argument("--fit-rows", nargs="+", default=None, metavar="JSONL", help="default: --rows")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens = 2, 300
    return args


def way_recipes() -> tuple[Recipe, ...]:
    """Every way alone, with the glance before it: thresholds that accept everything."""
    look = Thresholds(1e9, 1e9, 1e9, begin_prefill=1e9)
    chosen = [recipe for recipe in recipes(look) if recipe.name in WAYS]
    return tuple(replace(recipe, settings=replace(recipe.settings, thresholds=look)) for recipe in chosen)


def number_recipes(fitted: Thresholds, known: Thresholds) -> tuple[Recipe, ...]:
    """The gate at every number, what balanced was before the dial, and fast."""
    live = (Recipe(f"{number:g}", QualitySettings(mode=f"{number:g}", thresholds=fitted)) for number in NUMBERS)
    return (*live, Recipe("balanced before", QualitySettings(thresholds=known)),
            Recipe("fast", QualitySettings(mode="fast")))  # fmt: skip


def main() -> None:
    args = arguments()
    report = _report.Report("dial", args)
    rows = read_rows(args.tables_only) if args.tables_only else run(args)
    show_dial(report, rows)
    if args.measured_on:
        report.note(f"measured on {args.measured_on}")
    report.write(args.out)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    began = time.perf_counter()
    model, tokenizer, name = load_model(args)
    rows = RowFile(args.rows)
    encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special=False)  # noqa: E731
    made = list(
        cases(_report.data_dir(args), encode, scenarios=args.classes, prompts=args.prompts, tokens=args.tokens,
              seed=args.seed, form=choose_chat_form(encode))
    )  # fmt: skip
    longest = max(len(tokens) for case in made for tokens in (case.tokens, *case.donors)) + 64
    if args.phase in ("both", "ways"):
        run_phase(args, rows, [case for case in made if not case.held_out], began, name=name, phase="ways",
                  lab=Lab(model, tokenizer, way_recipes(), longest, other_order=True))  # fmt: skip
    if args.phase in ("both", "numbers"):
        seen = read_rows(args.fit_rows) if args.fit_rows else rows.rows
        known = [row for row in seen if (row["model"], row["phase"]) == (name, "ways")]
        dial = fit_dial([measure for _, measure in measures_of(known)])
        if not dial.glance:
            _report.fail(f"fewer than {LEAST_TO_FIT} prompts to fit the dial on", hint="raise --prompts")
        old = choose_table(args.name or args.model).thresholds
        fitted = Thresholds(old.kl_10, old.kl_20, old.kl_40, risk=old.risk, dial=dial)
        run_phase(args, rows, [case for case in made if case.held_out], began, name=name, phase="numbers",
                  lab=Lab(model, tokenizer, number_recipes(fitted, old), longest, other_order=True))  # fmt: skip
    return rows.rows


def run_phase(
    args: argparse.Namespace, rows: RowFile, chosen: Sequence[Case], began: float, *, name: str, phase: str, lab: Lab
) -> None:
    for _ in run_cases(chosen, rows, args, model=name, phase=phase, work=lab.run, began=began):
        pass


if __name__ == "__main__":
    main()
