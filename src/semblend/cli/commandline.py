"""What the three command lines share: one way to declare commands, one way to show help, one way to fail.

A command line is a table of words and modules. A module has ``add(commands)``, which declares its commands with
`add_command` and plain argparse; it is imported only when one of its words is typed, or when help lists them all.

Standard output is data, standard error is talk. A person's mistake is one line and a hint, never a traceback;
``--debug`` shows the traceback all the same. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from semblend._version import __version__
from semblend.errors import SemBlendError
from semblend.extras import DISTRIBUTION, find_extra
from semblend.name_clash import refuse_foreign_distribution

INTERRUPTED = 130
BROKEN_PIPE = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
Run = Callable[[argparse.Namespace], int]


class HelpFormatter(argparse.HelpFormatter):
    """Wraps a description paragraph by paragraph and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        parts = text.strip().split("\n\n")
        return "\n\n".join(part if part.startswith("examples:") else wrap(part, width, indent) for part in parts)


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag the way every other mistake is reported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["formatter_class"] = HelpFormatter
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nhint: {self.name_help()}\n")

    def name_help(self, command: str = "") -> str:
        """The hint for an error that has none of its own."""
        return f"{self.prog} {command} --help shows how it is used".replace("  ", " ")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


# -- declaring -----------------------------------------------------------------------------------------------------


def build_parser(
    package: str, description: str, modules: Mapping[str, str], words: Sequence[str], examples: Sequence[str]
) -> Parser:
    """The command line whose ``modules`` (by command) lie in ``<package>.commands``: of the command that ``words``
    name, or all of it.
    """
    parser = Parser(prog=package.partition(".")[0], description=description, epilog=_list_examples(examples))
    parser.add_argument("--version", action="version", version=f"{parser.prog} {__version__}")
    _add_debug(parser)
    parser.add_argument(
        "--completion", choices=SHELLS, action=_CompletionAction, metavar="SHELL",
        help=f'print completion for {", ".join(SHELLS)}; in bash: eval "$({parser.prog} --completion bash)"',
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    typed = next((word for word in words if not word.startswith("-")), "")
    for name in [modules[typed]] if typed in modules else dict.fromkeys(modules.values()):
        importlib.import_module(f"{package}.commands.{name}").add(commands)
    for command in commands.choices.values():
        _add_debug(command)
        _finish_help(command)
    return parser


def add_command(commands: Commands, name: str, run: Run, summary: str = "", *, examples: Sequence[str] = ()) -> Parser:
    """Declare a command and return its parser, to which the caller adds flags.

    The docstring of ``run`` is what its help says. ``summary`` is its line in the list of all commands, by default the
    docstring's first line.
    """
    description = inspect.getdoc(run) or ""
    summary = summary or description[:1].lower() + description.partition("\n")[0][1:].rstrip(".")
    parser = commands.add_parser(name, help=summary, description=description, epilog=_list_examples(examples))
    parser.set_defaults(run=run)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def _list_examples(lines: Sequence[str]) -> str | None:
    return "\n".join(["examples:", *(f"  {line}" for line in lines)]) if lines else None


# -- help ----------------------------------------------------------------------------------------------------------

MANY_FLAGS = 8
LONG_CHOICES = 32


def _finish_help(parser: argparse.ArgumentParser) -> None:
    """Name the values of flags, list long choices, add defaults; a usage of many flags shows those that are needed."""
    flags = [action for action in parser._actions if action.option_strings]
    for action in parser._actions:
        if action.nargs == 0:
            continue
        listed = ",".join(map(str, action.choices or ()))
        if action.metavar is None and len(listed) > LONG_CHOICES:
            action.metavar = "NAME"
            action.help = f"{action.help}; one of {listed.replace(',', ', ')}"
        elif action.metavar is None and action.option_strings:
            action.metavar = f"{{{listed}}}" if listed else _name_value(action)
        default = action.default
        if "default" not in (action.help or "") and default not in (None, "", [], (), argparse.SUPPRESS):
            action.help = f"{action.help} (default: {f'{default:g}' if isinstance(default, float) else '%(default)s'})"
    if len(flags) > MANY_FLAGS:
        needed = [_name_flag(flag) for flag in flags if flag.required]
        needed += [
            f"({' | '.join(_name_flag(flag) for flag in group._group_actions)})"
            for group in parser._mutually_exclusive_groups
            if group.required
        ]
        given = [str(one.metavar or one.dest) for one in parser._actions if not one.option_strings]
        parser.usage = " ".join(["%(prog)s", *needed, *given, "[options]"])


def _name_flag(action: argparse.Action) -> str:
    return f"{action.option_strings[0]} {action.metavar}"


def _name_value(action: argparse.Action) -> str:
    """The word that stands for a flag's value where it has no metavar and no choices."""
    named = {int: "N", float: "X"}.get(action.type) if isinstance(action.type, type) else None
    return named or action.dest.rpartition("_")[2].upper()


# -- completion ----------------------------------------------------------------------------------------------------

SHELLS = ("bash", "zsh", "fish")
_BASH = """\
_{name}_complete() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command="" words="" word
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
        case "$word" in -*) ;; *) command="$word"; break ;; esac
    done
    case "$command" in
{cases}
    esac
    COMPREPLY=( $(compgen -W "$words" -- "$current") )
}}
complete -o default -F _{name}_complete {name}
"""
# zsh reads the script of bash. Its own completion may not have been started: a shell without a ~/.zshrc.
_ZSH_START = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }
autoload -U +X bashcompinit && bashcompinit
"""


class _CompletionAction(argparse.Action):
    """Prints a script that teaches a shell the commands and flags of the parser, and leaves."""

    def __call__(self, parser: Any, namespace: object, values: Any, option_string: str | None = None) -> None:
        del namespace, option_string
        words = {name: list(_list_words(command)) for name, command in _list_commands(parser).items()}
        if values == "fish":
            print("\n".join(_write_fish(parser.prog, words)))
        else:
            words[""] = [*words, *_list_words(parser)]
            cases = "\n".join(f'        "{name}") words="{" ".join(own)}" ;;' for name, own in words.items())
            print((_ZSH_START if values == "zsh" else "") + _BASH.format(name=parser.prog, cases=cases), end="")
        parser.exit()


def _list_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def _list_words(parser: argparse.ArgumentParser) -> Iterable[str]:
    """What may be typed after a command: the choices of its arguments, and its flags."""
    for action in parser._actions:
        if action.option_strings:
            yield from [flag for flag in action.option_strings if flag.startswith("--")] or action.option_strings
        elif not isinstance(action, argparse._SubParsersAction):
            yield from map(str, action.choices or ())


def _write_fish(program: str, words: Mapping[str, Sequence[str]]) -> Iterable[str]:
    for name, own in words.items():
        yield f"complete -c {program} -f -n __fish_use_subcommand -a {name}"
        for word in own:
            given = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            yield f"complete -c {program} -n '__fish_seen_subcommand_from {name}' {given}"


# -- running -------------------------------------------------------------------------------------------------------


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
