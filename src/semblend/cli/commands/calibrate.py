"""Measure where a model's quality gate may open, and write the thresholds for semblend serve."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend.cli.engine_parts import engine_imports
from semblend.cli.output import Progress, check_target, say, table, write_json
from semblend.errors import InputError

if TYPE_CHECKING:
    from semblend.materialize.calibrate import Pair
    from semblend.materialize.gate.thresholds import Thresholds
    from semblend.materialize.measure_ways import CalibrationPrompt

DEFAULT_LIMIT = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model's name, a folder or a GGUF file")
    parser.add_argument(
        "--prompts", metavar="FILE", help="JSONL of logged prompts, - for stdin (default: built-in texts)"
    )
    parser.add_argument(
        "--limit", type=int, default=DEFAULT_LIMIT, metavar="N", help=f"prompts to measure (default: {DEFAULT_LIMIT})"
    )
    parser.add_argument("--max-tokens", type=int, default=4096, help="leave longer prompts out (default: 4096)")
    parser.add_argument(
        "--target-false-safe",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="share of the prompts that pass the gate which may be damaged (default: 0.02)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the thresholds here, for semblend serve --thresholds")
    parser.add_argument("--pairs", metavar="FILE", help="keep each prompt's measurement here, and go on from there")
    parser.add_argument("--device", default="", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtype", default="", choices=["", "float32", "bfloat16", "float16"], help="of the weights")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: as torch chooses)")


def run(args: argparse.Namespace) -> int:
    with engine_imports():
        from semblend.engine.server.config import ServeConfig
        from semblend.engine.server.launch import Launch
    if args.limit < 1 or args.max_tokens < 1:
        raise InputError("--limit and --max-tokens are 1 or more", hint="leave them out for the defaults")
    if not 0 <= args.target_false_safe < 1:
        raise InputError(f"--target-false-safe {args.target_false_safe} is no share", hint="0.02 is two in a hundred")
    for path in filter(None, (args.out, args.pairs)):
        check_target(path)
    launch = Launch(ServeConfig(model=args.model, device=args.device, dtype=args.dtype, threads=args.threads))
    say(f"loading {launch.path.name} on {launch.chosen_device}")
    model, tokenizer = launch.load()
    thresholds = measure_thresholds(model, tokenizer, args)
    if args.out:
        write_json(args.out, json.loads(thresholds.to_json()))
        say(f"wrote {args.out}; semblend serve --model {args.model} --thresholds {args.out}")
    print(as_table(thresholds))
    return 0


def measure_thresholds(model: Any, tokenizer: Any, args: argparse.Namespace) -> Thresholds:
    """Runs every prompt through the gate's steps and a prefill, with progress, and makes the table."""
    from semblend.engine.model.pooled_model import PooledModel
    from semblend.materialize.calibrate import measure, table_of

    known, pairs, tokens, done, declined = _Known(args.pairs), [], 0, 0, 0
    pool = model.new_pool(2 * args.max_tokens)
    progress = Progress()
    try:
        for prompt in itertools.islice(_prompts(model, tokenizer, args), args.limit):
            key = _key(args.model, model, prompt)
            found = known.pairs.get(key)
            if found is None:
                try:
                    found = measure(PooledModel(model, pool), prompt, pool=pool)
                except InputError as error:  # the blender would not follow it: nothing to learn for the gate
                    declined, why = declined + 1, error.message
                    say(f"left out: {why}")
                    continue
                known.add(key, found)
            pairs += found
            tokens, done = tokens + len(prompt.tokens), done + 1
            if progress.due():
                progress.show(f"{done} of at most {args.limit} prompts, {len(pairs)} pairs")
    finally:
        progress.clear()
    if declined:
        say(f"{declined} prompts were left out")
    return table_of(
        pairs,
        pool=pool,
        model_name=args.model,
        prompts=done,
        tokens=tokens,
        false_safe=args.target_false_safe,
    )


def as_table(thresholds: Thresholds) -> str:
    """The thresholds, and how much stands behind each."""
    from semblend.materialize.gate.thresholds import STEPS

    by_step = thresholds.provenance["steps"]
    begins = {10: 0.0, 20: thresholds.begin_20, 40: thresholds.begin_40}
    rows = []
    for step in STEPS:
        one = by_step[str(step)]
        passing = round(one["passing"] * one["pairs"])
        begin = "escalation only" if begins[step] == math.inf else f"{begins[step]:.4f}"
        rows.append(
            (f"{step} %", f"{thresholds.after(step):.5f}", begin, one["pairs"], passing, f"{one['false_safe']:.1%}")
        )
    head = ("computed again", "largest risk", "from deviation", "prompts", "pass", "damaged of those")
    text = table(rows, head=head, right=(1, 2, 3, 4, 5))
    if thresholds.begin_prefill < math.inf:
        text += f"\nfrom deviation {thresholds.begin_prefill:.4f} on: a prefill at once"
    prompts, target = thresholds.provenance["prompts"], thresholds.provenance["false_safe_target"]
    if target and prompts < 1 / target:
        say(f"{prompts} prompts cannot tell {target:.0%} from none; measure {round(1 / target)} before serving with it")
    return f"{text}\n\n{prompts} prompts, {thresholds.provenance['tokens']:,} tokens"


def _prompts(model: Any, tokenizer: Any, args: argparse.Namespace) -> Iterator[CalibrationPrompt]:
    from semblend.demo import prompts
    from semblend.demo.workloads import calibration
    from semblend.text.logs import PromptLog

    if args.prompts is None:
        fitting = prompts.of_workloads(calibration(), tokenizer)
        return (one for one in fitting if max(map(len, (one.tokens, *one.donors))) <= args.max_tokens)
    log = PromptLog(args.prompts)
    return prompts.of_log(log, tokenizer.encode, max_tokens=args.max_tokens, vocab=model.spec.vocab)


def _key(name: str, model: Any, prompt: CalibrationPrompt) -> str:
    """Names a measurement: another model, dtype, device or prompt has another key."""
    packed = repr((name, str(model.dtype), str(model.device), prompt.tokens, prompt.donors, prompt.spans))
    return hashlib.sha256(packed.encode()).hexdigest()[:32]


class _Known:
    """Measurements of earlier runs, one JSON object a line; without a file it remembers nothing."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.pairs: dict[str, list[Pair]] = {}
        if path and Path(path).is_file():
            self._read(Path(path))

    def add(self, key: str, pairs: list[Pair]) -> None:
        if self.path is None:
            return
        record = {"key": key, "pairs": [_to_json(pair) for pair in pairs]}
        try:
            with Path(self.path).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}", hint="check the permissions") from None

    def _read(self, path: Path) -> None:
        from semblend.materialize.calibrate import Pair
        from semblend.materialize.gate.risk import RiskFeatures

        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a run that was killed may have left half a line
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
                self.pairs[record["key"]] = [
                    Pair(one["step"], RiskFeatures(**one["signs"]), one["glance"], one["true_kl"])
                    for one in record["pairs"]
                ]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path}, line {number} is no measurement", hint="name another --pairs file") from None


def _to_json(pair: Pair) -> dict[str, Any]:
    """As the file of an earlier version has it: its features are called signs there."""
    record = asdict(pair)
    return {"signs": record.pop("features"), **record}
