"""vLLM under load: what long prompts that share a document do to everybody else's decoding, with reuse and without.

32 requests decode. Prompts of 24,000 shared tokens arrive: one a second, four a second, or eight at once. Measured are
the time to first token of those prompts and the time between two tokens (ITL) of the requests that decode meanwhile.

    python bench/vllm_load.py --measured-on "one H200, vLLM 0.26.0" --out bench/results/vllm_load_h200.json
    python bench/vllm_load.py --finished-only --rows rows.jsonl ...    # only print what a file of rows holds
    python bench/vllm_load.py --shape tiny --document 600 ...          # a small run that shows that it works
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOADS = ("one a second", "four a second", "eight at once")
KINDS = {
    "stock": "stock vLLM",
    "fast": "fast",
    "balanced": "balanced",
    "balanced-host": "balanced, donors in host memory",
}
COLUMNS = (
    "load", "engine", "TTFT p50 ms", "TTFT max ms", "ITL p50 ms", "ITL p99 ms", "ITL max ms", "decode tokens/s",
    "arrivals",
)  # fmt: skip
FIELDS = ("ttft_p50", "ttft_max", "itl_p50", "itl_p99", "itl_max", "decode_tok_s", "n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The measurements of a load in a file of rows; other lines are skipped."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for row in rows if row.get("what") == "load" and row["name"] in LOADS]


def tabulate(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """One line for each load and engine; where one was measured again, the last measurement counts."""
    found = {(row["name"], row["kind"]): row for row in rows}
    return [
        [load, words, *(found[load, kind][field] for field in FIELDS)]
        for load in LOADS
        for kind, words in KINDS.items()
        if (load, kind) in found
    ]


def measure(args: argparse.Namespace) -> None:
    """Append the rows of every kind, each kind in a process of its own."""
    task = {
        "shape": args.shape, "document": args.document, "decoders": args.decoders, "decode_prompt": args.decode_prompt,
        "dtype": args.dtype, "eager": args.eager, "memory": args.memory, "donor_bytes": args.donor_bytes,
        "step_tokens": args.step_tokens, "max_requests": 128, "folder": str(args.folder), "seed": 3,
    }  # fmt: skip
    worker = Path(__file__).with_name("_vllm_load_engine.py")
    for kind in args.kinds:
        subprocess.run([sys.executable, str(worker), kind, str(args.rows), json.dumps(task)], check=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path("bench/results/vllm_load_h200.rows.jsonl"))
    parser.add_argument("--finished-only", action="store_true", help="measure nothing, print the rows")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--measured-on", default="")
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--document", type=int, default=24_000, help="shared tokens of an arrival")
    parser.add_argument("--decoders", type=int, default=32)
    parser.add_argument("--decode-prompt", type=int, default=1024, help="tokens of a prompt that then decodes")
    parser.add_argument("--step-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--memory", type=float, default=0.55)
    parser.add_argument("--donor-bytes", type=float, default=3e10)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "semblend-vllm-load")
    parser.add_argument("--note", action="append", default=[], help="what a reader must know about these rows")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    args = read_arguments()
    if not args.finished_only:
        measure(args)
    report = _report.Report("vllm_load", args)
    rows = tabulate(read_rows(args.rows))
    report.table("vLLM under load: long prompts arrive while others decode", COLUMNS, rows)
    shared, shape = f"{args.document:,}", f"shape {args.shape}, random weights, {args.dtype}"
    report.note(f"prompts that share {shared} tokens with a donor; {args.decoders} requests decode; {shape}")
    report.note(f"max_num_batched_tokens {args.step_tokens:,}, prefix caching on")
    report.note("balanced repairs 10 % of the reused tokens, chosen at random, the slowest case")
    report.note("ITL: time between two tokens of a request that decodes, while arrivals are served")
    report.note("one run of each load; the times of a load are over its arrivals")
    for note in args.note:
        report.note(note)
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
