"""What the three commands share: one way to take words, one way to fail.

Standard output is data, standard error is talk. A person's mistake is one line and a hint, never a traceback;
``--debug`` shows the traceback all the same. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from semblend._version import __version__
from semblend.cli.completion import add_completion
from semblend.cli.help_text import HelpFormatter, write_examples
from semblend.errors import SemBlendError
from semblend.extras import DISTRIBUTION, find_extra
from semblend.name_clash import refuse_foreign_distribution

INTERRUPTED = 130
BROKEN_PIPE = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag the way every other mistake is reported, and shows help as `HelpFormatter` does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["formatter_class"] = HelpFormatter
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nhint: {self.name_help()}\n")

    def name_help(self, command: str = "") -> str:
        """The hint for an error that has none of its own."""
        return f"{self.prog} {command} --help shows how it is used".replace("  ", " ")


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def parser_of(package: str, description: str, commands: Sequence[str], examples: Sequence[str] = ()) -> Parser:
    """A command line whose commands are modules of ``<package>.commands`` with ``add(subparsers)``, ``run(args)``.

    A module may hold ``EXAMPLES``, lines that a newcomer would type: they end its ``--help``.
    """
    parser = Parser(prog=package, description=description, epilog=write_examples(examples) if examples else None)
    parser.add_argument("--version", action="version", version=f"{package} {__version__}")
    add_debug(parser)
    add_completion(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name in commands:
        module = importlib.import_module(f"{package}.commands.{name}")
        module.add(subparsers)
        sub = subparsers.choices[_word_for(name)]
        add_debug(sub)
        add_examples(sub, module)
        sub.set_defaults(run=module.run)
    return parser


def add_examples(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    """End the help of a command with the lines that its module shows, where it shows any."""
    if lines := getattr(module, "EXAMPLES", ()):
        parser.epilog = write_examples(lines)


def choose_commands(words: Sequence[str], commands: Sequence[str]) -> tuple[str, ...]:
    """The one command that the words name, so that no other is imported; all of them where they name none.

    >>> choose_commands(["--debug", "run-load", "--rate", "2"], ["build", "runs.run_load"])
    ('runs.run_load',)
    >>> choose_commands([], ["build"])
    ('build',)
    """
    first = next((word for word in words if not word.startswith("-")), "")
    return tuple(name for name in commands if _word_for(name) == first) or tuple(commands)


def _word_for(name: str) -> str:
    """The word that a person types for the command module ``name``, which may lie in a folder."""
    return name.rpartition(".")[2].replace("_", "-")


def run(
    build: Callable[[Sequence[str]], Parser], argv: Sequence[str] | None, *, even_if_foreign: Sequence[str] = ()
) -> int:
    """Parse the words, run the command they name, and return its exit code.

    ``even_if_foreign``: commands that run although the other distribution of our name is installed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a prompt may hold what the terminal cannot show
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build(words)
    try:
        args = parser.parse_args(words)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        return _run_guarded(parser, args, even_if_foreign)
    except SystemExit as leaving:  # argparse leaves this way after --help and after a wrong flag
        return leaving.code if isinstance(leaving.code, int) else 2


def _run_guarded(parser: Parser, args: argparse.Namespace, even_if_foreign: Sequence[str]) -> int:
    try:
        if args.command not in even_if_foreign:
            refuse_foreign_distribution()
        code: int = args.run(args)
        if sys.stdout is not None:  # None where the caller closed it
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _let_go_of_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _let_go_of_output()
            full = SemBlendError(f"cannot write the output: {error.strerror}", hint="is the disk full?")
            return _report(full, debug=False, help_of=parser.name_help(args.command))
        return _report(error, debug=getattr(args, "debug", False), help_of=parser.name_help(args.command))


def _let_go_of_output() -> None:
    """The reader has left (head, less), or there is no room: pointing stdout elsewhere keeps the exit quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, *, debug: bool, help_of: str) -> int:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, SemBlendError):
        message, hint, code = error.message, error.hint or help_of, error.exit_code
    elif isinstance(error, ModuleNotFoundError) and error.name and (extra := find_extra(error.name)):
        message = f"this needs the package {error.name}, which is not installed"
        hint, code = f"pip install '{DISTRIBUTION}[{extra}]'", 2
    else:
        message = f"{type(error).__name__}: {error}"
        hint, code = "this should not happen; run again with --debug and report what it shows", 1
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return code
