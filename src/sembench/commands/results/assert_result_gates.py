"""Check a result: exit 0 if all gates pass, else 1 with one line for each failure.

Every reason not to believe the result fails too, by its name (docs/METRICS.md lists them). Without any gate, that is
all that is checked: the default gates. A requested gate whose metric is missing fails.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sembench.commands.runs.live_flags import parse_positive
from sembench.files import read_json_object, write_text
from sembench.gates import GATES, LOAD_GATES, ResultGate, check, check_load, observe, read_summary
from sembench.result import is_load_result, read_load_result, read_result
from sembench.trust import INTEGRITY, MIN_WITNESSES, Examination, Finding, examine, examine_load
from semblend.cli.output import say
from semblend.errors import InputError

_NAMES = {"share": "RATE", "count": "N", "ratio": "X", "number": "X"}

EXAMPLES = ("sembench assert-result-gates --result result.json --min-hit-only-ttft-speedup 1.5",)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "assert-result-gates",
        help="check a result against bounds; exit 1 where one is broken",
        description=__doc__,
    )
    parser.add_argument("--result", required=True, metavar="FILE", help="result to judge")
    parser.add_argument(
        "--engine-summary", action="append", default=[], metavar="FILE",
        help="summary of an engine's log; repeat it for several engines",
    )  # fmt: skip
    parser.add_argument("--noise-floor-calibration", metavar="FILE", help="from sembench calibrate-noise-floor")
    parser.add_argument("--manifest", default="", metavar="FILE", help="the manifest that the run must be made with")
    parser.add_argument(
        "--min-witnesses", type=parse_positive, default=MIN_WITNESSES, metavar="N",
        help="independent channels (answer, counters, engine log) that must state reuse (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--only-requested",
        action="store_true",
        help="doubts about what was measured do not fail; edited files still do",
    )
    _add_gates(parser, GATES)
    _add_gates(parser.add_argument_group("of a load result, at every point"), LOAD_GATES)
    parser.add_argument("--allow-missing", action="store_true", help="let a gate pass whose metric nobody observed")
    parser.add_argument(
        "--pessimistic", action="store_true", help="judge the worse end of the 95 %% interval, where there is one"
    )
    parser.add_argument("--output", metavar="FILE", help="write the verdict here too")


def _add_gates(parser: argparse._ActionsContainer, gates: Sequence[ResultGate]) -> None:
    for gate in gates:
        if gate.unit == "flag":
            parser.add_argument(gate.flag, action="store_true", help=gate.help)
        else:
            side = "at least" if gate.bound == "min" else "at most"
            parser.add_argument(
                gate.flag, type=_make_bound_reader(gate), metavar=_NAMES[gate.unit], help=f"{side}: {gate.help}"
            )


def run(args: argparse.Namespace) -> int:
    requested, of_load = _list_requested(args, GATES), _list_requested(args, LOAD_GATES)
    if is_load_result(args.result):
        _refuse_flags(requested, "a load result", "sembench run-live-gateway makes what they need")
        return _judge_load(args, of_load)
    _refuse_flags(of_load, "a result of single requests", "sembench run-load makes what they need")
    if args.noise_floor_calibration and args.max_warm_vs_cold_rouge_drop is None:
        raise InputError(
            "--noise-floor-calibration alone gates nothing", hint="add --max-warm-vs-cold-rouge-drop, like 0.05"
        )
    calibration = (
        read_json_object(args.noise_floor_calibration, hint="make it again") if args.noise_floor_calibration else None
    )
    result, summaries = read_result(args.result), [read_summary(path) for path in args.engine_summary]
    examined = examine(
        result, summaries, min_witnesses=args.min_witnesses, manifest=args.manifest, calibration=calibration
    )
    seen = observe(result, examined, calibration)
    failures, missing = check(seen, requested, allow_missing=args.allow_missing, pessimistic=args.pessimistic)
    counted = select_failing(examined, default=not requested, only_requested=args.only_requested)
    failures = [finding.to_line() for finding in counted] + failures
    asked = {gate.metric for gate in GATES if gate.name in requested}
    verdict: dict[str, Any] = {
        "result": args.result,
        "engine_summaries": args.engine_summary,
        "passed": not failures,
        "doubts": [{"name": str(one.doubt), "words": one.words} for one in examined.findings],
        "min_witnesses": args.min_witnesses,
        "failures": failures,
        "observed": {name: value for name, value in sorted(seen.values.items()) if value is not None or name in asked},
        "observed_ci": {name: ci for name in sorted(asked) if (ci := seen.intervals.get(name))},
        "requested_gates": requested,
        "missing_metrics": missing,
        "allow_missing": args.allow_missing,
    }
    write_verdict(verdict, args.output)
    return 0 if not failures else 1


def _list_requested(args: argparse.Namespace, gates: Sequence[ResultGate]) -> dict[str, float | bool]:
    given = ((gate.name, getattr(args, gate.name)) for gate in gates)
    # 0 is a bound; only a flag that is not given is none.
    return {name: value for name, value in given if value is not None and value is not False}


def _refuse_flags(requested: Mapping[str, object], what: str, hint: str) -> None:
    if requested:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in requested)
        raise InputError(f"{flags} cannot be judged on {what}", hint=hint)


def _judge_load(args: argparse.Namespace, requested: Mapping[str, float | bool]) -> int:
    result = read_load_result(args.result)
    findings = examine_load(result)
    failures, missing = check_load(result, requested)
    failures = [finding.to_line() for finding in findings] + failures
    verdict: dict[str, Any] = {
        "result": args.result,
        "passed": not failures,
        "doubts": [{"name": str(one.doubt), "words": one.words} for one in findings],
        "failures": failures,
        "requested_gates": dict(requested),
        "missing_metrics": missing,
        "allow_missing": False,
    }
    write_verdict(verdict, args.output)
    return 0 if not failures else 1


def select_failing(examined: Examination, *, default: bool, only_requested: bool) -> list[Finding]:
    """Return the findings that fail: all of them by default; beside requested gates, what was shown to be wrong."""
    if default and not only_requested:
        return list(examined.findings)
    return [one for one in examined.grave if one.doubt in INTEGRITY or not only_requested]


def write_verdict(verdict: dict[str, Any], output: str | None) -> None:
    text = json.dumps(verdict, indent=2, ensure_ascii=True)
    if output:
        write_text(output, text + "\n")
    print(text)
    for line in verdict["failures"]:
        say(f"gate failed: {line}")
    for name in verdict["missing_metrics"] if verdict["allow_missing"] else ():
        say(f"hint: {name} was not observed; --allow-missing let it pass")
    if verdict["passed"] and verdict["requested_gates"]:
        say(f"all {len(verdict['requested_gates'])} gates pass")
    elif verdict["passed"]:
        say("the default gates pass: no reason was found not to believe this result")


def _make_bound_reader(gate: ResultGate) -> Callable[[str], float]:
    """Return a function that parses a bound and refuses values that a metric of this unit cannot have."""

    def read(text: str) -> float:
        try:
            value = int(text) if gate.unit == "count" else float(text)
        except ValueError:
            kind = "a whole number" if gate.unit == "count" else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} bounds nothing")
        if gate.unit == "share" and not 0 <= value <= 1:
            raise argparse.ArgumentTypeError(f"{text!r} is no share between 0 and 1")
        if gate.unit in ("count", "ratio") and value < 0:
            raise argparse.ArgumentTypeError(f"{text!r} is below 0")
        return value

    return read
