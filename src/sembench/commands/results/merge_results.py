"""``sembench merge-results``: join a cold and a warm run, made separately, into pairs."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from sembench.live.session import describe_window, summarize_result
from sembench.result import RequestRecord, Result, read_result, write_result
from sembench.scoring.aggregate import build_result
from sembench.scoring.answers import ComparableAnswer, score_against_cold
from sembench.witnesses.audit import AuditLog, join_all
from semblend.cli.output import say
from semblend.errors import InputError


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "merge-results",
        help="join a cold and a warm run of one manifest",
        description="Join the records of two runs by case, measure warm against cold, and write one paired result.",
    )
    parser.add_argument("--cold", required=True, metavar="FILE", help="result of the run without donors")
    parser.add_argument("--warm", required=True, metavar="FILE", help="result of the run with donors")
    parser.add_argument(
        "--rerun", default="", metavar="FILE", help="result of a second cold run, which measures the noise"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the paired result, JSON")
    parser.add_argument("--run-id", default="", metavar="NAME", help="name of the run (default: that of the warm run)")
    parser.add_argument("--allow-unpaired", action="store_true", help="leave cases out that only one run has")
    parser.add_argument(
        "--connector-audit",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="audit files that the connector wrote, JSONL",
    )


def run(args: argparse.Namespace) -> int:
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
