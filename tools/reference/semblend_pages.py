"""The pages under docs/reference, made from the code so that they cannot drift away from it.

``python -m tools.reference.semblend_pages docs/reference`` writes them. A test fails while a page differs from
`render_all`.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import semblend
from semblend import errors
from semblend.cli.commandline import HelpFormatter, Parser
from semblend.cli.main import build_parser
from semblend.config import CONFIG_FILE_VARIABLE, KEY_VARIABLES, SETTINGS
from tools.reference.dynamo_page import dynamo_markdown
from tools.reference.event_pages import events_markdown, metrics_markdown
from tools.reference.models_page import models_markdown
from tools.reference.sglang_page import sglang_markdown
from tools.reference.support_tables import EXTRAS
from tools.reference.trtllm_page import trtllm_markdown
from tools.reference.vllm_page import vllm_markdown

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
MADE_FROM = (
    "<!-- Made by `python -m tools.reference.semblend_pages docs/reference`; change the code, not this page. -->"
)


def render_all() -> dict[str, str]:
    """File name to content, for every page."""
    pages: dict[str, Callable[[], str]] = {
        "settings.md": settings_markdown,
        "cli.md": cli_markdown,
        "extras.md": extras_markdown,
        "errors.md": errors_markdown,
        "events.md": events_markdown,
        "metrics.md": metrics_markdown,
        "models.md": models_markdown,
        "vllm.md": vllm_markdown,
        "sglang.md": sglang_markdown,
        "trtllm.md": trtllm_markdown,
        "dynamo.md": dynamo_markdown,
        "api.md": api_markdown,
    }
    return {name: f"{MADE_FROM}\n\n{make().strip()}\n" for name, make in pages.items()}


def settings_markdown() -> str:
    lines = [
        "# Settings",
        "",
        "A value comes from the argument, else the environment variable, else the TOML file, else the default. "
        f"`{CONFIG_FILE_VARIABLE}` names the TOML file; its settings stand at the top or under `[semblend]`. "
        "Yes and no are written `1` and `0` in the environment.",
        "",
        "`semblend doctor` shows the values in force.",
        "",
        "| setting | variable | type | default | meaning |",
        "|---|---|---|---|---|",
    ]
    kinds = {bool: "yes or no", int: "whole number", float: "number", str: "text"}
    for setting in SETTINGS:
        kind, default = kinds[type(setting.default)], _default(setting.default)
        lines.append(f"| `{setting.name}` | `{setting.variable}` | {kind} | {default} | {_cell(setting.help)} |")
    lines += ["", "Keys are secrets and stand in no configuration file; `semblend serve` reads them from:", ""]
    lines += ["| variable | meaning |", "|---|---|"]
    lines += [f"| `{setting.variable}` | {_cell(setting.help)} |" for setting in KEY_VARIABLES]
    return "\n".join(lines)


def cli_markdown() -> str:
    parser = build_parser()
    lines = [
        "# Command line",
        "",
        "Standard output is data, standard error is talk. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted. "
        "A mistake is one line `error:` and one line `hint:`; `--debug` adds the traceback.",
        "",
        *_options(parser),
    ]
    for name, command in commands_of(parser).items():
        lines += ["", f"## semblend {name}", "", (command.description or "").strip(), ""]
        lines += ["```text", _usage(command), "```", "", *_options(command), *show_examples(command)]
    return "\n".join(lines)


def show_examples(command: argparse.ArgumentParser) -> list[str]:
    """The lines that end a command's help, as a block."""
    if not command.epilog:
        return []
    title, *lines = command.epilog.splitlines()
    return ["", f"{title.capitalize()}", "", "```console", *_with_prompts(lines), "```"]


def _with_prompts(lines: Sequence[str]) -> list[str]:
    """A prompt sign before each command; a line that goes on with one keeps its indent."""
    return [line[2:] if line.startswith("      ") else f"$ {line[2:]}" for line in lines]


def commands_of(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    """The commands below a parser, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every flag and positional argument of a parser, less the commands."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            yield action


def expand_help(action: argparse.Action) -> str:
    """The help of a flag as a reader sees it."""
    return (action.help or "") % (vars(action) | {"prog": ""})


def extras_markdown() -> str:
    """From pyproject.toml: what an installed copy says about itself is as old as its installation."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    lines = [
        "# Extras",
        "",
        f"`pip install semblend-suite` brings {_in_code(project['dependencies'])} and nothing else. Everything else is "
        "asked for by name, for example `pip install 'semblend-suite[telemetry]'`. `semblend doctor` shows what is "
        "installed.",
        "",
        "| extra | packages | needed by |",
        "|---|---|---|",
    ]
    declared: dict[str, list[str]] = project["optional-dependencies"]
    known = [name for name in EXTRAS if name in declared]
    return "\n".join(
        [
            *lines,
            *(
                f"| `{extra}` | {_in_code(declared[extra]) or 'none'} | {EXTRAS.get(extra, '')} |"
                for extra in [*known, *sorted(declared.keys() - EXTRAS.keys())]
            ),
        ]
    )


