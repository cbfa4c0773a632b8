"""The ``sembench`` command: is it true.

Exit codes: 0 done, 1 a gate failed, 2 usage, 130 interrupted. A command is a module of `sembench.commands` with
``add(subparsers)`` and ``run(args) -> int``; it is imported only when it is asked for, or when help lists them all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from semblend import commandline
from semblend.commandline import Parser

COMMANDS = (
    "build", "audit_manifest", "checksum_manifest", "freeze", "verify_frozen", "run_offline",
    "verify_endpoint", "calibrate_noise_floor", "run_live_sglang", "run_live_gateway", "run_load", "merge_results",
    "engine_snapshot", "engine_window", "summarize_engine_events", "collect_k8s_engine_events", "assert_result_gates",
    "compare", "report",
)  # fmt: skip
DESCRIPTION = "Did reuse really help, and did it do no harm."


def build_parser(words: Sequence[str] = ()) -> Parser:
    """The command line of the command that ``words`` name, or all of it; docs/reference is generated from it."""
    return commandline.parser_of("sembench", DESCRIPTION, commandline.asked_for(words, COMMANDS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return commandline.run(build_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
