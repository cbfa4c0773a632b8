"""What reuse does to answers: recipes against a cold prefill, on a real model and real texts.

    python bench/quality.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data-dir DATA --prompts 4 --tokens 700
    python bench/quality.py --model qwen2.5-coder-1.5b.gguf --device cuda --dtype bfloat16 --prompts 110 --tokens 4000
    python bench/quality.py cases --model MODEL.gguf --data-dir DATA --scenarios cleared dropped --cases FILE
    python bench/quality.py --model qwen2.5-coder-1.5b.gguf --cases FILE --device cuda --dtype bfloat16 --budget-s 500

Every case is prepared by every recipe from the same donors. Against cold: divergence of the first token and of the
whole answer (cold's own greedy answer, teacher forced), agreement of the most likely token, word F1 of the greedy
answers (edit similarity of the next line for code), perplexity of the reference answer, whether a planted code is
answered. Against the reference: the same score. `rerun` is cold again, prefilled in chunks: what rounding alone does;
with --other-order, `other order` is cold with the passages that moved in a third order: what two retrievals do. Of
edited histories `other wording` is cold behind the same edit in other words, `FLOPs` leaves out what a prefix cache
holds, and `balanced` begins what an engine would begin; `cases` writes their tokens for a machine without the data.
Mode balanced goes by the table of the model's name (--name, or the file's), or by the one for unknown models: the notes
say which.
FLOPs are a share of the cold prefill's, all passes and the observation counted.
Rows go to --jsonl as they come; a second run skips the cases that are there, and refuses a file with other prompts;
--shard 2/8 takes every eighth case and --tables-only reads the rows of several runs. Intervals: bootstrap over
documents.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lib.reporting as reporting  # first: it sets the number of threads
import torch
from lib.quality_cases import SCENARIOS, Case, cases, choose_chat_form, refuse_other_prompts
from lib.quality_lab import Lab, recipes
from lib.quality_tables import show

from semblend.engine.model.model import DecoderModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.gate.thresholds import DEFAULT, Thresholds, choose_table


def default_model() -> str:
    folder = Path.home() / ".cache" / "semblend" / "models"
    found = sorted(folder.rglob("*[sS]mol[lL][mM]2*.gguf"))
    return str(found[0]) if found else ""


def kept_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The last row of every case, recipe and model; a line cut off by a kill is left out."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in paths:
        for line in reporting.read_lines(path):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[row["model"], row["case"], row["recipe"]] = row
    return list(rows.values())


def name_table(thresholds: Thresholds) -> str:
    """Which table mode balanced goes by, for the rows."""
    return "unknown models" if thresholds is DEFAULT else "the model"


def describe_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A half sentence for a note; nothing for rows that do not say which table it was."""
    tables = sorted({str(row["table"]) for row in rows if "table" in row})
    return f"; balanced by the table of {', '.join(tables)}" if tables else ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reporting.add_common_arguments(parser, "quality")
    parser.add_argument("do", nargs="?", choices=("cases", "measure"), default="measure")
    parser.add_argument("--model", default=default_model(), help="GGUF file or folder")
    parser.add_argument("--cases", default="", metavar="FILE", help="of tokens: `cases` writes it, `measure` reads it")
    parser.add_argument("--answer-tokens", type=int, default=0, help="of every answer; default: as the case says")
    parser.add_argument("--name", default="", help="of the model, in rows and for its thresholds; default: the file's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16; default: float32 on a CPU")
    parser.add_argument("--prompts", type=int, default=20, help="cases of each scenario")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a document, at most")
    parser.add_argument("--lengths", type=int, nargs="+", default=(), help="of edited histories; default: --tokens")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--recipes", nargs="+", default=None, help="names; default: all")
    parser.add_argument("--other-order", action="store_true", help="moved passages also cold in a third order")
    parser.add_argument("--keep-prefix", action="store_true", help="compute what prompts begin alike with only once")
    parser.add_argument("--half", default="both", choices=("both", "tuning", "held-out"), help="which documents")
    parser.add_argument("--jsonl", default="bench/results/quality.jsonl", help="rows; a second run goes on from them")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th case from the i-th on")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no case after this long; 0: no limit")
    parser.add_argument("--tables-only", nargs="+", default=None, metavar="JSONL", help="run nothing, read these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measured-on", default="", help="the machine, where tables are printed on another")
    args = parser.parse_args()
    if not args.model and not args.tables_only:
        reporting.fail("no model found", hint="pass --model, or `semblend models pull smollm2-135m`")
    torch.set_num_threads(args.threads)
    return args


