"""What the rules of CacheBlend and EPIC cost and do to answers on CacheBlend's own MuSiQue inputs, beside ours.

    PYTHONPATH=src:bench python bench/peer_rules.py --data-dir DATA [--model FILE.gguf] [--prompts 30] [--quick]
    PYTHONPATH=src:bench python bench/peer_rules.py --device cuda --dtype bfloat16 --model FILE.gguf --tokens 3000

Every prompt is prepared by every rule on the same model. *Alone* is the setting of the papers: each passage is encoded
by itself at position 0 (CacheBlend, EPIC). *In a prompt* is what a server has: passages lie among others in three
earlier prompts. CacheBlend-15 computes the 15 % of the reused tokens again whose KV deviates most at layer 1; EPIC-16
the first 16 tokens of each passage. Noise floors: *rerun* is cold again in chunks, *other order* is a cold prefill of
the same passages in another order. The rules are our implementations of what the papers describe, not their code.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import _report  # first: it sets the number of threads
import torch
from _dial_runs import refuse_other_prompts
from _quality_cases import cases, choose_chat_form
from _quality_lab import Lab, Recipe, recipes
from _quality_tables import interval
from quality import default_model, describe_table, kept_rows, name_table

from semblend.engine.model.model import DecoderModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.gate.chosen_table import choose_table
from semblend.materialize.gate.thresholds import Thresholds

COLD = ("cold", "rerun", "other order")
ALONE = "passages encoded alone"
IN_PROMPT = "passages in three earlier prompts"
_DONORS = {"several": IN_PROMPT, "reordered": "passages in one earlier prompt, another order"}


def choose_recipes(thresholds: Thresholds) -> list[Recipe]:
    """Return the rules of the peers in their own setting, then all rules with donors as a server has them."""
    every = {recipe.name: recipe for recipe in recipes(thresholds)}
    alone = [replace(every[name], name=f"{name}, alone", alone=True) for name in ("relocate", "CacheBlend-15")]
    epic = replace(every["EPIC-16"], name="EPIC-16, alone")
    in_prompt = replace(every["EPIC-16"], alone=False)
    return [*alone, epic, every["relocate"], every["CacheBlend-15"], in_prompt, every["fast"], every["balanced"]]


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    begun = time.monotonic()
    model = DecoderModel.load(args.model, args.device, getattr(torch, args.dtype) if args.dtype else None)
    tokenizer = ModelTokenizer.load(args.model)
    thresholds = choose_table(args.name or Path(args.model).name).thresholds
    chosen = choose_recipes(thresholds)
    rows_path = Path(args.rows)
    rows = kept_rows([rows_path]) if rows_path.exists() else []
    name = f"{args.name or Path(args.model).name} {str(model.dtype).removeprefix('torch.')} on {args.device}"
    rows = [row for row in rows if row["model"] == name]
    finished = {row["case"] for row in rows}
    lab = Lab(model, tokenizer, chosen, longest=int(args.tokens * 2) + 400, other_order=True)
    encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special=False)  # noqa: E731
    made = list(cases(_report.data_dir(args), encode, scenarios=["several"], prompts=args.prompts, tokens=args.tokens,
                      seed=args.seed, form=choose_chat_form(encode)))  # fmt: skip
    refuse_other_prompts(rows_path, rows, made)
    with rows_path.open("a", encoding="utf-8") as out:
        for number, case in enumerate(made, start=1):
            if case.case_id in finished:
                continue
            if args.budget_s and time.monotonic() - begun > args.budget_s:
                _report.progress("the budget is spent; run again to go on")
                break
            found = [{"model": name, "table": name_table(thresholds), **row} for row in lab.run(case)]
            rows += found
            out.write("".join(json.dumps(row) + "\n" for row in found))
            out.flush()
            _report.progress(f"{number} of {args.prompts}: {len(case.tokens)} tokens")
    return rows


def show(report: _report.Report, rows: list[dict[str, object]]) -> None:
    lines = []
    for recipe in dict.fromkeys(str(row["recipe"]) for row in rows):
        own = [row for row in rows if row["recipe"] == recipe]
        donors = "-" if recipe in COLD else ALONE if recipe.endswith(", alone") else IN_PROMPT
        shown = ["{:.3g} [{:.2g}, {:.2g}]".format(*interval(own, value)) for value in ("kl", "f1", "task")]
        lines.append([recipe.removesuffix(", alone"), donors, len(own), interval(own, "flops")[0], *shown])
    order = {"-": 0, ALONE: 1, IN_PROMPT: 2}
    lines.sort(key=lambda line: order[str(line[1])])
    columns = ["rule", "donors", "prompts", "FLOPs of cold", "KL of the answer", "F1 against cold", "F1 against gold"]
    tokens = sorted(int(str(row["tokens"])) for row in rows if row["recipe"] == "cold")
    size = f"prompts of {tokens[0]} to {tokens[-1]} tokens (median {tokens[len(tokens) // 2]})"
    title = f"musique_s, {rows[0]['model']}, {size}"
    report.table(title, columns, lines)


def quote_larger_model(report: _report.Report) -> None:
    """Quote the rows of the same passages that bench/quality.py measured with a larger model on a GPU."""
    path = _report.REPO / "bench" / "results" / "quality_h200.json"
    wanted = ("rerun", "relocate", "CacheBlend-15", "CacheBlend-30", "EPIC-16", "fast", "balanced")
    lines = []
    for table in json.loads(path.read_text(encoding="utf-8"))["tables"]:
        scenario = table["title"].split(" ")[0]
        if scenario in ("several", "reordered") and table["columns"][0] == "recipe":
            found = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
            for name in wanted:
                row = found[name]
                donors = "-" if name in COLD else ALONE if name == "EPIC-16" else _DONORS[scenario]
                lines.append(
                    [name, donors, *(row[key] for key in ("n", "FLOPs", "KL answer", "F1 vs cold", "task F1"))]
                )
    columns = ["rule", "donors", "prompts", "FLOPs of cold", "KL of the answer", "F1 against cold", "F1 against gold"]
    title = "Another run: musique_s, Qwen2.5-Coder-1.5B, one H200, prompts of 5,900 tokens (bench/quality.py)"
    report.table(title, columns, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "peer_rules")
    parser.add_argument("--model", default=default_model(), help="GGUF file or folder")
    parser.add_argument("--name", default="", help="of the model, in rows and for its thresholds; default: the file's")
    parser.add_argument(
        "--prompts", type=int, default=30, metavar="N", help="prompts (default: 30); 0 quotes the larger model alone"
    )
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="half the tokens of all passages")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16; default: float32 on a CPU")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no prompt after this long; 0: no limit")
    parser.add_argument("--rows", default="bench/results/peer_rules.rows.jsonl", help="a second run goes on from it")
    parser.add_argument("--tables-only", nargs="+", default=None, metavar="JSONL", help="run nothing, read these")
    parser.add_argument("--measured-on", default="", help="the machine, where tables are printed on another")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.out, args.rows = 2, 160, "", "/dev/null"
    if not args.model and not args.tables_only:
        _report.fail("no model found", hint="pass --model, or `semblend models pull smollm2-135m`")
    torch.set_num_threads(1)
    report = _report.Report("peer_rules", args)
    rows = kept_rows(map(Path, args.tables_only)) if args.tables_only else run(args) if args.prompts else []
    if rows:
        show(report, rows)
        report.note(f"{rows[0]['model']}{describe_table(rows)}")
    if not args.tables_only:
        quote_larger_model(report)
    report.note("intervals: 95 %, bootstrap over documents; FLOPs count every pass, as a share of the cold prefill's")
    report.note("balanced falls back to a cold prefill where its gate sees too much damage, so its FLOPs may exceed 1")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
