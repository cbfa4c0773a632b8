"""``sembench report``: write a result as one HTML page and as Markdown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from sembench.commands.runs.live_flags import parse_positive
from sembench.files import write_text
from sembench.trust import MIN_WITNESSES
from semblend.cli.output import Progress, say
from semblend.errors import InputError

EXAMPLES = ("sembench report --result result.json --output report.html",)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="draw a result: one HTML page with plots, and Markdown",
        description="Write a result as one HTML page that needs no network, as Markdown, or both.",
    )
    parser.add_argument("--result", required=True, metavar="FILE", help="result to show")
    parser.add_argument(
        "--engine-summary",
        action="append",
        default=[],
        metavar="FILE",
        help="summary of an engine's log to show beside it; may be given several times",
    )
    parser.add_argument("--output", metavar="FILE", help="HTML page to write (default: the result's name with .html)")
    parser.add_argument("--markdown", metavar="FILE", help="Markdown page to write")
    parser.add_argument(
        "--min-witnesses", type=parse_positive, default=MIN_WITNESSES, metavar="N",
        help="independent channels that must state reuse (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--title", metavar="TEXT", help="title of the page (default: the run's id or the result's name)"
    )


def run(args: argparse.Namespace) -> int:
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
    from sembench.gates import read_summary
    from sembench.report import build_view, render_html, render_load_html, render_load_markdown, render_markdown
    from sembench.result import is_load_result, read_load_result, read_result
    from sembench.trust import examine, examine_load

    progress.show(f"reading {args.result}")
    renderers: tuple[Callable[[str], str], Callable[[str], str]]
    if is_load_result(args.result):
        load = read_load_result(args.result)
        progress.show("examining the load")
        found, run_facts = examine_load(load), load.run
        renderers = (
            lambda title: render_load_html(load, title, found),
            lambda title: render_load_markdown(load, title, found),
        )
    else:
        result = read_result(args.result)
        summaries = [read_summary(path) for path in args.engine_summary]
        progress.show(f"examining {len(result.requests)} requests")
        view, run_facts = (
            build_view(result, examine(result, summaries, min_witnesses=args.min_witnesses)), result.run or {}
        )  # fmt: skip
        renderers = (
            lambda title: render_html(view, title, summaries),
            lambda title: render_markdown(view, title, summaries),
        )
    title = args.title or str(run_facts.get("run_id") or Path(args.result).stem)
    written = {}
    for name, path, render in zip(("html", "markdown"), (args.output, args.markdown), renderers, strict=True):
        if path is not None:
            progress.show(f"drawing {path}")
            write_text(path, render(title))
            written[name] = path
    return written
