"""Print the SHA-256 of a manifest, after reading every line of it."""

from __future__ import annotations

import argparse
import json
from collections import Counter

from sembench.files import hash_file
from sembench.manifests.cases import read_manifest


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("checksum-manifest", help="SHA-256 and counts of a manifest", description=__doc__)
    parser.add_argument("--manifest", required=True, help="made by sembench build")


def run(args: argparse.Namespace) -> int:
    items: Counter[str] = Counter()
    versions: set[str] = set()
    for case in read_manifest(args.manifest):
        items[case.transform] += 1
        versions.add(case.benchmark_version)
    print(
        json.dumps(
            {
                "manifest": args.manifest,
                "sha256": hash_file(args.manifest),
                "items": items.total(),
                "benchmark_versions": sorted(versions),
                "by_transform": dict(items),
            }
        )
    )
    return 0
