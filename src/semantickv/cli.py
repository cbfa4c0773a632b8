"""The ``semantickv`` command: what a cache should keep (simulated), and where a request should go.

Exit codes: 0 done, 1 a check failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from semblend.cli import commandline
from semblend.cli.commandline import Parser

COMMANDS = {
    "experiment": "simulate",
    "replay": "simulate",
    "tiers": "simulate",
    "advise": "simulate",
    "policies": "simulate",
    "check": "simulate",
    "collect": "traces",
    "workload": "traces",
    "segment": "traces",
    "proxy": "serve",
    "router": "serve",
    "dynamo-router": "serve",
    "dynamo-pin": "serve",
    "api": "serve",
}
DESCRIPTION = "What a cache should keep and how much memory it needs (simulated); where a request should go."
EXAMPLES = (
    "semantickv collect --upstream http://127.0.0.1:8000 --output trace.jsonl",
    "semantickv advise --trace trace.jsonl",
    "semantickv router --replicas http://127.0.0.1:8000,http://127.0.0.1:8001",
)


def build_parser(words: Sequence[str] = ()) -> Parser:
    """The command line of the command that ``words`` name, or all of it; docs/reference is generated from it."""
    return commandline.build_parser("semantickv", DESCRIPTION, COMMANDS, words, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return commandline.run(build_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
