"""Check that a manifest can be trusted: negative controls share nothing with any donor, planted facts are where they
should be, and every recipient that expects a semantic hit really shares text with its donors.

Exit code 1 when something is wrong; each finding is one line on standard error.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from sembench.manifests.blocks import HashSet, hash_content, hash_every_offset
from sembench.manifests.cases import Case, read_manifest
from sembench.offline.replay import TextEncoder, choose_tokenizer
from semblend.cli.output import say
from semblend.errors import InputError

_SHOWN = 20


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "audit-manifest",
        help="check that a manifest can be trusted",
        description=__doc__,
    )
    parser.add_argument("--manifest", required=True, metavar="FILE", help="made by sembench build")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a KV block")
    parser.add_argument(
        "--tokenizer",
        default=None,
        metavar="NAME",
        help="stable, a tokenizer.json, a model name or tiktoken:NAME (default: stable)",
    )


def run(args: argparse.Namespace) -> int:
    chosen = choose_tokenizer(args.tokenizer)
    if chosen.stand_in:
        say(f"warning: {chosen.note}")
    wrong, items = audit(args.manifest, chosen.encoder, args.block_size)
    if not items:
        raise InputError(f"{args.manifest} holds no cases", hint="build it with sembench build")
    for case, _, line in wrong[:_SHOWN]:
        say(f"{case.item_id} ({case.transform}, {case.source_id}): {line}")
    if len(wrong) > _SHOWN:
        say(f"... and {len(wrong) - _SHOWN} more")
    found = Counter(kind for _, kind, _ in wrong)
    report = {"manifest": args.manifest, "items": items, "findings": dict(found), "passed": not found}
    print(json.dumps(report | {"tokenizer": chosen.as_dict(), "block_size": args.block_size}))
    return 1 if found else 0


def audit(manifest: str, encoder: TextEncoder, block_size: int) -> tuple[list[tuple[Case, str, str]], int]:
    """Return every fault of a manifest as (case, kind, one line), and the number of its cases."""
    if block_size < 1:
        raise InputError(f"--block-size is {block_size}", hint="use 16")
    donors = HashSet()
    seen: set[tuple[str, int]] = set()
    for case in read_manifest(manifest):
        for donor in case.donor_prompts:
            if (key := (donor.donor_id, hash(donor.text))) not in seen:
                seen.add(key)
                donors.add(hash_content(encoder.encode(donor.text), block_size))
    wrong, items = [], 0
    for case in read_manifest(manifest):
        items += 1
        wrong += [(case, kind, line) for kind, line in find_faults(case, donors, encoder, block_size)]
    return wrong, items


def find_faults(case: Case, donors: HashSet, encoder: TextEncoder, block_size: int) -> list[tuple[str, str]]:
    """Return (kind, one line) for every fault that would make a result on this case mean something else."""
    wrong = []
    if case.negative_control:
        shared = int(donors.contains(hash_every_offset(encoder.encode(case.recipient_prompt), block_size)).sum())
        if shared:
            wrong.append(("phantom_collision", f"a negative control shares {shared} block positions with some donor"))
    elif case.metadata.get("expected_semantic") or case.metadata.get("expected_exact"):
        own = HashSet()
        for donor in case.donor_prompts:
            own.add(hash_content(encoder.encode(donor.text), block_size))
        paraphrased = case.metadata.get("materialization_shape") == "evidence_only"
        if (
            not paraphrased
            and not own.contains(hash_every_offset(encoder.encode(case.recipient_prompt), block_size)).any()
        ):
            wrong.append(("nothing_shared", "a hit is expected, but recipient and donors share no block"))
    if case.planted_fact and case.planted_fact not in case.recipient_prompt:
        wrong.append(("planted_fact_missing", f"the recipient does not say {case.planted_fact!r}"))
    if case.donor_fact:
        if not any(case.donor_fact in donor.text for donor in case.donor_prompts):
            wrong.append(("donor_fact_missing", f"no donor says {case.donor_fact!r}"))
        if case.donor_fact in case.recipient_prompt:
            wrong.append(("donor_fact_in_recipient", f"the recipient says {case.donor_fact!r} too"))
    return wrong
