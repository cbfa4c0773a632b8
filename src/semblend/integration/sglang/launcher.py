"""`semblend-sglang`: SGLang's HTTP server with our cache. Every flag of SGLang passes through.

semblend-sglang --model-path Qwen/Qwen2.5-7B-Instruct
semblend-sglang --semblend quality=fast --semblend step_work_ms=20 --model-path …
semblend-sglang --semblend-provider my_package.my_module:MyProvider --model-path …
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from semblend.errors import ConfigError, SemBlendError
from semblend.integration.launching import LauncherParser, add_settings_flag, become, pass_settings_on, stop_with
from semblend.integration.sglang.plugin import BACKEND
from semblend.integration.sglang.settings import SglangSettings
from semblend.integration.versions import SGLANG

FLAG = "--radix-cache-backend"


def main(argv: Sequence[str] | None = None, *, start: Callable[[list[str]], None] | None = None) -> None:
    """Check version and settings, then become SGLang's server; ``start`` is given the command instead, for tests."""
    given, rest = build_parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        row = SGLANG.require()
        provider = {"provider": check_provider(given.semblend_provider)} if given.semblend_provider else {}
        pass_settings_on("sglang", SglangSettings, given.semblend, **provider)
    except SemBlendError as error:
        stop_with(error)
    if not any(one == FLAG or one.startswith(FLAG + "=") for one in rest):
        rest = [*rest, FLAG, BACKEND]
    print(f"semblend-sglang: SGLang {row.version}: {row.note}", file=sys.stderr)
    (start or become)([sys.executable, "-m", "sglang.launch_server", *rest])


def build_parser() -> LauncherParser:
    parser = LauncherParser(
        prog="semblend-sglang",
        usage="semblend-sglang [-h] [--semblend NAME=VALUE] [--semblend-provider MODULE:NAME] [flags of SGLang ...]",
        description="Start SGLang's HTTP server with semantic KV reuse (--radix-cache-backend semblend). "
        "All other flags go to `python -m sglang.launch_server`, whose own --help lists them.",
        allow_abbrev=False,
    )
    add_settings_flag(parser, SglangSettings)
    parser.add_argument(
        "--semblend-provider",
        metavar="MODULE:NAME",
        default="",
        help="a SemanticPrefixProvider to ask where the exact cache has nothing",
    )
    return parser


def check_provider(path: str) -> str:
    """``package.module:Name``, if it can be imported: SGLang would load its weights first, and then run without it."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{path!r} names no provider", hint="write package.module:Name")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a module of others raises
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{module} cannot be imported: {why}", hint="is its folder in PYTHONPATH?") from None
    if not callable(getattr(found, name, None)):
        raise ConfigError(f"{module} has no {name}", hint="name a class, or a function that makes a provider")
    return path
