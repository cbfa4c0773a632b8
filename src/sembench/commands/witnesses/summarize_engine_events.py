"""``sembench summarize-engine-events``: count what an engine's log proves."""

from __future__ import annotations

import argparse
import json
from typing import Any

from sembench.files import write_text
from sembench.witnesses.engine_events import ENGINES, summarize_file
from semblend.cli.output import say


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "summarize-engine-events",
        help="count reuse and errors in an engine's log or audit file",
        description="Count donors, hits, loads, materialized KV and errors in an engine's log, each event once.",
    )
    parser.add_argument("--engine", required=True, choices=ENGINES, help="whose lines these are")
    parser.add_argument("--input", required=True, metavar="FILE", help="log or audit JSONL to read; .gz is unpacked")
    parser.add_argument("--output", metavar="FILE", help="write the summary here; without it, to standard output")
    parser.add_argument("--skip-bad", action="store_true", help="count broken audit lines and go on")


def run(args: argparse.Namespace) -> int:
    summary = summarize_file(args.engine, args.input, skip_bad=args.skip_bad)
    write_summary(summary, args.output)
    return 0


def write_summary(summary: dict[str, Any], output: str | None) -> None:
    """Write the summary to a file and one line to standard error; without a file, all of it to standard output."""
    text = json.dumps(summary, indent=2, ensure_ascii=True)
    if output is None:
        print(text)
        return
    write_text(output, text + "\n")
    say(format_summary(summary))
    print(json.dumps({"output": output, "materialized_tokens": summary["materialized_tokens"]}))


def format_summary(summary: dict[str, Any]) -> str:
    return (
        f"{summary['engine']}: {summary['lines']} lines, {summary['donor_registrations']} donors, "
        f"{summary['semantic_hits']} hits, {summary['materialization_events']} materializations with "
        f"{summary['materialized_tokens']} tokens, {summary['errors']} errors"
    )
