"""The ``semblend`` command; how it takes words and how it fails stands in `semblend.cli.commandline`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from semblend._version import __version__
from semblend.cli import commandline
from semblend.cli.commandline import Parser, add_debug, add_examples
from semblend.cli.commands import (
    calibrate,
    demo,
    doctor,
    donors,
    estimate,
    explain,
    explore,
    models,
    serve,
    version,
    vllm,
    warm,
)
from semblend.cli.completion import add_completion
from semblend.cli.help_text import write_examples

COMMANDS: tuple[ModuleType, ...] = (
    demo, serve, models, calibrate, explore, explain, estimate, warm, donors, vllm, doctor, version,
)  # fmt: skip

EXAMPLES = (
    "semblend doctor                        # what this machine has, and what to run next",
    "semblend estimate prompts.jsonl        # what reuse would save on your own log",
    "semblend explore                       # paste prompts, see what they share",
    "semblend serve --model smollm2-135m    # an OpenAI-compatible server with reuse",
)


def build_parser() -> Parser:
    """The whole command line; docs/reference/cli.md is generated from it."""
    common = Parser(add_help=False)
    add_debug(common)
    parser = Parser(
        prog="semblend",
        description="Find the KV cache that earlier prompts already paid for.",
        epilog=write_examples(EXAMPLES),
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"semblend {__version__}")
    add_completion(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for module in COMMANDS:
        summary = (module.__doc__ or "").partition("\n")[0]
        sub = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=summary[:1].lower() + summary[1:].rstrip("."),
            description=module.__doc__,
            parents=[common],
        )
        module.add_arguments(sub)
        add_examples(sub, module)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    # doctor reports the other distribution as one of its rows
    return commandline.run(lambda _: build_parser(), argv, even_if_foreign=("doctor",))


if __name__ == "__main__":
    sys.exit(main())
