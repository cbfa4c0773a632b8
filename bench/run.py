"""Run benchmarks, one after the other, each in a process of its own; the tables go to stdout.

    python bench/run.py                   # those of the library; needs the data folder for real text
    python bench/run.py --quick           # small runs that show that everything works
    python bench/run.py speed recall      # some of them
    python bench/run.py --everything      # all that find what they need here; says what was left out, and why
    python bench/run.py --list            # what each script needs, and whether it is here

What a run wrote to bench/results/ stays when a later script fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = ("speed", "recall", "peers", "sembench_offline", "eviction")

NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("transformers_reuse", "ttft"), ()),
    **dict.fromkeys(("arrange", "estimate", "eviction", "peers", "recall", "sembench_offline", "speed"), ("data",)),
    "sglang_classes": ("data", "model"),
    **dict.fromkeys(("quality", "vllm_http", "vllm_load", "vllm_mixed", "vllm_pays", "vllm_ttft", "agents"), ("gpu",)),
}
"""What a script needs beside `make setup`, for the figures that are published."""
HOW = {
    "data": "a folder of real texts in SEMBLEND_TEST_DATA",
    "model": "a model: semblend models pull smollm2-135m",
    "gpu": "a GPU, and flags of its own: see its first lines",
}


def is_here(need: str) -> bool:
    """Whether this machine has what a script needs. A script for a GPU wants flags: it is run by name only."""
    if need == "data":
        folder = os.environ.get("SEMBLEND_TEST_DATA", "")
        return bool(folder) and Path(folder).is_dir()
    if need == "model":
        from semblend.models import find_model, is_pulled

        return is_pulled(find_model("smollm2-135m"))
    return shutil.which("nvidia-smi") is not None


def list_missing(name: str) -> list[str]:
    """What a script needs and this machine has not."""
    return [need for need in NEEDS[name] if not is_here(need)]


def show_list() -> int:
    """Print a line for each script: what it needs, what of that is missing."""
    for name, needs in sorted(NEEDS.items()):
        missing = list_missing(name)
        state = f"left out: needs {HOW[missing[0]]}" if missing else "can run"
        print(f"{name:22} {', '.join(needs) or '-':20} {state}")
    return 0


def choose_everything() -> list[str]:
    """Every script that needs no GPU and finds what it needs; the others are named on standard error."""
    chosen = [name for name, needs in NEEDS.items() if "gpu" not in needs and not list_missing(name)]
    for name in NEEDS.keys() - set(chosen):
        print(f"left out: {name}, which needs {HOW[(list_missing(name) or ['gpu'])[0]]}", file=sys.stderr)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="script", help=f"any of --list; default {', '.join(LIBRARY)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--everything", action="store_true", help="every figure that needs no GPU: hours")
    parser.add_argument("--list", action="store_true", help="say what each script needs, and run nothing")
    args = parser.parse_args()
    if args.list:
        return show_list()
    if unknown := set(args.scripts) - set(NEEDS):
        parser.error(f"unknown script {sorted(unknown)[0]!r} (hint: one of {', '.join(sorted(NEEDS))})")
    if args.quick and (args.everything or set(args.scripts) - set(LIBRARY)):
        parser.error(f"--quick is for {', '.join(LIBRARY)} (hint: leave it out)")
    failed = []
    for name in args.scripts or (choose_everything() if args.everything else LIBRARY):
        started = time.monotonic()
        print(f"\n## {name}\n", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if args.quick else [])]
        code = subprocess.run(command, cwd=HERE.parent, check=False).returncode
        print(f"{name}: exit {code} after {time.monotonic() - started:.0f} s", file=sys.stderr)
        if code:
            failed.append(name)
    if failed:
        print(f"error: {', '.join(failed)} missed a target or failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
