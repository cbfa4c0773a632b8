"""``sembench assert-result-gates``: exit 0 if all gates pass, else 1 with one line for each failure."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from sembench.files import read_json_object, write_text
from sembench.gates.check import check, observe, read_summary
from sembench.gates.table import GATES, ResultGate
from sembench.result import read_result
from semblend.cli.output import say
from semblend.errors import InputError

_NAMES = {"share": "RATE", "count": "N", "ratio": "X", "number": "X"}


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "assert-result-gates",
        help="check a result against bounds; exit 1 where one is broken",
        description="Check a result against bounds. A requested gate whose metric is missing fails.",
    )
    parser.add_argument("--result", required=True, metavar="FILE", help="result to judge")
    parser.add_argument(
        "--engine-summary", action="append", default=[], metavar="FILE",
        help="summary of an engine's log; repeat it for several engines",
    )  # fmt: skip
    parser.add_argument("--noise-floor-calibration", metavar="FILE", help="from sembench calibrate-noise-floor")
    for gate in GATES:
        if gate.unit == "flag":
            parser.add_argument(gate.flag, action="store_true", help=gate.help)
        else:
            side = "at least" if gate.bound == "min" else "at most"
            parser.add_argument(
                gate.flag, type=_make_bound_reader(gate), metavar=_NAMES[gate.unit], help=f"{side}: {gate.help}"
            )
    parser.add_argument("--allow-missing", action="store_true", help="let a gate pass whose metric nobody observed")
    parser.add_argument(
        "--pessimistic", action="store_true", help="judge the worse end of the 95 %% interval, where there is one"
    )
    parser.add_argument("--output", metavar="FILE", help="write the verdict here too")


def run(args: argparse.Namespace) -> int:
    given = ((gate.name, getattr(args, gate.name)) for gate in GATES)
    # 0 is a bound; only a flag that is not given is none.
    requested = {name: value for name, value in given if value is not None and value is not False}
    if not requested:
        raise InputError("no gate was requested", hint="sembench assert-result-gates --help lists them")
    if args.noise_floor_calibration and args.max_warm_vs_cold_rouge_drop is None:
        raise InputError(
            "--noise-floor-calibration alone gates nothing", hint="add --max-warm-vs-cold-rouge-drop, like 0.05"
        )
    calibration = (
        read_json_object(args.noise_floor_calibration, hint="make it again") if args.noise_floor_calibration else None
    )
    seen = observe(read_result(args.result), [read_summary(path) for path in args.engine_summary], calibration)
    failures, missing = check(seen, requested, allow_missing=args.allow_missing, pessimistic=args.pessimistic)
    asked = {gate.metric for gate in GATES if gate.name in requested}
    verdict: dict[str, Any] = {
        "result": args.result,
        "engine_summaries": args.engine_summary,
        "passed": not failures,
        "failures": failures,
        "observed": {name: value for name, value in sorted(seen.values.items()) if value is not None or name in asked},
        "observed_ci": {name: ci for name in sorted(asked) if (ci := seen.intervals.get(name))},
        "requested_gates": requested,
        "missing_metrics": missing,
        "unverified_metrics": sorted(asked & seen.unverified),
        "allow_missing": args.allow_missing,
    }
    write_verdict(verdict, args.output)
    return 0 if not failures else 1


def write_verdict(verdict: dict[str, Any], output: str | None) -> None:
    text = json.dumps(verdict, indent=2, ensure_ascii=True)
    if output:
        write_text(output, text + "\n")
    print(text)
    for line in verdict["failures"]:
        say(f"gate failed: {line}")
    for name in verdict["missing_metrics"] if verdict["allow_missing"] else ():
        say(f"hint: {name} was not observed; --allow-missing let it pass")
    if verdict["passed"]:
        say(f"all {len(verdict['requested_gates'])} gates pass")


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
