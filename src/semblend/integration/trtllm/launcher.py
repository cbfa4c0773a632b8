"""`semblend-trtllm`: TensorRT-LLM's server with our KV connector. Every other word goes to `trtllm-serve`.

semblend-trtllm Qwen/Qwen2.5-7B-Instruct
semblend-trtllm --semblend quality=fast Qwen/Qwen2.5-7B-Instruct --port 8000
semblend-trtllm --print-config > connector.yaml
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from semblend.errors import ConfigError, SemBlendError
from semblend.integration.launching import LauncherParser, add_settings_flag, become, pass_settings_on, stop_with
from semblend.integration.trtllm.engine_support import TrtllmSettings
from semblend.integration.versions import TRTLLM

OPTION_FILES = ("--extra_llm_api_options", "--config")
CONNECTOR: dict[str, Any] = {
    "kv_connector_config": {
        "connector_module": "semblend.integration.trtllm.connector",
        "connector_scheduler_class": "SemBlendConnectorScheduler",
        "connector_worker_class": "SemBlendConnectorWorker",
    }
}
NEVER_RUN = "this integration was never run on the real engine"


def main(argv: Sequence[str] | None = None, *, start: Callable[[list[str]], None] | None = None) -> None:
    """Check version and settings, then become `trtllm-serve`; ``start`` is given the command instead, for tests."""
    given, rest = build_parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    if given.print_config:
        print(json.dumps(CONNECTOR, indent=2))
        return
    try:
        note = check_version()
        pass_settings_on("trtllm", TrtllmSettings, given.semblend)
        command = ["trtllm-serve", *rest, OPTION_FILES[0], write_options(rest)]
    except SemBlendError as error:
        stop_with(error)
    print(f"semblend-trtllm: {note}", file=sys.stderr)
    (start or become)(command)


def build_parser() -> LauncherParser:
    parser = LauncherParser(
        prog="semblend-trtllm",
        usage="semblend-trtllm [-h] [--print-config] [--semblend NAME=VALUE] MODEL [flags of trtllm-serve ...]",
        description="Start TensorRT-LLM's server with semantic KV reuse, through its KV cache connector. "
        "All other words go to `trtllm-serve`, whose own --help lists them. " + NEVER_RUN.capitalize() + ".",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the lines for an options file of your own, and start nothing",
    )
    add_settings_flag(parser, TrtllmSettings)
    return parser


def check_version() -> str:
    """The row of the installed TensorRT-LLM in one line; raises `SemBlendError` where it is missing or unknown."""
    row = TRTLLM.require()
    return f"TensorRT-LLM {TRTLLM.find_installed()}: {row.note}"


def write_options(words: Sequence[str]) -> str:
    """A file that names our connector, as `trtllm-serve` reads it; refuses where the caller has one already."""
    if any(word.partition("=")[0] in OPTION_FILES for word in words):
        raise ConfigError(
            "an options file is given already",
            hint="add the lines of `semblend-trtllm --print-config` to it, and start `trtllm-serve` yourself",
        )
    with tempfile.NamedTemporaryFile("w", prefix="semblend-trtllm-", suffix=".yaml", delete=False) as file:
        json.dump(CONNECTOR, file)  # what JSON can say, YAML reads the same way
    return file.name
