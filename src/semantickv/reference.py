"""Writes docs/reference/semantickv-cli.md from the parser: ``python -m semantickv.reference docs/reference``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from semantickv.cli import build_parser
from semantickv.settings import VARIABLES
from semblend.reference import commands_of, options_of

PAGE = "semantickv-cli.md"


def render() -> str:
    """The page: every command, its flags, and the variables that are read."""
    lines = [
        "<!-- Made by `python -m semantickv.reference docs/reference`; change the code, not this page. -->",
        "",
        "# Command line of semantickv",
        "",
        "Everything that these commands report is simulated. Standard output is data, standard error is talk. Exit "
        "codes: 0 done, 1 a check failed, 2 usage, 130 interrupted. A mistake is one line `error:` and one line "
        "`hint:`; `--debug` adds the traceback.",
        "",
        "| variable | meaning |",
        "|---|---|",
        *(f"| `{name}` | {_cell(meaning)} |" for name, meaning in VARIABLES.items()),
    ]
    for name, command in commands_of(build_parser()).items():
        lines += ["", f"## semantickv {name}", "", " ".join((command.description or "").split()), ""]
        lines += ["| argument | meaning |", "|---|---|"]
        for action in options_of(command):
            names = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.dest}`"
            value = "" if action.nargs == 0 or not action.option_strings else f" `{_value(action)}`"
            needed = " (required)" if action.required and action.option_strings else ""
            lines.append(f"| {names}{value} | {_cell((action.help or '') % _words(action))}{needed} |")
    return "\n".join(lines) + "\n"


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


def _words(action: argparse.Action) -> dict[str, object]:
    """What argparse itself would fill into a help text."""
    return {"default": action.default, "dest": action.dest, "choices": ", ".join(map(str, action.choices or ()))}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated reference page of semantickv.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(render(), encoding="utf-8")
    print(folder / PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
