"""`semblend-sglang`: SGLang's HTTP server with our cache. Every flag of SGLang passes through.

semblend-sglang --model-path Qwen/Qwen2.5-7B-Instruct
semblend-sglang --semblend quality=fast --semblend step_work_ms=20 --model-path …
semblend-sglang --semblend-provider my_package.my_module:MyProvider --model-path …
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from semblend.config import SETTINGS, read_sglang_variable, set_variable, write_sglang_variable
from semblend.errors import ConfigError, SemBlendError
from semblend.integration.sglang.plugin import BACKEND
from semblend.integration.sglang.settings import SglangSettings, sglang_settings
from semblend.integration.sglang.versions import support
from semblend.integration.version_support import VersionEvidence

FLAG = "--radix-cache-backend"


def main(argv: Sequence[str] | None = None, *, start: Callable[[list[str]], None] | None = None) -> None:
    """Check version and settings, then become SGLang's server; ``start`` is given the command instead, for tests."""
    given, rest = build_parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        note = check_version()
        pass_settings_on(given.semblend, given.semblend_provider)
    except SemBlendError as error:
        _stop(error)
    if not any(one == FLAG or one.startswith(FLAG + "=") for one in rest):
        rest = [*rest, FLAG, BACKEND]
    print(f"semblend-sglang: {note}", file=sys.stderr)
    (start or _become)([sys.executable, "-m", "sglang.launch_server", *rest])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="semblend-sglang",
        usage="semblend-sglang [-h] [--semblend NAME=VALUE] [--semblend-provider MODULE:NAME] [flags of SGLang ...]",
        description="Start SGLang's HTTP server with semantic KV reuse (--radix-cache-backend semblend). "
        "All other flags go to `python -m sglang.launch_server`, whose own --help lists them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--semblend",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting, such as quality=fast; may be given several times. Of the engine: "
        + ", ".join(sorted(_own_settings())),
    )
    parser.add_argument(
        "--semblend-provider",
        metavar="MODULE:NAME",
        default="",
        help="a SemanticPrefixProvider to ask where the exact cache has nothing",
    )
    return parser


def check_version() -> str:
    """The row of the installed SGLang in one line; raises `SemBlendError` where it is missing or unknown."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise SemBlendError("SGLang is not installed", hint="pip install 'semblend-suite[sglang]'") from None
    row = support(version)
    if row.evidence is VersionEvidence.NONE:
        raise SemBlendError(f"SGLang {version} cannot be started with SemBlend", hint=row.note)
    return f"SGLang {version}: {row.note}"


def pass_settings_on(settings: Sequence[str], provider: str) -> None:
    """Check the settings, and leave them where the processes find them that SGLang starts."""
    own: dict[str, Any] = dict(read_sglang_variable())
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--semblend {text} is not NAME=VALUE", hint="such as --semblend quality=fast")
        if name in _own_settings():
            own[name] = _parse(value)
        elif name in {setting.name for setting in SETTINGS}:
            set_variable(name, value)
        else:
            known = sorted(_own_settings() | {setting.name for setting in SETTINGS})
            raise ConfigError(f"unknown setting {name!r}", hint="known: " + ", ".join(known))
    sglang_settings({name: value for name, value in own.items() if name in _own_settings()})
    write_sglang_variable(own | ({"provider": provider} if provider else {}))


def _own_settings() -> set[str]:
    return {one.name for one in fields(SglangSettings)} - {"config"}


def _parse(value: str) -> Any:
    """A number or true or false as JSON writes them; text otherwise, which the settings refuse by name."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _become(command: list[str]) -> None:
    os.execv(command[0], command)


def _stop(error: SemBlendError) -> NoReturn:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    raise SystemExit(2)
