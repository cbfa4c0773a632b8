"""``sembench report``: write a result as one HTML page and as Markdown."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sembench.files import write_text
from semblend.cli.output import say
from semblend.errors import InputError


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="draw a result: one HTML page with plots, and Markdown",
        description="Write a result as one HTML page that needs no network, as Markdown, or both.",
    )
    parser.add_argument("--result", required=True, metavar="FILE", help="result to show")
    parser.add_argument(
        "--engine-summary", action="append", default=[], metavar="FILE", help="engine summary to show beside it; repeat"
    )
    parser.add_argument("--output", metavar="FILE", help="HTML page; the result's name with .html if nothing is named")
    parser.add_argument("--markdown", metavar="FILE", help="Markdown page")
    parser.add_argument("--title", help="title; the run's id or the result's name if absent")


def run(args: argparse.Namespace) -> int:
    from sembench.gates.check import read_summary
    from sembench.report import build_view, render_html, render_markdown
    from sembench.result import read_result

    if args.output is None and args.markdown is None:
        args.output = str(Path(args.result).with_suffix("")) + ".html"
    for path in (args.output, args.markdown):
        if path is not None and Path(path).resolve() == Path(args.result).resolve():
            raise InputError(f"{path} is the result itself", hint="name another file for the page")
    result = read_result(args.result)
    summaries = [read_summary(path) for path in args.engine_summary]
    view = build_view(result)
    title = args.title or str((result.run or {}).get("run_id") or Path(args.result).stem)
    written = {}
    for name, path, write in (("html", args.output, render_html), ("markdown", args.markdown, render_markdown)):
        if path is not None:
            text = write(view, title, summaries)
            write_text(path, text)
            written[name] = path
            say(f"wrote {path}")
    print(json.dumps(written))
    return 0
