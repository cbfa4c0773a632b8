"""Print the SHA-256 of a manifest, after reading every line of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sembench.manifests.cases import describe_manifest


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("checksum-manifest", help="print the SHA-256 of a manifest", description=__doc__)
    parser.add_argument("--manifest", required=True, metavar="FILE", help="made by sembench build")


def run(args: argparse.Namespace) -> int:
    print(json.dumps({"manifest": args.manifest, **describe_manifest(Path(args.manifest))}))
    return 0
