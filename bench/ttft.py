"""Claim: a document under another instruction starts answering many times sooner than cold, in the embedded engine.

    python bench/ttft.py --model smollm2-135m --threads 2                  # real weights on the CPU
    python bench/ttft.py --device cuda --model shape:qwen2.5-7b --tier device host --rounds 15
    python bench/ttft.py ... --vllm-json vllm.json                         # beside what bench/lib/ttft_vllm.py measured

Each cell (a length, a donor tier) has its own engine, pool and donors. In each round a donor prompt is answered
(instruction A, the document), then every arm once, in random order:

    cold       a document nobody has seen, reuse off          fast, balanced   instruction B, the document, a question
    miss       the same prompt, reuse on: lookup, no donor    exact            the cold prompt and one token more

TTFT is the engine's own, from submission to the first token, taken from the receipt, lookup included. Random weights
show speed, not quality: their gate says nothing, so `balanced` is a fixed 10 % repair with a shape. Text is random
tokens, or real with --text. Finished cells are kept in a file beside --out, and a second run goes on where the first
one ended; --again measures all of them anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lib.reporting as reporting
import torch
from lib import ttft_cells
from lib import ttft_tables as tables

LENGTHS = {"cpu": [1024, 4096], "cuda": [4096, 8192, 12288, 16384, 24576, 32768]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = "|".join(ttft_cells.SHAPES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="smollm2-135m", help=f"a model name or path, or shape:{shapes}")
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=None, help="rounds before (default: 1, on a GPU 2)")
    parser.add_argument("--tier", nargs="+", default=None, choices=["device", "host"], help="where donor KV lies")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--text", action="store_true", help="real documents instead of random tokens; needs a model")
    parser.add_argument("--data-dir", default=None, help=f"with --text (default: ${reporting.DATA_VARIABLE})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm-json", default=None, help="what bench/lib/ttft_vllm.py wrote, to print beside")
    parser.add_argument("--again", action="store_true", help="measure cells anew that an earlier run has finished")
    parser.add_argument("--finished-only", action="store_true", help="measure nothing, show the cells that are there")
    parser.add_argument("--out", default="bench/results/ttft.json")
    parser.add_argument("--measured-on", default="", help="the machine, where tables are printed on another")
    args = parser.parse_args()
    args.tier = args.tier or (["device"] if args.device == "cuda" else ["host"])
    args.lengths = args.lengths or LENGTHS[args.device]
    args.warm_up = args.warm_up if args.warm_up is not None else 2 if args.device == "cuda" else 1
    if args.device == "cpu" and "device" in args.tier:
        reporting.fail("a CPU has no device tier", hint="--tier host")
    if args.text and args.model.startswith("shape:"):
        reporting.fail("a shape has no tokenizer", hint="name a model with --text, or leave it out")
    return args


def key_of(args: argparse.Namespace, length: int, tier: str) -> dict[str, Any]:
    """What makes a finished cell the one that is asked for."""
    names = ("model", "device", "rounds", "warm_up", "threads", "text", "seed")
    return {"tokens": length, "tier": tier, **{name: getattr(args, name) for name in names}}


def finished(path: Path) -> list[dict[str, Any]]:
    """Lines of an earlier run; one that was cut off by its end is not finished."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            reporting.progress(f"{path.name}: a cell that was not finished is left out")
    return found


def keep(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def measured(args: argparse.Namespace, cells_file: Path) -> list[dict[str, Any]]:
    """Every cell that is asked for, from the file or from the engine."""
    if args.again:
        cells_file.unlink(missing_ok=True)
    known = finished(cells_file)
    model = None
    found = []
    for length in args.lengths:
        for tier in args.tier:
            key = key_of(args, length, tier)
            cell = next((one["cell"] for one in known if one["key"] == key), None)
            if cell is None and args.finished_only:
                continue
            if cell is None:
                model = model or ttft_cells.load(args.model, args.device)
                cell = measure(args, model, length, tier)
                keep(cells_file, {"key": key, "cell": cell})
            reporting.progress(f"{length} tokens, {tier}: fast {tables.times_faster(cell, 'fast'):.1f} times faster, "
                             f"balanced {tables.times_faster(cell, 'balanced'):.1f}")  # fmt: skip
            found.append(cell)
    return found


def measure(args: argparse.Namespace, model: Any, length: int, tier: str) -> dict[str, Any]:
    if args.text:
        draw = ttft_cells.real_text(args.model, reporting.data_dir(args))
    else:
        draw = ttft_cells.random_tokens(model.spec.vocab, args.seed)
    cell = ttft_cells.Cell(model, draw, length, tier, gated=not args.model.startswith("shape:"))
    found = cell.measure(args.rounds, args.warm_up) | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    del cell
    if args.device == "cuda":
        torch.cuda.empty_cache()  # the next cell's pools are its own
    return found


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)  # reporting holds everything else to one
    report = reporting.Report("ttft", args)
    out = Path(args.out)
    cells = measured(args, out.with_suffix(".cells.jsonl"))
    where = f"{args.device}, {args.threads} threads" if args.device == "cpu" else args.device
    text = "real text" if args.text else "random tokens"
    tables.arm_table(report, f"TTFT, {args.model} on {where}, {text}", cells)
    tables.miss_table(report, cells)
    tables.break_even_table(report, cells)
    tables.floor_table(report, cells)
    if args.vllm_json:
        tables.vllm_table(report, cells, json.loads(Path(args.vllm_json).read_text(encoding="utf-8")))
    report.add("cells", cells)
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
