"""``semantickv policies``: the policies by name."""

from __future__ import annotations

import argparse
from typing import Any

from semantickv.simulator.policies import POLICIES
from semblend.cli.output import print_json, table

ABOUT = "List the eviction policies that replay, experiment and advise know."


def add(subparsers: Any) -> None:
    """Declare the flags of ``semantickv policies``."""
    parser = subparsers.add_parser("policies", help="list the eviction policies", description=ABOUT)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the policies with one line each; return the exit code."""
    if args.json:
        print_json([{"policy": name, "summary": policy.summary} for name, policy in POLICIES.items()])
    else:
        print(table([(name, policy.summary) for name, policy in POLICIES.items()], head=("policy", "what goes first")))
    return 0
