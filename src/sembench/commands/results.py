"""Commands that read result files: merge, gates, comparison, report. None of them talks to a server."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sembench.commands.live import describe_window, parse_positive, summarize_result
from sembench.files import read_json_object, write_text
from sembench.gates import GATES, LOAD_GATES, ResultGate, check, check_load, observe, read_summary
from sembench.result import RequestRecord, Result, is_load_result, read_load_result, read_result, write_result
from sembench.scoring.aggregate import build_result
from sembench.scoring.answers import ComparableAnswer, score_against_cold
from sembench.scoring.compare import compare_loads, compare_results
from sembench.trust import INTEGRITY, MIN_WITNESSES, examine, examine_load
from sembench.witnesses.audit import AuditLog, join_all
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, say, table
from semblend.cli.shared_flags import MANY
from semblend.errors import InputError


def add(commands: Commands) -> None:
    _add_merge_results(commands)
    _add_assert_result_gates(commands)
    _add_compare(commands)
    _add_report(commands)


# -- merge-results ---------------------------------------------------------------------------------------------------


def _add_merge_results(commands: Commands) -> None:
    parser = add_command(commands, "merge-results", merge_results, "join a cold and a warm run of one manifest")
    flag = parser.add_argument
    flag("--cold", required=True, metavar="FILE", help="result of the run without donors")
    flag("--warm", required=True, metavar="FILE", help="result of the run with donors")
    flag("--rerun", default="", metavar="FILE", help="result of a second cold run, which measures the noise")
    flag("--output", required=True, metavar="FILE", help="the paired result, JSON")
    flag("--run-id", default="", metavar="NAME", help="name of the run (default: that of the warm run)")
    flag("--allow-unpaired", action="store_true", help="leave cases out that only one run has")
    flag("--connector-audit", **MANY, metavar="FILE", help="audit files that the connector wrote, JSONL")


def merge_results(args: argparse.Namespace) -> int:
    """Join the records of two runs by case, measure warm against cold, and write one paired result."""
    cold, warm = read_result(args.cold), read_result(args.warm)
    runs = {"cold": cold, "warm": warm} | ({"rerun": read_result(args.rerun)} if args.rerun else {})
    _check_same_work(runs)
    by_arm = {arm: {record.item_id: record for record in result.requests} for arm, result in runs.items()}
    common = [item for item in by_arm["cold"] if all(item in records for records in by_arm.values())]
    lonely = len({item for records in by_arm.values() for item in records}) - len(common)
    if lonely and not args.allow_unpaired:
        raise InputError(f"{lonely} cases are not in every run", hint="run them all, or pass --allow-unpaired")
    if lonely:
        say(f"note: {lonely} cases are left out, since not every run has them")
    records = [record for item in common for record in _join_arms({arm: by_arm[arm][item] for arm in by_arm})]
    if args.connector_audit:
        log = AuditLog.read(args.connector_audit)
        records = join_all(records, log, _read_block_size(warm))
    result = build_result(
        records,
        run={
            **(warm.run or {}),
            "arm": "paired",
            **({"run_id": args.run_id} if args.run_id else {}),
            **describe_window(records),
            "sessions": [session for one in runs.values() for session in _list_sessions(one)],
        },
        config={**warm.config, "merged_from": {arm: (one.run or {}).get("run_id") for arm, one in runs.items()}},
        engine=warm.engine,
    )
    write_result(args.output, result)
    print(json.dumps(summarize_result(result, args.output)))
    return 0


def _list_sessions(result: Result) -> list[Any]:
    """Return the sessions of a run; arms that were measured on different servers are found by them."""
    sessions = (result.run or {}).get("sessions")
    return list(sessions) if isinstance(sessions, list) else []


def _read_block_size(result: Result) -> int:
    size = result.config.get("block_size")
    if not isinstance(size, int) or size < 1:
        raise InputError("the warm run does not say its block size", hint="run it again with this version")
    return size


def _check_same_work(runs: dict[str, Result]) -> None:
    """Refuse runs of different manifests or versions: they cannot be paired."""
    for name in ("manifest_sha256", "sembench_version"):
        values = {str((result.run or {}).get(name)) for result in runs.values()}
        if len(values) > 1:
            raise InputError(
                f"the runs differ in {name}: {', '.join(sorted(values))}", hint="merge runs of one manifest and version"
            )


def _join_arms(arms: dict[str, RequestRecord]) -> list[RequestRecord]:
    cold = arms["cold"]
    records = [replace(cold, arm="cold", pair_id=cold.item_id)]
    for arm in ("warm", "rerun"):
        if arm in arms:
            record = replace(arms[arm], arm=arm, pair_id=cold.item_id)
            comparable = cold.error is None and record.error is None
            said = ComparableAnswer.from_record
            records.append(score_against_cold(record, said(record), said(cold)) if comparable else record)
    return records


# -- assert-result-gates ---------------------------------------------------------------------------------------------


_NAMES = {"share": "RATE", "count": "N", "ratio": "X", "number": "X"}


def _add_assert_result_gates(commands: Commands) -> None:
    parser = add_command(
        commands,
        "assert-result-gates",
        assert_result_gates,
        "check a result against bounds; exit 1 where one is broken",
        examples=["sembench assert-result-gates --result result.json --min-hit-only-ttft-speedup 1.5"],
    )
    flag = parser.add_argument
    flag("--result", required=True, metavar="FILE", help="result to judge")
    _add_evidence_flags(parser)
    flag("--noise-floor-calibration", metavar="FILE", help="from sembench calibrate-noise-floor")
    flag("--manifest", default="", metavar="FILE", help="the manifest that the run must be made with")
    flag(
        "--only-requested",
        action="store_true",
        help="doubts about what was measured do not fail; edited files still do",
    )
    _add_gates(parser, GATES)
    _add_gates(parser.add_argument_group("of a load result, at every point"), LOAD_GATES)
    flag("--allow-missing", action="store_true", help="let a gate pass whose metric nobody observed")
    flag("--pessimistic", action="store_true", help="judge the worse end of the 95 %% interval, where there is one")
    flag("--output", metavar="FILE", help="write the verdict here too")


def _add_evidence_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine-summary",
        action="append",
        default=[],
        metavar="FILE",
        help="summary of an engine's log; repeat it for several engines",
    )
    parser.add_argument(
        "--min-witnesses",
        type=parse_positive,
        default=MIN_WITNESSES,
        metavar="N",
        help="independent channels (answer, counters, engine log) that must state reuse (default: 2)",
    )


def _add_gates(parser: argparse._ActionsContainer, gates: Sequence[ResultGate]) -> None:
    for gate in gates:
        if gate.unit == "flag":
            parser.add_argument(gate.flag, action="store_true", help=gate.help)
        else:
            side = "at least" if gate.bound == "min" else "at most"
            parser.add_argument(
                gate.flag, type=_make_bound_reader(gate), metavar=_NAMES[gate.unit], help=f"{side}: {gate.help}"
            )


def assert_result_gates(args: argparse.Namespace) -> int:
    """Check a result: exit 0 if all gates pass, else 1 with one line for each failure.

    Every reason not to believe the result fails too, by its name (docs/METRICS.md lists them). Without any gate, that
    is all that is checked: the default gates. A requested gate whose metric is missing fails.
    """
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
    counted = examined.findings if not requested and not args.only_requested else examined.grave
    asked = {gate.metric: seen.values[gate.metric] for gate in GATES if gate.name in requested}
    values = sorted((name, found.value) for name, found in seen.values.items())
    verdict = {
        "engine_summaries": args.engine_summary,
        "min_witnesses": args.min_witnesses,
        "doubts": examined.findings,
        "failures": [one.to_line() for one in counted if one.doubt in INTEGRITY or not args.only_requested] + failures,
        "observed": {name: value for name, value in values if value is not None or name in asked},
        "observed_ci": {name: found.ci for name, found in sorted(asked.items()) if found.ci},
        "requested_gates": requested,
        "missing_metrics": missing,
        "allow_missing": args.allow_missing,
    }
    return _write_verdict(args, verdict)


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
    verdict = {
        "doubts": findings,
        "failures": [finding.to_line() for finding in findings] + failures,
        "requested_gates": requested,
        "missing_metrics": missing,
        "allow_missing": False,
    }
    return _write_verdict(args, verdict)


def _write_verdict(args: argparse.Namespace, verdict: dict[str, Any]) -> int:
    """Write the verdict, say why it is so, and return the exit code."""
    passed = not verdict["failures"]
    doubts = [{"name": str(one.doubt), "words": one.words} for one in verdict["doubts"]]
    _write({"result": args.result, "passed": passed, **verdict, "doubts": doubts}, args.output)
    for line in verdict["failures"]:
        say(f"gate failed: {line}")
    for name in verdict["missing_metrics"] if verdict["allow_missing"] else ():
        say(f"hint: {name} was not observed; --allow-missing let it pass")
    if passed and verdict["requested_gates"]:
        say(f"all {len(verdict['requested_gates'])} gates pass")
    elif passed:
        say("the default gates pass: no reason was found not to believe this result")
    return 0 if passed else 1


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


# -- compare ---------------------------------------------------------------------------------------------------------

HEAD = ("metric", "n", "base", "new", "change", "95 %", "verdict")


def _add_compare(commands: Commands) -> None:
    parser = add_command(
        commands,
        "compare",
        compare,
        "tell what changed between two results, and what is only noise",
        examples=["sembench compare before.json after.json --fail-on-worse"],
    )
    flag = parser.add_argument
    flag("base", metavar="BASE", help="the result to compare with")
    flag("new", metavar="NEW", help="the result to judge")
    flag("--output", metavar="FILE", help="write the comparison here too")
    flag("--fail-on-worse", action="store_true", help="exit 1 where a metric got worse beyond noise")


def compare(args: argparse.Namespace) -> int:
    """Compare two results item by item, with 95 % intervals that draw whole documents. A metric is called better or
    worse only if that holds among all of them, with one false alarm in 100 comparisons.
    """
    kinds = [is_load_result(path) for path in (args.base, args.new)]
    if any(kinds):
        if not all(kinds):
            raise InputError("one file is a load result and the other is not", hint="compare two of one kind")
        return _compare_loads(args)
    found = {"base": args.base, "new": args.new, **_compare_files(args, read_result, compare_results)}
    _write(found, args.output)
    _print_comparison(found)
    return _judge_worse((*found["metrics"], *found["negative_controls"]), args.fail_on_worse)


def _compare_loads(args: argparse.Namespace) -> int:
    found = {"base": args.base, "new": args.new, **_compare_files(args, read_load_result, compare_loads)}
    _write(found, args.output)
    for line in found["setup_differences"]:
        say(f"hint: not the same set-up: {line}")
    for point in found["points"]:
        say(f"{point['name']}: {point['requests']} requests in both")
        say(table([_format_row(row) for row in point["metrics"]], head=HEAD, right=(1, 2, 3, 4)))
    return _judge_worse([row for point in found["points"] for row in point["metrics"]], args.fail_on_worse)


def _compare_files(
    args: argparse.Namespace, read: Callable[[str], Any], compare: Callable[[Any, Any], dict[str, Any]]
) -> dict[str, Any]:
    """Read both results and compare them, with a line on the terminal that says which part is under way."""
    with Progress() as progress:
        progress.show(f"1 of 3: reading {args.base}")
        base = read(args.base)
        progress.show(f"2 of 3: reading {args.new}")
        new = read(args.new)
        progress.show("3 of 3: drawing documents again and again, for the intervals")
        return compare(base, new)


def _write(found: dict[str, Any], output: str | None) -> None:
    text = json.dumps(found, indent=2, ensure_ascii=True)
    if output:
        write_text(output, text + "\n")
    print(text)


def _judge_worse(rows: Sequence[dict[str, Any]], fail: bool) -> int:
    worse = list(dict.fromkeys(row["metric"] for row in rows if row["verdict"] == "worse"))
    if fail and worse:
        say(f"gate failed: worse beyond noise: {', '.join(worse)}")
        return 1
    return 0


def _print_comparison(found: dict[str, Any]) -> None:
    say(f"{found['items_shared']} items of {found['sources']} sources in both results")
    for side in ("base", "new"):
        if found[f"items_only_in_{side}"]:
            say(f"hint: {found[f'items_only_in_{side}']} items are only in {found[side]} and were left out")
    for line in found["setup_differences"]:
        say(f"hint: not the same set-up: {line}")
    rows = [_format_row(row) for row in found["metrics"]]
    rows += [(f"negatives: {first}", *rest) for first, *rest in map(_format_row, found["negative_controls"])]
    if rows:
        say(table(rows, head=HEAD, right=(1, 2, 3, 4)))


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row["kind"] == "ratio"
    change = f"×{row['change']:.3f}" if ratio else f"{row['change']:+.4f}"
    ci = row["change_ci"]
    spread = "" if ci is None else (f"×{ci[0]:.3f} to ×{ci[1]:.3f}" if ratio else f"{ci[0]:+.4f} to {ci[1]:+.4f}")
    name = row["metric"]
    return name, str(row["n"]), f"{row['base']:.4g}", f"{row['new']:.4g}", change, spread, row["verdict"]


# -- report ----------------------------------------------------------------------------------------------------------


def _add_report(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        report,
        "draw a result: one HTML page with plots, and Markdown",
        examples=["sembench report --result result.json --output report.html"],
    )
    flag = parser.add_argument
    flag("--result", required=True, metavar="FILE", help="result to show")
    _add_evidence_flags(parser)
    flag("--output", metavar="FILE", help="HTML page to write (default: the result's name with .html)")
    flag("--markdown", metavar="FILE", help="Markdown page to write")
    flag("--title", metavar="TEXT", help="title of the page (default: the run's id or the result's name)")


def report(args: argparse.Namespace) -> int:
    """Write a result as one HTML page that needs no network, as Markdown, or both."""
    if args.output is None and args.markdown is None:
        args.output = str(Path(args.result).with_suffix("")) + ".html"
    for path in (args.output, args.markdown):
        if path is not None and Path(path).resolve() == Path(args.result).resolve():
            raise InputError(f"{path} is the result itself", hint="name another file for the page")
    with Progress() as progress:
        written = _write_pages(args, progress)
    for path in written.values():
        say(f"wrote {path}")
    print(json.dumps(written))
    return 0


def _write_pages(args: argparse.Namespace, progress: Progress) -> dict[str, str]:
    """Read, examine and draw the result; the names of the written files by their kind."""
    from sembench.report import build_load_report, build_report, build_view

    progress.show(f"reading {args.result}")
    name = Path(args.result).stem
    if is_load_result(args.result):
        load = read_load_result(args.result)
        progress.show("examining the load")
        shown = build_load_report(load, args.title or str(load.run.get("run_id") or name), examine_load(load))
    else:
        result = read_result(args.result)
        summaries = [read_summary(path) for path in args.engine_summary]
        progress.show(f"examining {len(result.requests)} requests")
        view = build_view(result, examine(result, summaries, min_witnesses=args.min_witnesses))
        shown = build_report(view, args.title or str((result.run or {}).get("run_id") or name), summaries)
    written = {}
    for kind, path in (("html", args.output), ("markdown", args.markdown)):
        if path is not None:
            progress.show(f"drawing {path}")
            write_text(path, getattr(shown, kind))
            written[kind] = path
    return written
