"""What an engine's counters did between two snapshots; with --result, whether they bear out what receipts claim.

Exit code 1 when the counters moved by less than the receipts of that arm add up to, or when the snapshots were not
taken around the run.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from sembench.files import read_float, write_json
from sembench.result import ARMS, get_utc_time, read_result
from sembench.witnesses.prometheus import compare_snapshots, read_snapshot, read_snapshot_time
from semblend.cli.output import say

WINDOW_VERSION = "sembench.engine_window.v1"


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "engine-window",
        help="what counters did between two snapshots",
        description=__doc__,
    )
    parser.add_argument("--before", required=True, metavar="FILE", help="snapshot at the start")
    parser.add_argument("--after", required=True, metavar="FILE", help="snapshot at the end")
    parser.add_argument("--output", required=True, metavar="FILE", help="the window, JSON")
    parser.add_argument("--result", default="", metavar="FILE", help="the run that was made in between")
    parser.add_argument("--arm", choices=ARMS, default=None, help="only this arm of the result (default: all)")


def run(args: argparse.Namespace) -> int:
    window: dict[str, Any] = {
        "window_version": WINDOW_VERSION,
        "created_at_utc": get_utc_time(),
        "arm": args.arm,
        "before": args.before,
        "after": args.after,
        "delta": compare_snapshots(read_snapshot(args.before), read_snapshot(args.after)),
    }
    problem = None
    if args.result:
        window |= _sum_claims(args.result, args.arm)
        problem = _find_wrong_time(args) or _find_problem(window["claimed_tokens"], window["delta"])
        window["borne_out"] = None if window["claimed_tokens"] is None else problem is None
    write_json(args.output, window)
    told = {name: value for name, value in window.items() if name in ("claimed_tokens", "borne_out")}
    print(json.dumps({"output": args.output, **told, **window["delta"]}))
    if problem:
        say(f"error: {problem}")
        return 1
    return 0


def _sum_claims(path: str, arm: str | None) -> dict[str, Any]:
    records = [record for record in read_result(path).requests if arm is None or record.arm == arm]
    told = [record.reused_tokens for record in records if record.reused_tokens is not None]
    return {"result": path, "requests": len(records), "claimed_tokens": sum(told) if told else None}


def _find_wrong_time(args: argparse.Namespace) -> str | None:
    """Return why the snapshots are not this run's, or None if the first was taken before it and the last after it."""
    run = read_result(args.result).run or {}
    first, last = read_float(run.get("first_sent_unix_s")), read_float(run.get("last_finished_unix_s"))
    before, after = read_snapshot_time(args.before), read_snapshot_time(args.after)
    if first is None or last is None or before is None or after is None:
        return "the run or the snapshots do not say when they were made, so that nothing ties them together"
    return None if before <= first and last <= after else "the snapshots were not taken around this run"


def _find_problem(claimed: int | None, delta: dict[str, Any]) -> str | None:
    """Return why the counters contradict the claims, or None if they agree or nobody claimed anything."""
    if not claimed:
        return None
    if delta["counter_reset_detected"]:
        return "the engine was restarted between the snapshots: its counters prove nothing"
    known = [delta[name] for name in ("semblend_reused_tokens_delta", "external_prefix_cache_hits_delta")]
    moved = next((value for value in known if value is not None), None)
    if moved is None:
        return f"receipts claim {claimed} reused tokens, the engine has no counter for them"
    return f"receipts claim {claimed} reused tokens, the counters moved by {moved:.0f}" if moved < claimed else None
