"""A reference page of a command line, made from its parser; `sembench` and `semantickv` write one each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.reference.semblend_pages import commands_of, options_of


def page(parser: argparse.ArgumentParser, intro: Sequence[str], variables: Mapping[str, str]) -> str:
    """Every command, its flags, and the variables that are read."""
    lines = [
        f"<!-- Made by `python -m {parser.prog}.reference docs/reference`; change the code, not this page. -->",
        "",
        f"# Command line of {parser.prog}",
        "",
        *intro,
        "",
        "| variable | meaning |",
        "|---|---|",
        *(f"| `{name}` | {_cell(meaning)} |" for name, meaning in variables.items()),
    ]
    for name, command in commands_of(parser).items():
        lines += ["", f"## {parser.prog} {name}", "", " ".join((command.description or "").split()), ""]
        lines += ["| argument | meaning |", "|---|---|"]
        for action in options_of(command):
            names = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.dest}`"
            value = "" if action.nargs == 0 or not action.option_strings else f" `{_value(action)}`"
            needed = " (required)" if action.required and action.option_strings else ""
            lines.append(f"| {names}{value} | {_cell((action.help or '') % _words(action))}{needed} |")
    return "\n".join(lines) + "\n"


def write(text: str, name: str, argv: Sequence[str] | None) -> int:
    """Put the page into the folder that the words name, and say where."""
    parser = argparse.ArgumentParser(description="Write the generated reference page.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    print(folder / name)
    return 0


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


def _words(action: argparse.Action) -> dict[str, object]:
    """What argparse itself would fill into a help text."""
    return {"default": action.default, "dest": action.dest, "choices": ", ".join(map(str, action.choices or ()))}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
