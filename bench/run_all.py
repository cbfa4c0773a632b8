"""Run benchmarks, one after the other, each in a process of its own; the tables go to stdout.

    python bench/run_all.py                   # those of the library; needs the data folder for real text
    python bench/run_all.py --quick           # small runs that show that everything works
    python bench/run_all.py speed recall      # some of them
    python bench/run_all.py --everything      # every figure that needs no GPU; says what was left out, and why
    python bench/run_all.py --list            # what each script needs, and whether it is here

What a run wrote to bench/results/ stays when a later script fails, and scripts already done can be left out.
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
SCRIPTS = ("speed", "recall", "natural", "peers", "faults", "evidence", "vector_index", "sembench_offline", "eviction")

NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bodies", "dial_replay", "directory_kills", "directory_polls", "edge", "edge_endurance"), ()),
    **dict.fromkeys(("edge_timing", "experiments_seeding", "experiments_twins", "faults", "router_state"), ()),
    **dict.fromkeys(("carry_over", "extras", "sembench_power", "source_tables", "transformers_reuse"), ()),
    **dict.fromkeys(("gate_in_part", "ttft", "vector_index"), ()),
    **dict.fromkeys(("advise", "arrange", "edge_placement", "estimate", "eviction", "evidence", "natural"), ("data",)),
    **dict.fromkeys(("peers", "placement_scale", "recall", "sembench_offline", "similarity_routing"), ("data",)),
    **dict.fromkeys(("speed",), ("data",)),
    **dict.fromkeys(
        ("cold_speed", "deep_canary", "engine_vs_transformers", "fairness", "hostile", "hostile_text"), ("model",)
    ),
    **dict.fromkeys(("kills", "llamacpp_reuse", "sembench_embedded", "soak"), ("model",)),
    **dict.fromkeys(("chats", "edge_engines", "eviction_engine", "peer_rules", "sglang_classes"), ("data", "model")),
    **dict.fromkeys(("eviction_sessions", "warm", "warm_donors"), ("data", "model")),
    "eviction_held_out": ("mooncake",),
    "judged": ("model", "judge"),
    "arrange_ttft": ("data", "model", "vllm"),
    "day": ("data", "vllm"),
    "dynamo_placement": ("data", "dynamo"),
    "dynamo_vllm": ("data", "dynamo", "vllm"),
    **dict.fromkeys(("vllm_endurance", "vllm_server_kills"), ("vllm",)),
    "sglang_peer": ("data", "sglang"),
    "sglang_soak": ("sglang",),
    "sglang_ttft": ("data", "sglang", "vllm"),
    **dict.fromkeys(("arranged_answers", "dial", "donor_bits", "embedders", "quality", "rejected"), ("gpu",)),
    **dict.fromkeys(("splice", "vllm_http", "vllm_load", "vllm_poison", "vllm_quality", "vllm_shuffle"), ("gpu",)),
    **dict.fromkeys(("vllm_ttft", "vllm_users", "eviction_vllm"), ("gpu",)),
}
"""What a script needs beside `make setup`, for the figures that are published. Those of ``gpu`` are `run_gpu.py`'s."""
NOT_MEASUREMENTS = ("corpus", "publish", "run_all", "run_gpu")
HOW = {
    "data": "a folder of real texts in SEMBLEND_TEST_DATA",
    "mooncake": "the traces of Mooncake's FAST25 release in the folder traces of SEMBLEND_TEST_DATA",
    "model": "a model: semblend models pull smollm2-135m",
    "judge": "a result and a judge, a GGUF file: see its first lines",
    "vllm": "vLLM on a CPU: .ci/engines/vllm-cpu setup",
    "sglang": "SGLang on a CPU: .ci/engines/sglang-cpu setup",
    "dynamo": "Dynamo: .ci/engines/dynamo setup",
    "gpu": "a GPU: bench/run_gpu.py",
}


def is_here(need: str) -> bool:
    """Whether this machine has what a script needs."""
    if need == "data":
        return Path(os.environ.get("SEMBLEND_TEST_DATA", "")).is_dir() and bool(os.environ.get("SEMBLEND_TEST_DATA"))
    if need == "mooncake":
        traces = Path(os.environ.get("SEMBLEND_TEST_DATA", "")) / "traces"
        return all((traces / f"{name}_trace.jsonl").is_file() for name in ("conversation", "synthetic"))
    if need == "model":
        from semblend.models import find_model, is_pulled

        return is_pulled(find_model("smollm2-135m"))
    if need == "gpu":
        return shutil.which("nvidia-smi") is not None
    return (HERE.parent / ".engines" / need).is_dir()


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
    parser.add_argument("scripts", nargs="*", metavar="script", help=f"any of --list; default {', '.join(SCRIPTS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--everything", action="store_true", help="every figure that needs no GPU: hours")
    parser.add_argument("--list", action="store_true", help="say what each script needs, and run nothing")
    args = parser.parse_args()
    if args.list:
        return show_list()
    if unknown := set(args.scripts) - set(NEEDS):
        parser.error(f"unknown script {sorted(unknown)[0]!r} (hint: one of {', '.join(sorted(NEEDS))})")
    if args.quick and (args.everything or set(args.scripts) - set(SCRIPTS)):
        parser.error(f"--quick is for {', '.join(SCRIPTS)} (hint: leave it out)")
    failed = []
    for name in args.scripts or (choose_everything() if args.everything else SCRIPTS):
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
