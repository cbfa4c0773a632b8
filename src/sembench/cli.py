"""The ``sembench`` command.

Exit codes: 0 done, 1 a gate failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from semblend.cli import commandline
from semblend.cli.commandline import Parser

DESCRIPTION = "Check whether reuse really helped, and whether it did harm."
COMMANDS = {
    "build": "manifests",
    "audit-manifest": "manifests",
    "checksum-manifest": "manifests",
    "freeze": "manifests",
    "verify-frozen": "manifests",
    "run-offline": "offline",
    "verify-endpoint": "endpoint",
    "calibrate-noise-floor": "endpoint",
    "run-live-sglang": "live",
    "run-live-gateway": "live",
    "run-load": "load",
    "engine-snapshot": "witnesses",
    "engine-window": "witnesses",
    "summarize-engine-events": "witnesses",
    "collect-k8s-engine-events": "witnesses",
    "merge-results": "results",
    "assert-result-gates": "results",
    "compare": "results",
    "report": "results",
}
EXAMPLES = (
    "sembench build --profile synthetic-v1 --output cases.jsonl",
    "sembench run-offline --manifest cases.jsonl --output result.json",
    "sembench report --result result.json",
)


def build_parser(words: Sequence[str] = ()) -> Parser:
    """Return the parser of the command that ``words`` name, or of all commands. docs/reference is generated from it."""
    return commandline.build_parser("sembench", DESCRIPTION, COMMANDS, words, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return commandline.run(build_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