def _in_code(wanted: Sequence[str]) -> str:
    """The requirements without the markers behind them, as code."""
    return ", ".join(f"`{one.partition(';')[0].strip()}`" for one in wanted)


def errors_markdown() -> str:
    lines = [
        "# Errors",
        "",
        "Every error raised on purpose is a `SemBlendError` with a one-line `message` and a `hint` that tells the next "
        "step. The exit code is what the command line returns.",
        "",
        "| error | is a | exit code | meaning |",
        "|---|---|---|---|",
    ]
    for kind in _error_tree(errors.SemBlendError):
        parents = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        lines.append(f"| `{kind.__name__}` | {parents} | {kind.exit_code} | {_cell(_first_line(kind))} |")
    return "\n".join(lines)


def _error_tree(kind: type[errors.SemBlendError]) -> Iterator[type[errors.SemBlendError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _error_tree(child)


def api_markdown() -> str:
    lines = ["# Python API", "", "What `from semblend import ...` offers. Everything else may change without notice."]
    for name in sorted(semblend.__all__):
        value = getattr(semblend, name)
        if inspect.isclass(value):
            lines += ["", f"## {name}", "", *_class(value)]
        elif callable(value):
            lines += ["", f"## {name}", "", f"`{name}{_signature(value)}`", "", _first_line(value)]
        else:
            lines += ["", f"## {name}", "", f"`{type(value).__name__}`"]
    return "\n".join(lines)


def _class(kind: type) -> list[str]:
    lines = [_first_line(kind)]
    if issubclass(kind, errors.SemBlendError):
        return [*lines, "", "See [errors](errors.md)."]
    if issubclass(kind, enum.Enum):
        return [*lines, "", "Values: " + ", ".join(f"`{member.value}`" for member in kind)]
    lines += ["", f"`{kind.__name__}{_signature(kind)}`"]
    members = [(name, inspect.getattr_static(kind, name)) for name in vars(kind) if not name.startswith("_")]
    rows = [row for name, value in members if (row := _member(kind, name, value))]
    return [*lines, "", *rows] if rows else lines


def _member(kind: type, name: str, value: Any) -> str:
    if isinstance(value, property):
        text = _first_line(value.fget)
        return f"- `{name}`" + (f": {text}" if text else "")
    if isinstance(value, classmethod) or inspect.isfunction(value):
        text = _first_line(value)
        return f"- `{name}{_signature(getattr(kind, name))}`" + (f": {text}" if text else "")
    return ""


class _Bare:
    """An annotation that prints as it was written, less module paths: short names read better."""

    def __init__(self, text: object) -> None:
        self.text = re.sub(r"\b(?:[a-z_]+\.)+([A-Za-z_]+)", r"\1", str(text))

    def __repr__(self) -> str:
        return self.text


class _Dots:
    """Stands for a default that is an object of ours and says nothing to a reader."""

    def __repr__(self) -> str:
        return "..."


def _signature(value: Any) -> str:
    found = inspect.signature(value)
    parameters = []
    for one in found.parameters.values():
        if one.name == "self":
            continue
        if one.annotation is not one.empty:
            one = one.replace(annotation=_Bare(one.annotation))
        if not isinstance(one.default, bool | int | float | str | tuple | type | None):
            one = one.replace(default=_Dots())
        parameters.append(one)
    returns = found.return_annotation
    shown = found.replace(parameters=parameters, return_annotation=_Bare(returns))
    return str(shown).removesuffix(" -> None") if inspect.isclass(value) else str(shown)


def _first_line(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _usage(command: argparse.ArgumentParser) -> str:
    """The usage as if the terminal were 100 columns wide, wherever this runs."""
    command.formatter_class = lambda prog: HelpFormatter(prog, width=98)
    return command.format_usage().strip()


def _options(parser: argparse.ArgumentParser) -> list[str]:
    rows = ["| argument | meaning |", "|---|---|"]
    for action in options_of(parser):
        names = ", ".join(f"`{option}`" for option in action.option_strings) or _positional(action)
        value = "" if action.nargs == 0 or not action.option_strings else f" `{action.metavar}`"
        needed = " (required)" if action.required and action.option_strings else ""
        rows.append(f"| {names}{value} | {_cell(expand_help(action))}{needed} |")
    return rows


def _positional(action: argparse.Action) -> str:
    return ", ".join(f"`{choice}`" for choice in action.choices or ()) or f"`{action.metavar or action.dest}`"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "empty" if value == "" else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated reference pages.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in render_all().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
