"""The ``semantickv`` command: what a cache should keep. Everything it reports is simulated.

Standard output is data, standard error is talk. Exit codes: 0 done, 1 a check failed, 2 usage, 130 interrupted. A
command is a module of `semantickv.commands` with ``add(subparsers)`` and ``run(args) -> int``; it is imported only when
it is asked for, or when help lists them all.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from semblend._foreign import refuse_foreign_distribution
from semblend._version import __version__
from semblend.errors import SemBlendError

COMMANDS = ("experiment", "replay", "advise", "collect", "workload", "segment", "policies", "check")
INTERRUPTED = 130
BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag the way every other mistake is reported."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nhint: {self.prog} --help shows how it is used\n")


def module_of(command: str) -> str:
    return f"semantickv.commands.{command}"


def build_parser(only: str | None = None) -> Parser:
    """The whole command line, or that of one command; docs/reference is generated from it."""
    parser = Parser(
        prog="semantickv", description="What a cache should keep, and how much memory it needs (simulated)."
    )
    parser.add_argument("--version", action="version", version=f"semantickv {__version__}")
    _add_debug(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name in COMMANDS if only is None else (only,):
        module = importlib.import_module(module_of(name))
        module.add(subparsers)
        sub = subparsers.choices[name.replace("_", "-")]
        _add_debug(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a prompt may hold what the terminal cannot show
    words = list(sys.argv[1:] if argv is None else argv)
    first = next((word for word in words if not word.startswith("-")), "").replace("-", "_")
    parser = build_parser(first if first in COMMANDS else None)
    try:
        args = parser.parse_args(words)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        return _run(args)
    except SystemExit as leaving:  # argparse leaves this way after --help and after a wrong flag
        return leaving.code if isinstance(leaving.code, int) else 2


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def _run(args: argparse.Namespace) -> int:
    try:
        refuse_foreign_distribution()
        code: int = args.run(args)
        if sys.stdout is not None:  # None where the caller closed it
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has left (head, less); pointing stdout elsewhere keeps the interpreter quiet at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _report(error, debug=getattr(args, "debug", False))


def _report(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, SemBlendError):
        message, hint, code = error.message, error.hint, error.exit_code
    else:
        message = f"{type(error).__name__}: {error}"
        hint, code = "this should not happen; run again with --debug and report what it shows", 1
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
