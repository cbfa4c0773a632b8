"""Claim: without any reuse the embedded engine is no slower on a CPU than what people would use instead.

    semblend models pull smollm2-135m
    python bench/cold_speed.py --xllamacpp-python VENV/bin/python     # needs transformers, accelerate, gguf
    python bench/cold_speed.py --quick

Beside the engine: transformers (SDPA, float32, its own forward token by token) and llama.cpp from the package
``xllamacpp``, with the file as it is and with a float32 file of the same weights. Each engine has a process of its own
and works alone, in turns; all with the same threads and the same random tokens. First the answers are compared. Then
prefill at several lengths, decoding behind a prompt, several answers at once, and again with cores kept busy by another
program. A turn in which other programs used more than ``--most-others`` of a core is repeated, a few times at most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries of this process to one thread
from _report import Report, fail, progress, spread

ARMS_FILE = Path(__file__).with_name("_cold_arms.py")
OURS, FIXED, SERVED = "ours", "ours, fixed threads", "ours over HTTP"
TRANSFORMERS, LLAMA, LLAMA_PACKED = "transformers", "llama.cpp", "llama.cpp Q4"
TRIES = 4
ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: a prefill of ``length`` tokens, or ``steps`` of ``answers`` answers behind such prompts."""

    length: int
    answers: int = 0
    steps: int = 0
    busy: int = 0

    @property
    def kind(self) -> str:
        return "prefill" if not self.answers else "decode" if self.answers == 1 else f"decode x {self.answers}"

    def command(self, seed: str) -> dict[str, Any]:
        draw = random.Random(seed)
        prompts = [[draw.randrange(1000, 40_000) for _ in range(self.length)] for _ in range(max(1, self.answers))]
        if not self.answers:
            return {"do": "prefill", "tokens": prompts[0]}
        if self.answers == 1:
            return {"do": "decode", "tokens": prompts[0], "steps": self.steps}
        return {"do": "decode_batch", "prompts": prompts, "steps": self.steps}


class Worker:
    """One engine in its own process."""

    def __init__(self, name: str, python: str, asked: dict[str, Any]) -> None:
        self.name = name
        kept = {key: value for key, value in os.environ.items() if key not in _report.THREAD_VARIABLES}
        source = str(_report.REPO / "src")
        self._process = subprocess.Popen(
            [python, str(ARMS_FILE), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, "PYTHONPATH": source},
            text=True,
        )
        if not self._read().get("ready"):
            fail(f"{name} did not start", hint=f"run it alone: {python} {ARMS_FILE.name} '{json.dumps(asked)}'")

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        found = self._read()
        if not found and command["do"] != "logits":
            fail(f"{self.name} ended during {command['do']}", hint="run it alone to see its message")
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {}
        return found


def main() -> None:
    args = parse()
    report = Report("cold_speed", args)
    if args.join:
        join(report, args)
        return
    from semblend.models import resolve

    path = resolve(args.model)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = start(args, path, Path(folder), stack)
        compare_answers(report, workers, args, Path(folder))
        samples = measure(workers, cases_of(args), args)
        show(report, samples, args)
    finish(report, args)


def finish(report: Report, args: argparse.Namespace) -> None:
    report.note("tokens/s: median of the turns; from, to: the slowest and the fastest turn; CPU s: of all threads")
    report.note("others: cores that other programs used during the turn, the busy ones of the case included")
    report.note("llama.cpp: the wheel of xllamacpp as it comes, which is built for every CPU of its kind")
    report.write(args.out)


def join(report: Report, args: argparse.Namespace) -> None:
    """One report of runs that measured different cases, one after another."""
    samples: dict[Any, list[dict[str, Any]]] = {}
    for at, path in enumerate(args.join):
        part = json.loads(Path(path).read_text(encoding="utf-8"))
        for table in part["tables"] if at == 0 else []:
            if table["title"].startswith("Ours against"):
                report.table(table["title"], table["columns"], table["rows"])
        for one in part["samples"]:
            samples.setdefault((Case(**one["case"]), one["engine"]), []).extend(one["turns"])
    show(report, samples, args)
    finish(report, args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "cold_speed")
    parser.add_argument("--model", default="smollm2-135m", help="name or GGUF file (default: smollm2-135m)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048, 4096], help="prefills")
    parser.add_argument("--decode-at", type=int, nargs="*", default=[512, 2048], help="prompts to decode behind")
    parser.add_argument("--steps", type=int, default=48, help="tokens decoded in a turn")
    parser.add_argument("--answers", type=int, nargs="*", default=[4, 8], help="answers decoded at once, at 256 tokens")
    parser.add_argument("--busy", type=int, nargs="*", default=[1, 2], help="cores kept busy, in further cases")
    parser.add_argument("--without", nargs="*", default=[], help="arms to leave out")
    parser.add_argument("--most-others", type=float, default=0.15, help="cores; a turn with more is repeated")
    parser.add_argument("--join", nargs="*", default=[], metavar="JSON", help="measure nothing, join these results")
    parser.add_argument("--xllamacpp-python", default="", help="a Python that can import xllamacpp")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.lengths, args.decode_at, args.answers, args.busy = 1, [64], [64], [2], []
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    alone = [Case(length) for length in args.lengths]
    alone += [Case(length, 1, args.steps) for length in args.decode_at]
    alone += [Case(256, answers, args.steps) for answers in args.answers]
    beside = [case for busy in args.busy for case in (Case(512, busy=busy), Case(512, 1, args.steps, busy))]
    return alone + beside


def start(args: argparse.Namespace, path: Path, folder: Path, stack: ExitStack) -> list[Worker]:
    answers = max([1, *args.answers])
    common = {"threads": args.threads, "dtype": "float32"}
    room = max(case.length * max(1, case.answers) for case in cases_of(args)) + (args.steps + 64) * answers
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        OURS: (sys.executable, {"arm": "ours", "model": str(path)}),
        FIXED: (sys.executable, {"arm": "ours", "model": str(path), "adapts": False}),
        SERVED: (sys.executable, {"arm": "served", "model": str(path)}),
        TRANSFORMERS: (sys.executable, {"arm": "transformers", "model": str(path)}),
    }
    if args.xllamacpp_python:
        unpacked = write_float32(path, folder / "float32.gguf")
        llama = {"arm": "llama.cpp", "answers": answers}
        asked[LLAMA] = (args.xllamacpp_python, {**llama, "model": str(unpacked)})
        asked[LLAMA_PACKED] = (args.xllamacpp_python, {**llama, "model": str(path), "dtype": ""})
    workers = []
    for name, (python, wanted) in asked.items():
        if name not in args.without:
            progress(f"starting {name}")
            workers.append(Worker(name, python, {**common, "room": room, **wanted}))
            stack.callback(workers[-1].close)
    return workers


