"""``semblend report``: what reuse did to the time of the first token, from the audit stream of a running engine."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import print_json, say, table
from semblend.errors import InputError

if TYPE_CHECKING:
    from semblend.confirm.receipt import Receipt

EXAMPLES = (
    "SEMBLEND_EVENTS=events.jsonl semblend serve --model smollm2-135m",
    "semblend report events.jsonl",
)


def add(commands: Commands) -> None:
    parser = add_command(commands, "report", run, examples=EXAMPLES)
    parser.add_argument(
        "events", nargs="+", metavar="FILE", help="audit stream (`SEMBLEND_EVENTS`); - reads standard input"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Tell what reuse saved: the time to the first token with it and without, as an interval, by kind of prompt.

    A share of the requests that could reuse something is computed without (`control_share`); the two are compared
    within their kind, in what each request was expected to take without reuse. Below 1 it pays.
    """
    found = summarize(read_receipts(args.events))
    if args.json:
        print_json(found)
        return 0
    if not found["requests"]:
        raise InputError(
            "no receipt was found", hint="set SEMBLEND_EVENTS=FILE where the engine starts, and name FILE here"
        )
    print(write_text(found))
    if not found["kinds"]:
        say(
            f"{found['control']} requests were computed without reuse, to compare: too few of a kind yet "
            "(hint: control_share says how many are drawn)"
        )
    return 0


def read_receipts(files: Sequence[str]) -> Iterator[Receipt]:
    """Every receipt of the files; other lines are passed over."""
    from semblend.confirm.receipt import Receipt
    from semblend.errors import ReceiptError
    from semblend.text.log_lines import open_log, read_lines

    for file in files:
        with open_log(file) as stream:
            for _, line in read_lines(stream):
                try:
                    event = json.loads(line or b"{}")
                    if isinstance(event, dict) and isinstance(event.get("receipt"), dict):
                        yield Receipt.from_dict(event["receipt"])
                except (ValueError, ReceiptError):  # half a line at the end, or of another version
                    continue


def summarize(receipts: Iterator[Receipt]) -> dict[str, Any]:
    """Counts, how far forecasts were off, and the comparison of each kind."""
    from semblend.plan.reuse_plan import DeclineReason
    from semblend.session.trial import Arm, compare

    arms: dict[str, tuple[Arm, Arm]] = {}
    reasons: Counter[str] = Counter()
    requests = reused = control = 0
    errors: list[float] = []
    for one in receipts:
        requests += 1
        reused += one.reused_tokens > 0
        is_control = one.reason is DeclineReason.CONTROL
        control += is_control
        if one.reason is not None:
            reasons[str(one.reason)] += 1
        begun = one.load_ms is not None or one.reused_tokens > 0
        if one.service_ms and one.expected_cold_ms and (begun or is_control):
            pair = arms.setdefault(one.kind, (Arm(), Arm()))
            pair[is_control].add(one.service_ms / one.expected_cold_ms, one.service_ms)
            if one.reused_tokens and one.expected_ms:
                errors.append(abs(one.expected_ms / one.service_ms - 1))
    kinds = [found for kind, pair in arms.items() if (found := compare(kind, *pair)) is not None]
    return {
        "requests": requests,
        "reused": reused,
        "control": control,
        "declines": dict(reasons.most_common()),
        "median_forecast_error": sorted(errors)[len(errors) // 2] if errors else None,
        "kinds": [
            {
                "kind": one.kind,
                "with": one.with_count,
                "without": one.without_count,
                "with_ms": round(one.with_ms, 2),
                "without_ms": round(one.without_ms, 2),
                "ratio": round(one.ratio, 4),
                "low": round(one.low, 4),
                "high": round(one.high, 4),
            }
            for one in sorted(kinds, key=lambda one: -one.with_count)
        ],
    }


def write_text(found: dict[str, Any]) -> str:
    """The same for people."""
    declines = ", ".join(f"{reason} {count}" for reason, count in found["declines"].items()) or "none"
    lines = [f"{found['requests']} requests, {found['reused']} reused something; declined: {declines}"]
    if found["median_forecast_error"] is not None:
        lines.append(f"forecasts of reuse were off by {found['median_forecast_error']:.0%} at the median")
    if found["kinds"]:
        rows = [
            (one["kind"], one["with"], one["without"], f"{one['with_ms']:.1f}", f"{one['without_ms']:.1f}",
             f"{one['ratio']:.2f} [{one['low']:.2f}, {one['high']:.2f}]")
            for one in found["kinds"]
        ]  # fmt: skip
        head = ("kind", "with", "without", "ms with", "ms without", "time with over without, 95 %")
        lines += ["", table(rows, head=head, right=(1, 2, 3, 4, 5))]
    return "\n".join(lines)