def make_cases(args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[Case]:
    encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special=False)  # noqa: E731
    return list(cases(
        reporting.data_dir(args), encode, scenarios=args.scenarios, prompts=args.prompts, tokens=args.tokens,
        seed=args.seed, form=choose_chat_form(encode), lengths=args.lengths,
    ))  # fmt: skip


def read_cases(path: str) -> list[Case]:
    with gzip.open(path) as file:
        found: list[Case] = pickle.load(file)
    return found


def fit_answers(made: list[Case], tokens: int) -> list[Case]:
    return [replace(case, answer_tokens=tokens) for case in made] if tokens else made


def run(args: argparse.Namespace, report: reporting.Report) -> list[dict[str, Any]]:
    begun = time.perf_counter()
    model = DecoderModel.load(args.model, args.device, getattr(torch, args.dtype) if args.dtype else None)
    tokenizer = ModelTokenizer.load(args.model)
    thresholds = choose_table(args.name or Path(args.model).name).thresholds
    every = recipes(thresholds)
    chosen = [recipe for recipe in every if recipe.name in (args.recipes or [r.name for r in every if not r.extra])]
    name, path = f"{args.name or Path(args.model).name} {model.dtype}", Path(args.jsonl)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        path.write_bytes(path.read_bytes() + b"\n")  # a kill cut the last line off: let it spoil no other
    rows = [row for row in kept_rows([path]) if row["model"] == name]
    finished = {row["case"] for row in rows}  # a case's rows are written together
    made = fit_answers(read_cases(args.cases) if args.cases else make_cases(args, tokenizer), args.answer_tokens)
    longest = max((len(tokens) for case in made for tokens in (case.tokens, case.other, *case.donors)), default=0)
    lab = Lab(model, tokenizer, chosen, longest + 100, other_order=args.other_order, keeps_prefix=args.keep_prefix)
    first, shards = map(int, args.shard.split("/"))
    refuse_other_prompts(path, rows, made)
    with path.open("a", encoding="utf-8") as out:
        for number, case in enumerate(made):
            wanted = args.half == "both" or (args.half == "held-out") == case.held_out
            if number % shards != first or case.case_id in finished or not wanted:
                continue
            if args.budget_s and time.perf_counter() - begun > args.budget_s:
                report.note("stopped by --budget-s; run again to go on")
                break
            found = [{"model": name, "table": name_table(thresholds), **row} for row in lab.run(case)]
            rows += found
            out.write("".join(json.dumps(row) + "\n" for row in found))
            out.flush()
            reporting.progress(f"{time.perf_counter() - begun:6.0f} s  {case.case_id}  {len(case.tokens)} tokens")
    return rows


def main() -> None:
    args = arguments()
    if args.quick:
        args.prompts, args.tokens = 1, 300
    if args.do == "cases":
        made = make_cases(args, ModelTokenizer.load(args.model))
        with gzip.open(args.cases, "wb") as file:
            pickle.dump(made, file)
        reporting.progress(f"{len(made)} cases in {args.cases}")
        return
    report = reporting.Report("quality", args)
    rows = kept_rows(map(Path, args.tables_only)) if args.tables_only else run(args, report)
    show(report, rows)
    for name in sorted({row["model"] for row in rows}):
        mine = [row for row in rows if row["model"] == name]
        report.note(f"{name}; {len({row['case'] for row in mine})} prompts{describe_table(mine)}")
    report.write(args.out)


if __name__ == "__main__":
    main()
