"""Check that manifests are byte for byte what was frozen. Exit code 1 when one is not; each has one line."""

from __future__ import annotations

import argparse
import json

from sembench.manifests.cases import find_differences, read_frozen
from semblend.cli.output import say


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("verify-frozen", help="check manifests against a frozen file", description=__doc__)
    parser.add_argument("--spec", required=True, metavar="FILE", help="from sembench freeze")
    parser.add_argument("--manifests-dir", required=True, metavar="DIR", help="folder of the manifests")


def run(args: argparse.Namespace) -> int:
    frozen = read_frozen(args.spec)
    changed = find_differences(frozen, args.manifests_dir)
    for line in changed:
        say(line)
    print(json.dumps({"spec": args.spec, "manifests": len(frozen), "changed": len(changed), "passed": not changed}))
    return 1 if changed else 0
