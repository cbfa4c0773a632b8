"""A reference page of a command line, made from its parser; `sembench` and `semantickv` write one each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.reference.semblend_pages import commands_of, expand_help, options_of, show_examples


def page(parser: argparse.ArgumentParser, intro: Sequence[str], variables: Mapping[str, str]) -> str:
    """Every command, its flags, and the variables that are read."""
    module = f"tools.reference.{parser.prog}_pages"
    lines = [
        f"<!-- Made by `python -m {module} docs/reference`; change the code, not this page. -->",
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
            value = "" if action.nargs == 0 or not action.option_strings else f" `{action.metavar}`"
            needed = " (required)" if action.required and action.option_strings else ""
            lines.append(f"| {names}{value} | {_cell(expand_help(action))}{needed} |")
        lines += show_examples(command)
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


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
