"""Write down the checksums of all manifests of a folder, after checking that they can be trusted."""

from __future__ import annotations

import argparse
import json

from sembench.commands.manifests.audit_manifest import audit
from sembench.files import write_text
from sembench.manifests.cases import BENCHMARK_VERSION, FROZEN_VERSION, describe_manifest, list_manifests
from sembench.offline.replay import choose_tokenizer
from semblend.cli.output import say
from semblend.errors import InputError


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("freeze", help="write down the checksums of manifests", description=__doc__)
    parser.add_argument("--spec", required=True, metavar="FILE", help="the frozen file to write, JSON")
    parser.add_argument("--manifests-dir", required=True, metavar="DIR", help="folder of the manifests")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a KV block, for the check")


def run(args: argparse.Namespace) -> int:
    found = list_manifests(args.manifests_dir)
    if not found:
        raise InputError(f"{args.manifests_dir} holds no manifest", hint="make one with sembench build")
    wrong = 0
    for path in found:
        findings, _ = audit(str(path), choose_tokenizer(None).encoder, args.block_size)
        for case, _, line in findings:
            say(f"{path.name}, {case.item_id} ({case.transform}): {line}")
        wrong += len(findings)
    if wrong:
        say(f"error: {wrong} findings; nothing was frozen")
        say("hint: sembench audit-manifest --manifest FILE shows them one by one")
        return 1
    spec = {
        "frozen_version": FROZEN_VERSION,
        "benchmark_version": BENCHMARK_VERSION,
        "block_size": args.block_size,
        "manifests": {path.name: describe_manifest(path) for path in found},
    }
    write_text(args.spec, json.dumps(spec, indent=1, sort_keys=True) + "\n")
    print(json.dumps({"spec": args.spec, "manifests": len(found)}))
    return 0
