"""The ``semblend`` command; how it takes words and how it fails stands in `semblend.cli.commandline`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from semblend.cli import commandline
from semblend.cli.commandline import Parser

DESCRIPTION = "Find the KV cache that earlier prompts already paid for."
COMMANDS = {
    "demo": "demo",
    "serve": "serve",
    "models": "models",
    "calibrate": "calibrate",
    "explore": "explain",
    "explain": "explain",
    "estimate": "estimate",
    "warm": "warm",
    "donors": "donors",
    "vllm": "donors",
    "report": "report",
    "doctor": "doctor",
    "version": "doctor",
}
EXAMPLES = (
    "semblend doctor                        # what this machine has, and what to run next",
    "semblend estimate prompts.jsonl        # what reuse would save on your own log",
    "semblend explore                       # paste prompts, see what they share",
    "semblend serve --model smollm2-135m    # an OpenAI-compatible server with reuse",
)


def build_parser(words: Sequence[str] = ()) -> Parser:
    """The command line of the command that ``words`` name, or all of it; docs/reference/cli.md is generated from it."""
    return commandline.build_parser("semblend.cli", DESCRIPTION, COMMANDS, words, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    # doctor reports the other distribution as one of its rows
    return commandline.run(build_parser, argv, even_if_foreign=("doctor",))


if __name__ == "__main__":
    sys.exit(main())
