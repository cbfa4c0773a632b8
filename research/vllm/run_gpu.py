"""Every vLLM benchmark on one GPU, the most telling first, within a given time; a second run goes on where it ended.

    python bench/run_gpu.py --minutes 25 --out FOLDER --model WEIGHTS --data-dir DATA
    python bench/run_gpu.py --quick --out FOLDER --model WEIGHTS --data-dir DATA    # two cores: shows that it works
    python bench/run_gpu.py --tables --out FOLDER                                   # no vLLM: tables from the rows

FOLDER gets one file of rows for each benchmark and one log, eight files in all. WEIGHTS is a Hugging Face folder; what
needs it is left out without it. A benchmark that takes too long is stopped and keeps the rows it has.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LEAST_S = 60.0
"""With less time left nothing more is begun: an engine needs that long to start."""


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark: its script, where its rows go, at most how many seconds it may take, and its flags."""

    script: str
    rows: str
    seconds: float
    flags: tuple[str, ...] = ()
    rows_flag: str = "--rows"
    needs_weights: bool = False


STEPS = (
    Step("vllm_poison", "vllm_poison.rows.jsonl", 240, ("--budget-s", "210")),
    Step("vllm_load", "vllm_load.rows.jsonl", 560, ("--budget-s", "230")),
    Step("vllm_users", "vllm_users.rows.jsonl", 270, ("--budget-s", "90")),
    Step("vllm_http", "vllm_http.rows.jsonl", 240, ("--budget-s", "200"), needs_weights=True),
    Step("vllm_shuffle", "vllm_shuffle.rows.jsonl", 180, ("--budget-s", "90")),
    Step("vllm_quality", "vllm_quality.jsonl", 240, ("--http", "--tokens", "4000", "--budget-s", "200"), "--jsonl",
         needs_weights=True),
    Step("vllm_ttft", "vllm_ttft.cells.jsonl", 240, ("--lengths", "4096", "24576", "32768", "--crowd", "0",
                                                     "--budget-s", "110"), "--cells"),
)  # fmt: skip
QUICK_TTFT = ("--shape", "tiny", "--lengths", "256", "--dtype", "float32", "--eager", "--memory", "0.06", "--rounds",
              "2", "--decode", "0", "--crowd", "0")  # fmt: skip
QUICK_QUALITY = ("--http", "--prompts", "1", "--tokens", "300", "--dtype", "float32", "--eager", "--memory", "0.15",
                 "--scenarios", "one_document")  # fmt: skip


def make_command(step: Step, args: argparse.Namespace) -> list[str]:
    """The command line of a step; its JSON is written only with the tables."""
    command = [sys.executable, str(HERE / f"{step.script}.py"), step.rows_flag, str(args.out / step.rows)]
    if args.tables:
        name = {"vllm_quality": "--tables-only"}.get(step.script, "--finished-only")
        rest = [str(args.out / step.rows)] if step.script == "vllm_quality" else []
        return [
            *command,
            name,
            *rest,
            "--measured-on",
            args.measured_on,
            "--out",
            str(args.out / f"{step.script}.json"),
        ]
    command += ["--out", ""]
    if args.quick:
        quick = {"vllm_ttft": QUICK_TTFT, "vllm_quality": QUICK_QUALITY}
        command += quick.get(step.script, ("--quick",))
    else:
        command += step.flags
    if step.needs_weights:
        command += ["--model", args.model, *(["--data-dir", args.data_dir] if args.data_dir else [])]
    return command


def run_step(step: Step, args: argparse.Namespace, seconds: float, log: Path) -> str:
    """Run one benchmark for at most so long, with everything that it has started; returns how it ended."""
    begun = time.monotonic()
    with log.open("a", encoding="utf-8") as out:
        process = subprocess.Popen(make_command(step, args), stdout=out, stderr=out, start_new_session=True)
        try:
            ended = f"exit {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = "stopped"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # servers and workers that outlive it would hold the GPU
            except ProcessLookupError:
                pass
            process.wait()
    return f"{step.script}: {ended} after {time.monotonic() - begun:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="step", help=f"any of {', '.join(s.script for s in STEPS)}")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of them together")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--model", default="", help="a Hugging Face folder of real weights")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tables", action="store_true", help="run no engine: print the rows as tables")
    parser.add_argument("--measured-on", default="", help="the machine, for the tables")
    args = parser.parse_args()
    if unknown := set(args.steps) - {step.script for step in STEPS}:
        parser.error(f"unknown step {sorted(unknown)[0]!r} (hint: one of {', '.join(s.script for s in STEPS)})")
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.minutes * 60
    for step in STEPS:
        left = end - time.monotonic()
        if args.steps and step.script not in args.steps:
            continue
        if args.tables:
            if (args.out / step.rows).exists():
                subprocess.run(make_command(step, args), check=False)
        elif step.needs_weights and not args.model:
            print(f"{step.script}: left out, it needs --model", file=sys.stderr)
        elif left < LEAST_S:
            print(f"{step.script}: left out, {left:.0f} s are too few", file=sys.stderr)
        else:
            print(run_step(step, args, min(left, step.seconds * (3 if args.quick else 1)), args.out / "log.txt"),
                  file=sys.stderr, flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
