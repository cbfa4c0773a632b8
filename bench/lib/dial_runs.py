"""What bench/dial.py and bench/arranged_answers.py share: rows that a second run goes on from, and loading a model."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lib.reporting as reporting
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.tokenizer import ModelTokenizer

Row = dict[str, Any]


def add_run_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The flags of a run over real weights."""
    reporting.add_common_arguments(parser, name)
    parser.add_argument("--model", default="", help="GGUF file or folder")
    parser.add_argument("--name", default="", help="of the model, in rows and tables; default: the file's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16; default: float32 on a CPU")
    parser.add_argument("--rows", default=f"bench/results/{name}.rows.jsonl", help="a second run goes on from them")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th prompt from the i-th on")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no prompt after this long; 0: no limit")
    parser.add_argument("--tables-only", nargs="+", default=None, metavar="JSONL", help="run nothing, read these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measured-on", default="", help="the machine, where tables are printed on another")


def load_model(args: argparse.Namespace) -> tuple[DecoderModel, ModelTokenizer, str]:
    """The model, its tokenizer, and its name with the type of its weights."""
    if not args.model:
        reporting.fail("no model given", hint="pass --model FILE")
    torch.set_num_threads(args.threads)
    model = DecoderModel.load(args.model, args.device, getattr(torch, args.dtype) if args.dtype else None)
    name = args.name or Path(args.model).stem
    return model, ModelTokenizer.load(args.model), f"{name} {str(model.dtype).removeprefix('torch.')}"


def read_rows(paths: Iterable[str | Path]) -> list[Row]:
    """The last row of each key; a line cut off by a kill is left out."""
    rows: dict[str, Row] = {}
    for path in map(Path, paths):
        for line in reporting.read_lines(path):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[json.dumps([row["model"], row["phase"], row["case"], row["recipe"]])] = row
    return list(rows.values())


def refuse_other_prompts(path: str | Path, rows: Sequence[Row], cases: Sequence[Any]) -> None:
    """End with an error where the rows of a case were made with another prompt: a table would mix the two.

    Rows of before 2026-11-17 hold no digest of their prompt; their number of tokens is compared.
    """
    digests, lengths = {case.case_id: case.digest for case in cases}, {case.case_id: case.tokens for case in cases}
    known: dict[str, set[str]] = {}
    for row in rows:
        if row["case"] in digests:
            of_length = digests[row["case"]] if row["tokens"] == len(lengths[row["case"]]) else ""
            known.setdefault(row["case"], set()).add(row.get("prompt", of_length))
    for case, found in known.items():
        if digests[case] not in found:
            reporting.fail(
                f"{path} holds {case} with another prompt",
                hint="name another file for the rows, or give the --tokens, --seed and data of the run that wrote it",
            )


class RowFile:
    """Rows on disk, those of one case together, so that a case is there or not."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not (self.path.read_bytes() or b"\n").endswith(b"\n"):
            with self.path.open("ab") as out:
                out.write(b"\n")  # a kill cut the last line off: let it spoil no other
        self.rows = read_rows([self.path])

    def finished(self, model: str, phase: str) -> set[str]:
        return {row["case"] for row in self.rows if (row["model"], row["phase"]) == (model, phase)}

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        with self.path.open("a", encoding="utf-8") as out:
            out.write("".join(json.dumps(row) + "\n" for row in rows))


def run_cases(
    cases: Iterable[Any], rows: RowFile, args: argparse.Namespace, *, model: str, phase: str,
    work: Callable[[Any], list[Row]], began: float,
) -> Iterator[str]:  # fmt: skip
    """Runs what is not there yet, within the budget; yields the name of each case when its rows are on disk."""
    first, shards = map(int, args.shard.split("/"))
    finished = rows.finished(model, phase)
    every = list(cases)
    mine = [row for row in rows.rows if (row["model"], row["phase"]) == (model, phase)]
    refuse_other_prompts(rows.path, mine, every)
    for number, case in enumerate(every):
        if number % shards != first or case.case_id in finished:
            continue
        if args.budget_s and time.perf_counter() - began > args.budget_s:
            reporting.progress("stopped by --budget-s; run again to go on")
            return
        rows.add([{"model": model, "phase": phase, **row} for row in work(case)])
        reporting.progress(f"{time.perf_counter() - began:6.0f} s  {phase}  {case.case_id}  {len(case.tokens)} tokens")
        yield case.case_id
