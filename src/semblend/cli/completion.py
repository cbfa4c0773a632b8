"""Shell completion, made from the parser itself: a script for bash, zsh or fish that knows commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

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
complete -o default -F _{name}_complete {program}
"""


# zsh reads the script of bash. Its own completion may not have been started: a shell without a ~/.zshrc.
_ZSH_START = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }
autoload -U +X bashcompinit && bashcompinit
"""


class CompletionAction(argparse.Action):
    """Prints the script and leaves."""

    def __call__(self, parser: Any, namespace: object, values: Any, option_string: str | None = None) -> None:
        del namespace, option_string
        print(make_script(parser, str(values)), end="")
        parser.exit()


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--completion",
        choices=SHELLS,
        action=CompletionAction,
        metavar="SHELL",
        help=f'print completion for {", ".join(SHELLS)}; in bash: eval "$({parser.prog} --completion bash)"',
    )


def make_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that teaches ``shell`` the commands and flags of ``parser``."""
    commands = list_commands(parser)
    if shell == "fish":
        return "".join(_write_fish(parser, commands))
    cases = [_write_case("", [*commands, *list_flags(parser)])]
    cases += [_write_case(name, _list_words(command)) for name, command in commands.items()]
    name = parser.prog.replace("-", "_")
    script = _BASH.format(name=name, program=parser.prog, cases="\n".join(cases))
    return script if shell == "bash" else _ZSH_START + script


def list_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def list_flags(parser: argparse.ArgumentParser) -> list[str]:
    """The long flags of a parser, and the short ones that have no long form."""
    options = [action.option_strings for action in parser._actions if action.option_strings]
    return [flag for names in options for flag in ([n for n in names if n.startswith("--")] or names)]


def _list_words(command: argparse.ArgumentParser) -> list[str]:
    """What may follow a command: its own commands, the choices of its arguments, its flags."""
    chosen = [
        str(choice)
        for action in command._actions
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
        for choice in action.choices or ()
    ]
    return [*list_commands(command), *chosen, *list_flags(command)]


def _write_case(command: str, words: Sequence[str]) -> str:
    return f'        "{command}") words="{" ".join(words)}" ;;'


def _write_fish(parser: argparse.ArgumentParser, commands: dict[str, argparse.ArgumentParser]) -> list[str]:
    lines = []
    for name, command in commands.items():
        about = (command.description or "").partition("\n")[0].replace("'", "\\'")
        lines.append(f"complete -c {parser.prog} -f -n __fish_use_subcommand -a {name} -d '{about}'\n")
        for word in _list_words(command):
            given = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}" if word[0] != "-" else f"-s {word[1:]}"
            lines.append(f"complete -c {parser.prog} -n '__fish_seen_subcommand_from {name}' {given}\n")
    return lines
