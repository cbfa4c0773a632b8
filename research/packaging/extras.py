"""Install every extra from the built wheel into an environment of its own, and run its front door there.

    python bench/extras.py                        # all that a machine without a GPU can install; minutes, some GB
    python bench/extras.py --only lab edge        # some of them; gpu and onnx-gpu only when they are named
    python bench/extras.py --list                 # the front doors, and why an extra is left out

One environment at a time, deleted afterwards. Versions are those of constraints/core.txt.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import _report

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "examples" / "data" / "ferry_desk.jsonl"
LONGEST_S = 900
TRACE = ROOT / "examples" / "traces" / "rag_serving_trace.jsonl"


@dataclass(frozen=True)
class FrontDoor:
    """What shows that an extra works: a command of ours, or a line of Python. ``says`` must stand in its output."""

    words: tuple[str, ...]
    says: str

    def as_text(self) -> str:
        if self.words[0] == "python" and self.words[1] == "-c":
            return f"`{self.words[2].partition(';')[0]}`"
        return f"`{' '.join(word.replace(f'{ROOT}/', '') for word in self.words)}`"


def run_python(code: str, says: str = "True") -> FrontDoor:
    return FrontDoor(("python", "-c", code), says)


DOORS: dict[str, FrontDoor] = {
    "": FrontDoor(("semblend", "estimate", str(LOG), "--quiet"), "exact prefix cache"),
    "tokenizer": run_python("import tokenizers; from semblend.text.tokenization import load_tokenizer; print(True)"),
    "telemetry": run_python(
        "from semblend import SemBlend; import prometheus_client, opentelemetry.trace, nats; SemBlend(); print(True)"
    ),
    "live": FrontDoor(("sembench", "verify-endpoint", "--base-url", "http://127.0.0.1:9"), "hint:"),
    "benchmarks": FrontDoor(("sembench", "run-load", "--help"), "requests a second"),
    "lab": FrontDoor(
        ("semantickv", "replay", "--trace", str(TRACE), "--cache-token-budget", "20000", "--output-dir", "out"), "out"
    ),
    "edge": FrontDoor(("semantickv", "router", "--replicas", "http://127.0.0.1:9", "--port", "-1"), "no such port"),
    "longbench": run_python("import datasets, huggingface_hub; import sembench.manifests.datasets; print(True)"),
    "langchain": FrontDoor(("python", str(ROOT / "examples" / "langchain_rag.py")), "arranged     42%"),
    "llama-index": run_python("from semblend.integration.llama_index import ArrangeNodes; print(True)"),
    "docs": FrontDoor(("python", "-m", "mkdocs", "--version"), "mkdocs"),
    "k8s": FrontDoor(("sembench", "collect-k8s-engine-events", "--help"), "kubectl"),
    "local": FrontDoor(("python", str(ROOT / "examples" / "reuse_on_cpu.py")), "backend_materialized_reuse"),
    "transformers": FrontDoor(("python", str(ROOT / "examples" / "transformers_generate.py")), "2825 reused"),
    "embedder": run_python(
        "from semblend import SemBlend, SemBlendConfig; import onnxruntime, usearch, sentence_transformers; "
        "SemBlend(SemBlendConfig(embedder='lexical')); print(True)"
    ),
    "onnx-gpu": run_python("import onnxruntime; print(onnxruntime.__version__ > '1.17')"),
    "gpu": run_python("import torch, triton; from semblend.materialize.kv import splice; print(True)"),
}
LEFT_OUT = {
    "vllm": "run by tests/engines/vllm, in an environment of its own (constraints/vllm.txt)",
    "sglang": "run by tests/engines/sglang, in an environment of its own (constraints/sglang.txt)",
    "dynamo": "run by tests/engines/dynamo, in an environment of its own (constraints/dynamo.txt)",
    "trtllm": "needs a GPU to be installed",
    "dev": "`make test` installs it",
}
FOR_A_GPU = ("onnx-gpu", "gpu")  # pip installs gigabytes of CUDA that nothing here could run


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built in isolation as a packager builds it."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def try_extra(extra: str, wheel: Path, folder: Path) -> list[object]:
    """The row of one extra: whether it installs, what it takes, what its front door says."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    constraints = ROOT / "constraints" / "core.txt"
    installed = subprocess.run([*pip, "-c", str(constraints), wanted], capture_output=True, text=True)
    seconds = time.monotonic() - started
    if installed.returncode:
        reason = installed.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return [extra or "(none)", "no", reason[0][:80], round(seconds), 0, ""]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    packages = len(list(folder.glob("lib/python*/site-packages/*.dist-info"))) - 1  # pip itself
    return [extra or "(none)", "yes", open_door(DOORS[extra], folder), round(seconds), round(size / 1e6), packages]


def open_door(door: FrontDoor, folder: Path) -> str:
    program, *words = door.words
    where = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}
    command = [str(folder / "bin" / program), *words]
    try:
        done = subprocess.run(command, cwd=folder, env=where, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return f"failed: no end after {LONGEST_S} s"
    said = done.stdout + done.stderr
    if door.says in said and "Traceback" not in said:
        return door.as_text()
    return f"failed: {said.strip().splitlines()[-1][:80] if said.strip() else done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="EXTRA", help="these extras alone")
    parser.add_argument("--quick", action="store_true", help="the core alone")
    parser.add_argument("--list", action="store_true", help="print the front doors and what is left out, and end")
    parser.add_argument("--keep-rows", metavar="FILE", help="go on from the rows in this file, and keep them there")
    parser.add_argument("--out", default="bench/results/extras.json", help="JSON result file; '' writes none")
    args = parser.parse_args()
    if args.list:
        for extra, door in DOORS.items():
            print(f"{extra or '(none)':14} {door.as_text()}")
        for extra, reason in LEFT_OUT.items():
            print(f"{extra:14} left out: {reason}")
        return 0
    report = _report.Report("extras", args)
    kept = Path(args.keep_rows) if args.keep_rows else None
    rows: dict[str, list[object]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        for extra in [""] if args.quick else args.only or [name for name in DOORS if name not in FOR_A_GPU]:
            if extra in rows:
                continue
            environment = Path(folder) / "environment"
            rows[extra] = try_extra(extra, wheel, environment)
            shutil.rmtree(environment)
            _report.progress(" ".join(map(str, rows[extra])))
            if kept:
                kept.write_text(json.dumps(rows))
    shown = [rows[extra] for extra in DOORS if extra in rows]
    names = ["extra", "installs", "its front door, run", "seconds", "MB", "packages"]
    report.table("Extras installed from the built wheel, each into an environment of its own", names, shown)
    for extra, reason in LEFT_OUT.items():
        report.note(f"{extra}: {reason}")
    if untried := [extra for extra in DOORS if extra not in rows and extra not in FOR_A_GPU]:
        report.note("not tried in this run: " + ", ".join(untried))
    if idle := [extra for extra in FOR_A_GPU if extra not in rows]:
        why = "packages for CUDA, which a machine without a GPU installs and cannot run"
        report.note(f"{', '.join(idle)}: not tried: {why}")
    report.note("seconds depend on the network and on what pip has downloaded before; MB is the whole environment")
    report.write(args.out)
    return 0 if all(row[1] == "yes" and not str(row[2]).startswith("failed") for row in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
