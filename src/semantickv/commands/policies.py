"""``semantickv policies``: the policies by name."""

from __future__ import annotations

import argparse

from semantickv.simulator.policies import POLICIES
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import print_json, table


def add(commands: Commands) -> None:
    parser = add_command(commands, "policies", run, "list the eviction policies")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List the eviction policies that replay, experiment and advise know."""
    if args.json:
        print_json([{"policy": name, "summary": policy.summary} for name, policy in POLICIES.items()])
    else:
        print(table([(name, policy.summary) for name, policy in POLICIES.items()], head=("policy", "what goes first")))
    return 0
