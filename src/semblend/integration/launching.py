"""What launchers of other engines share: settings on the command line, and becoming the engine's own server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from semblend.config import SETTINGS, read_engine_variable, set_variable, write_engine_variable
from semblend.errors import ConfigError, SemBlendError
from semblend.session.settings import LocalSettings, list_own_settings, read_settings


class LauncherParser(argparse.ArgumentParser):
    """Takes our own flags and leaves the rest to the engine; reports a wrong one as every command does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nhint: {self.prog} --help shows how it is used\n")


def add_settings_flag(parser: argparse.ArgumentParser, kind: type[LocalSettings]) -> None:
    """``--semblend NAME=VALUE``, as often as one likes."""
    parser.add_argument(
        "--semblend",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting, such as quality=fast; may be given several times. Of the engine: "
        + ", ".join(sorted(list_own_settings(kind))),
    )


def pass_settings_on(engine: str, kind: type[LocalSettings], settings: Sequence[str], **more: Any) -> None:
    """Check the settings, and leave them and ``more`` where the processes find them that the engine starts."""
    own: dict[str, Any] = dict(read_engine_variable(engine))
    of_engine = list_own_settings(kind)
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--semblend {text} is not NAME=VALUE", hint="such as --semblend quality=fast")
        if name in of_engine:
            own[name] = _parse(value)
        elif name in {setting.name for setting in SETTINGS}:
            set_variable(name, value)
        else:
            known = sorted(of_engine | {setting.name for setting in SETTINGS})
            raise ConfigError(f"unknown setting {name!r}", hint="known: " + ", ".join(known))
    read_settings(kind, {name: value for name, value in own.items() if name in of_engine})
    write_engine_variable(engine, own | more)


def become(command: list[str]) -> None:
    """Run a command in place of this process."""
    os.execvp(command[0], command)


def stop_with(error: SemBlendError) -> NoReturn:
    """Say what is wrong and what to do next, and end with exit code 2."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    raise SystemExit(2)


def _parse(value: str) -> Any:
    """A number or true or false as JSON writes them; text otherwise, which the settings refuse by name."""
    try:
        return json.loads(value)
    except ValueError:
        return value
