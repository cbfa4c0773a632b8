"""``sembench compare``: compare two results item by item."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from sembench.files import write_text
from sembench.result import is_load_result, read_load_result, read_result
from sembench.scoring.compare import compare_loads, compare_results
from semblend.cli.output import Progress, say, table
from semblend.errors import InputError

EXAMPLES = ("sembench compare before.json after.json --fail-on-worse",)
HEAD = ("metric", "n", "base", "new", "change", "95 %", "verdict")


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="tell what changed between two results, and what is only noise",
        description="Compare two results item by item, with 95 % intervals that draw whole documents. A metric is"
        " called better or worse only if that holds among all of them, with one false alarm in 100 comparisons.",
    )
    parser.add_argument("base", metavar="BASE", help="the result to compare with")
    parser.add_argument("new", metavar="NEW", help="the result to judge")
    parser.add_argument("--output", metavar="FILE", help="write the comparison here too")
    parser.add_argument("--fail-on-worse", action="store_true", help="exit 1 where a metric got worse beyond noise")


def run(args: argparse.Namespace) -> int:
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
