"""The ``semblend`` command.

Standard output is data, standard error is talk. A person's mistake is one line and a hint, never a traceback;
``--debug`` shows the traceback all the same. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from semblend._foreign import refuse_foreign_distribution
from semblend._version import __version__
from semblend.commands import calibrate, demo, doctor, donors, estimate, explain, explore, models, serve, version
from semblend.errors import SemBlendError

COMMANDS: tuple[ModuleType, ...] = (
    demo, serve, models, calibrate, explore, explain, estimate, donors, doctor, version,
)  # fmt: skip
INTERRUPTED = 130
BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag the way every other mistake is reported."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nhint: {self.prog} --help shows how it is used\n")


def build_parser() -> Parser:
    """The whole command line; docs/reference/cli.md is generated from it."""
    common = Parser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    parser = Parser(
        prog="semblend",
        description="Find the KV cache that earlier prompts already paid for.",
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"semblend {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for module in COMMANDS:
        summary = (module.__doc__ or "").partition("\n")[0]
        sub = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common],
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a prompt may hold what the terminal cannot show
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        return _run(args)
    except SystemExit as leaving:  # argparse leaves this way after --help and after a wrong flag
        return leaving.code if isinstance(leaving.code, int) else 2


def _run(args: argparse.Namespace) -> int:
    try:
        if args.command != "doctor":  # doctor reports it as one of its rows
            refuse_foreign_distribution()
        code: int = args.run(args)
        if sys.stdout is not None:  # None where the caller closed it
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has left (head, less); pointing stdout elsewhere keeps the interpreter quiet at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:  # ours are turned into SemBlendError where they occur: this is standard output itself
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _report(
            SemBlendError(f"cannot write the output: {error.strerror}", hint="is the disk full?"), debug=False
        )
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
