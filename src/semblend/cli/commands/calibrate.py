"""``semblend calibrate``."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, check_target, say, table, write_json
from semblend.cli.shared_flags import add_machine, add_model, engine_imports
from semblend.errors import InputError

if TYPE_CHECKING:
    from semblend.materialize.calibrate import CalibrationPrompt, Moved, PromptMeasure
    from semblend.materialize.gate.thresholds import Thresholds

DEFAULT_LIMIT = 24
DEFAULT_ANSWER = 16

EXAMPLES = (
    "semblend calibrate --prompts prompts.jsonl --out thresholds.json",
    "semblend serve --thresholds thresholds.json",
)

WITHOUT_DIAL = "passages in order go by thresholds, which numbers scale; moved ones by the default dial"


def add(commands: Commands) -> None:
    parser = add_command(commands, "calibrate", run, examples=EXAMPLES)
    flag = parser.add_argument
    add_model(parser)
    flag("--prompts", metavar="FILE", help="JSONL of logged prompts, - for stdin (default: built-in texts)")
    flag("--limit", type=int, default=DEFAULT_LIMIT, metavar="N", help=f"prompts to measure (default: {DEFAULT_LIMIT})")
    flag("--max-tokens", type=int, default=4096, metavar="N", help="leave longer prompts out, in tokens")
    flag(
        "--target-false-safe",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="share of the prompts that pass the gate which may be damaged",
    )
    flag("--out", "--output", metavar="FILE", help="write the thresholds here, for semblend serve --thresholds")
    flag("--pairs", metavar="FILE", help="keep each prompt's measurement here, and go on from there")
    flag(
        "--answer-tokens",
        type=int,
        default=DEFAULT_ANSWER,
        metavar="N",
        help=f"of each cold answer, over which divergence is averaged (default: {DEFAULT_ANSWER})",
    )
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    """Measure what every number of the quality dial costs a model, and write the thresholds for semblend serve.

    Each prompt is computed cold and by every way to reuse. Two yardsticks go with it: the same prompt computed again,
    and, where passages moved between prompts, cold with its passages in another order.
    """
    with engine_imports():
        from semblend.engine.server.config import ServeConfig
        from semblend.engine.server.launch import Launch
    if min(args.limit, args.max_tokens, args.answer_tokens) < 1:
        raise InputError(
            "--limit, --max-tokens and --answer-tokens are 1 or more", hint="leave them out for the defaults"
        )
    if not 0 <= args.target_false_safe < 1:
        raise InputError(f"--target-false-safe {args.target_false_safe} is no share", hint="0.02 is two in a hundred")
    for path in filter(None, (args.out, args.pairs)):
        check_target(path)
    launch = Launch(ServeConfig(model=args.model, device=args.device, dtype=args.dtype, threads=args.threads))
    say(f"loading {launch.path.name} on {launch.chosen_device}")
    model, tokenizer = launch.load()
    pool = model.new_pool(2 * args.max_tokens + args.answer_tokens)
    measures, tokens = measure_prompts(model, tokenizer, pool, args)
    thresholds = make_thresholds(measures, tokens, pool, args)
    if args.out:
        write_json(args.out, json.loads(thresholds.to_json()))
        say(f"wrote {args.out}; semblend serve --model {args.model} --thresholds {args.out}")
    print(as_table(thresholds))
    print("\n" + as_dial(thresholds))
    return 0


def measure_prompts(model: Any, tokenizer: Any, pool: Any, args: argparse.Namespace) -> tuple[list[PromptMeasure], int]:
    """Runs every prompt through every way and cold, with progress; returns measurements, and on how many tokens."""
    from semblend.engine.model.model import PooledModel
    from semblend.materialize.calibrate import measure_prompt

    known, measures, tokens, left_out = _Known(args.pairs), [], 0, 0
    progress = Progress()
    try:
        for prompt in itertools.islice(_prompts(model, tokenizer, args), args.limit):
            key = _key(args, model, prompt)
            found = known.measures.get(key)
            if found is None:
                try:
                    found = measure_prompt(
                        PooledModel(model, pool),
                        prompt,
                        pool=pool,
                        answer_tokens=args.answer_tokens,
                        stop=model.spec.eos_ids,
                    )
                except InputError as error:  # the blender would not follow it: nothing to learn for the gate
                    left_out, why = left_out + 1, error.message
                    say(f"left out: {why}")
                    continue
                known.add(key, found)
            measures.append(found)
            tokens += len(prompt.tokens)
            if progress.due():
                progress.show(f"{len(measures)} of at most {args.limit} prompts, {tokens:,} tokens")
    finally:
        progress.clear()
    if left_out:
        say(f"{left_out} prompts were left out")
    return measures, tokens


def make_thresholds(measures: Sequence[PromptMeasure], tokens: int, pool: Any, args: argparse.Namespace) -> Thresholds:
    """Thresholds of mode balanced, the dial, and how far cold answers move by themselves."""
    from semblend.materialize.calibrate import fit_dial, list_pairs, replay_unseen, table_of

    noise = {
        name: _summarize_noise([moved for one in measures if (moved := getattr(one, name)) is not None])
        for name in ("rerun", "reordered")
    }
    return table_of(
        [pair for one in measures for pair in list_pairs(one)],
        pool=pool,
        model_name=args.model,
        prompts=len(measures),
        tokens=tokens,
        false_safe=args.target_false_safe,
        dial=fit_dial(measures, false_safe=args.target_false_safe),
        measured={
            "answer_tokens": args.answer_tokens,
            "noise": noise,
            "numbers": [asdict(row) for row in replay_unseen(measures, false_safe=args.target_false_safe)],
        },
    )


def _summarize_noise(moved: Sequence[Moved]) -> dict[str, float] | None:
    if not moved:
        return None
    count = len(moved)
    return {"prompts": count, "nats": sum(one.nats for one in moved) / count,
            "changed": sum(one.changed for one in moved) / count}  # fmt: skip


def as_dial(thresholds: Thresholds) -> str:
    """What each number saves and costs, and what cold answers do by themselves."""
    numbers, noise = thresholds.provenance["numbers"], thresholds.provenance["noise"]
    if not numbers:
        return f"too few prompts to measure the dial: {WITHOUT_DIAL}"
    rows: list[tuple[object, ...]] = [
        (f"{row['number']:g}", row["kind"], row["prompts"], f"{row['served']}", f"{1 - row['work']:.0%}",
         f"{row['nats']:.4f}", f"{row['changed']:.0%}", f"{row['false_safe']:.0%}")
        for row in numbers
    ]  # fmt: skip
    names = {"rerun": "the same prompt again", "reordered": "two retrievals of the same passages"}
    for name, text in names.items():
        if (seen := noise[name]) is not None:
            rows.append(("cold", text, seen["prompts"], "-", "-", f"{seen['nats']:.4f}", f"{seen['changed']:.0%}", "-"))
    head = ("at this number", "prompts with", "n", "served", "you save", "nats", "answers change", "above 5x")
    text = table(rows, head=head, right=(0, 2, 3, 4, 5, 6, 7))
    orders = {row["kind"] for row in numbers} - {"all"}
    missing = [str(one) for one in _list_orders() if str(one) in orders and not thresholds.dial.knows(one)]
    if missing:
        say(f"too few prompts with {', '.join(missing)}: {WITHOUT_DIAL}")
    return text


def _list_orders() -> tuple[Any, ...]:
    from semblend.materialize.gate.thresholds import PassageOrder

    return tuple(PassageOrder)


def as_table(thresholds: Thresholds) -> str:
    """The thresholds, and how much stands behind each."""
    from semblend.materialize.gate.thresholds import STEPS

    by_step = thresholds.provenance["steps"]
    rows = []
    for step in STEPS:
        one = by_step[str(step)]
        passing = round(one["passing"] * one["pairs"])
        rows.append((f"{step} %", f"{thresholds.after(step):.5f}", one["pairs"], passing, f"{one['false_safe']:.1%}"))
    head = ("computed again", "largest risk", "prompts", "pass", "damaged of those")
    text = table(rows, head=head, right=(1, 2, 3, 4))
    prompts, target = thresholds.provenance["prompts"], thresholds.provenance["false_safe_target"]
    if target and prompts < 1 / target:
        say(f"{prompts} prompts cannot tell {target:.0%} from none; measure {round(1 / target)} before serving with it")
    return f"{text}\n\n{prompts} prompts, {thresholds.provenance['tokens']:,} tokens"


def _prompts(model: Any, tokenizer: Any, args: argparse.Namespace) -> Iterator[CalibrationPrompt]:
    from semblend.demo import workloads
    from semblend.text.logs import PromptLog

    if args.prompts is None:
        fitting = workloads.prompts_of_workloads(workloads.calibration(), tokenizer)
        return (one for one in fitting if max(map(len, (one.tokens, *one.donors))) <= args.max_tokens)
    log = PromptLog(args.prompts)
    return workloads.prompts_of_log(log, tokenizer.encode, max_tokens=args.max_tokens, vocab=model.spec.vocab)


def _key(args: argparse.Namespace, model: Any, prompt: CalibrationPrompt) -> str:
    """Names a measurement: another model, dtype, device, length of answers or prompt has another key."""
    asked = (args.model, str(model.dtype), str(model.device), args.answer_tokens)
    packed = repr((*asked, prompt.tokens, prompt.donors, prompt.spans))
    return hashlib.sha256(packed.encode()).hexdigest()[:32]


class _Known:
    """Measurements of earlier runs, one JSON object a line; without a file it remembers nothing."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.measures: dict[str, PromptMeasure] = {}
        if path and Path(path).is_file():
            self._read(Path(path))

    def add(self, key: str, measure: PromptMeasure) -> None:
        if self.path is None:
            return
        try:
            with Path(self.path).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"key": key, "measure": measure.to_record()}) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}", hint="check the permissions") from None

    def _read(self, path: Path) -> None:
        from semblend.materialize.calibrate import PromptMeasure

        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a run that was killed may have left half a line
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
                if "pairs" in record:  # of a version without the dial: measured again
                    continue
                self.measures[record["key"]] = PromptMeasure.from_record(record["measure"])
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path}, line {number} is no measurement", hint="name another --pairs file") from None
