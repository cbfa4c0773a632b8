"""The ``sembench`` command.

Exit codes: 0 done, 1 a gate failed, 2 usage, 130 interrupted. A command is a module of `sembench.commands` with
``add(subparsers)`` and ``run(args) -> int``; it is imported only when it is asked for, or when help lists them all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from semblend.cli import commandline
from semblend.cli.commandline import Parser

COMMANDS = (
    "manifests.build",
    "manifests.audit_manifest",
    "manifests.checksum_manifest",
    "manifests.freeze",
    "manifests.verify_frozen",
    "runs.run_offline",
    "runs.verify_endpoint",
    "runs.calibrate_noise_floor",
    "runs.run_live_sglang",
    "runs.run_live_gateway",
    "runs.run_load",
    "results.merge_results",
    "witnesses.engine_snapshot",
    "witnesses.engine_window",
    "witnesses.summarize_engine_events",
    "witnesses.collect_k8s_engine_events",
    "results.assert_result_gates",
    "results.compare",
    "results.report",
)
DESCRIPTION = "Check whether reuse really helped, and whether it did harm."
EXAMPLES = (
    "sembench build --profile synthetic-v1 --output cases.jsonl",
    "sembench run-offline --manifest cases.jsonl --output result.json",
    "sembench report --result result.json",
)


def build_parser(words: Sequence[str] = ()) -> Parser:
    """Return the parser of the command that ``words`` name, or of all commands. docs/reference is generated from it."""
    return commandline.parser_of("sembench", DESCRIPTION, commandline.choose_commands(words, COMMANDS), EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return commandline.run(build_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
