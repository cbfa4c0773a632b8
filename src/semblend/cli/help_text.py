"""How ``--help`` looks, in all commands: purpose first, defaults said, 100 columns at most.

A usage line of thirty flags tells a reader nothing, so a command with many flags shows those that must be given. The
formatter overrides hooks that argparse has kept since Python 3.2.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH = 100
MANY_FLAGS = 8
LONG_CHOICES = 32


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs, keeps indented lines, adds defaults, and shortens long choices and long usages."""

    def __init__(self, prog: str, width: int | None = None) -> None:
        columns = width or min(WIDTH, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=28, width=columns - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.strip().split("\n\n"):
            lines = paragraph.splitlines()
            shown_as_is = len(lines) > 1 and all(line.startswith("  ") for line in lines[1:])
            if shown_as_is:
                filled.append("\n".join(indent + line for line in lines))
            else:
                filled.append(
                    textwrap.fill(
                        " ".join(paragraph.split()), width, initial_indent=indent, subsequent_indent=indent,
                        break_on_hyphens=False,
                    )
                )  # fmt: skip
        return "\n\n".join(filled)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        return describe_option(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return name_value(action)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if action.metavar is None and has_long_choices(action):
            return lambda count: (name_value(action),) * count
        return super()._metavar_formatter(action, default_metavar)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        actions = list(actions)
        flags = [action for action in actions if action.option_strings]
        if usage is None and len(flags) > MANY_FLAGS:
            usage = self._wrap_usage(["%(prog)s", *_needed_words(actions, groups), "[options]"])
        super().add_usage(usage, actions, groups, prefix)

    def _wrap_usage(self, words: Sequence[str]) -> str:
        """The words on as few lines as they need; a flag stays beside its value, ``a | b`` may be parted."""
        indent = len("usage: ")
        lines, room = [words[0]], self._width - indent - len(self._prog) + len(words[0])
        for word in words[1:]:
            if len(lines[-1]) + 1 + len(word) > room:
                lines.append(" " * (indent + 4) + word)
                room = self._width
            else:
                lines[-1] += f" {word}"
        return "\n".join(lines)


def describe_option(action: argparse.Action) -> str:
    """The help of a flag in argparse's own notation, with its choices and its default where the text has neither."""
    text = action.help or ""
    if has_long_choices(action) and action.metavar is None:
        text += "; one of " + ", ".join(map(str, action.choices or ()))
    if "default" in text or not _has_default_to_tell(action):
        return text
    return f"{text} (default: %(default)s)"


def expand_help(action: argparse.Action) -> str:
    """The help of a flag as a reader sees it, for the reference pages."""
    words = vars(action) | {"choices": ", ".join(map(str, action.choices or ())), "prog": ""}
    return describe_option(action) % words


def name_value(action: argparse.Action) -> str:
    """The word that stands for a flag's value: its metavar, short choices, or what its type is called.

    >>> parser = argparse.ArgumentParser()
    >>> name_value(parser.add_argument("--port", type=int)), name_value(parser.add_argument("--api-key"))
    ('N', 'KEY')
    """
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices and not has_long_choices(action):
        return "{" + ",".join(map(str, action.choices)) + "}"
    if action.choices:
        return "NAME"
    if action.type is int:
        return "N"
    return "X" if action.type is float else action.dest.rpartition("_")[2].upper()


def has_long_choices(action: argparse.Action) -> bool:
    return sum(len(str(choice)) + 1 for choice in action.choices or ()) > LONG_CHOICES


def write_examples(lines: Sequence[str]) -> str:
    """The end of a help text: what a newcomer types. Long lines go on behind a backslash, as a shell reads them.

    >>> print(write_examples(["semblend doctor"]))
    examples:
      semblend doctor
    """
    return "\n".join(["examples:", *(f"  {part}" for line in lines for part in _break_command(line))])


def _break_command(line: str) -> list[str]:
    """One command on as many lines as it needs, broken before flags."""
    parts = [""]
    for word in line.replace(" --", "\n--").split("\n"):
        if parts[-1] and len(parts[-1]) + 1 + len(word) > WIDTH - 6:
            parts[-1] += " \\"
            parts.append(f"    {word}")
        else:
            parts[-1] = f"{parts[-1]} {word}" if parts[-1] else word
    return parts


def _has_default_to_tell(action: argparse.Action) -> bool:
    default = action.default
    if action.nargs == 0 or default is argparse.SUPPRESS or isinstance(default, bool):
        return False
    return default not in (None, "", []) and default != ()


def _needed_words(actions: Sequence[argparse.Action], groups: Iterable[Any]) -> list[str]:
    """The flags that must be given, then those of which one must be given, then the positional arguments."""
    alternatives = [group._group_actions for group in groups if getattr(group, "required", False)]
    flags = [f"{one.option_strings[0]} {name_value(one)}" for one in actions if one.option_strings and one.required]
    choices = [
        "(" + " | ".join(f"{one.option_strings[0]} {name_value(one)}" for one in members) + ")"
        for members in alternatives
    ]
    return [*flags, *choices, *(_positional_word(action) for action in actions if not action.option_strings)]


def _positional_word(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):
        return "COMMAND ..."
    word = name_value(action) if action.metavar is None else str(action.metavar)
    return f"[{word}]" if action.nargs == "?" else word