def write_float32(source: Path, target: Path) -> Path:
    """The same weights, every one as a float32 number, for llama.cpp."""
    import gguf
    import numpy as np

    packed = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, packed.fields["general.architecture"].contents())
    for name, field in packed.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in packed.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def compare_answers(report: Report, workers: Sequence[Worker], args: argparse.Namespace, folder: Path) -> None:
    """The largest difference of a logit between ours and transformers, and everybody's greedy answer."""
    import numpy as np

    by_name = {worker.name: worker for worker in workers}
    tokens = Case(200).command(f"{args.seed} answers")["tokens"]
    said = {
        name: worker.do({"do": "answer", "tokens": tokens, "steps": ANSWER_TOKENS}) for name, worker in by_name.items()
    }
    differ = None
    if OURS in by_name and TRANSFORMERS in by_name:
        for name in (OURS, TRANSFORMERS):
            by_name[name].do({"do": "logits", "tokens": tokens, "path": str(folder / f"{name}.npy")})
        differ = float(np.abs(np.load(folder / f"{OURS}.npy") - np.load(folder / f"{TRANSFORMERS}.npy")).max())
        same = said[OURS]["answer"] == said[TRANSFORMERS]["answer"]
        report.table(
            "Ours against transformers, the last of 200 tokens",
            ["max logit difference", f"same {ANSWER_TOKENS} greedy tokens"],
            [[differ, same]],
        )
        if differ > 1e-2:
            fail(f"logits differ by {differ}", hint="speeds of different computations say nothing")
    report.add("answers", said)


def measure(
    workers: Sequence[Worker], cases: Sequence[Case], args: argparse.Namespace
) -> dict[Any, list[dict[str, Any]]]:
    """Every case in rounds, the engines in turn, another one first each round."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for case in cases:
        with keep_busy(case.busy):
            for turn in range(args.rounds):
                first = turn % len(workers)
                for worker in [*workers[first:], *workers[:first]]:
                    if (worker.name == FIXED and not case.busy) or (worker.name == SERVED and case.answers > 1):
                        continue
                    sample = take(worker, case, turn, args)
                    found.setdefault((case, worker.name), []).append(sample)
                    rate = sample["tokens"] / sample["wall_s"]
                    progress(f"{case} {worker.name}: {rate:.1f} tokens/s, others {sample['others']:.2f}")
    return found


def take(worker: Worker, case: Case, turn: int, args: argparse.Namespace) -> dict[str, Any]:
    samples = []
    for attempt in range(TRIES):
        samples.append(worker.do(case.command(f"{args.seed} {turn} {attempt}")))
        if case.busy or samples[-1]["others"] <= args.most_others:
            break
    return min(samples, key=lambda sample: sample["others"])


@contextmanager
def keep_busy(cores: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def show(report: Report, samples: dict[Any, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    for title, busy in [("nothing else running", 0), *((f"{count} busy", count) for count in args.busy)]:
        rows = []
        for (case, name), taken in samples.items():
            if case.busy == busy:
                rates = spread([one["tokens"] / one["wall_s"] for one in taken])
                cpu = spread([one["cpu_s"] for one in taken])["p50"]
                ours = samples.get((case, OURS))
                ratio = spread([one["tokens"] / one["wall_s"] for one in ours])["p50"] / rates["p50"] if ours else None
                others = max(one["others"] for one in taken)
                rows.append(
                    [
                        case.kind,
                        case.length,
                        name,
                        len(taken),
                        rates["p50"],
                        rates["min"],
                        rates["max"],
                        cpu,
                        others,
                        ratio,
                    ]
                )
        names = ["what", "tokens", "engine", "n", "tokens/s", "from", "to", "CPU s", "others", "ours / this"]
        if rows:
            report.table(f"{args.model}, float32, {args.threads} threads, {title}", names, rows)
    report.add("samples", [{"case": vars_of(case), "engine": name, "turns": t} for (case, name), t in samples.items()])


def vars_of(case: Case) -> dict[str, int]:
    return {"length": case.length, "answers": case.answers, "steps": case.steps, "busy": case.busy}


if __name__ == "__main__":
    main()
