"""Commands that make, check and freeze manifests. None of them talks to a server."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sembench.files import hash_file, open_text, write_text
from sembench.manifests.blocks import HashSet, hash_content, hash_every_offset
from sembench.manifests.build import ALL_TRANSFORMS, NEGATIVE, ManifestBuilder
from sembench.manifests.cases import (
    BENCHMARK_VERSION,
    FROZEN_VERSION,
    Case,
    describe_manifest,
    find_differences,
    format_case,
    list_manifests,
    read_frozen,
    read_manifest,
    write_manifest,
)
from sembench.manifests.datasets import OWN_LOGS, PROFILES, SourceSelection, load_sources
from sembench.manifests.traffic import NEXT_TURN, OWN_TRAFFIC, TrafficBuilder, TrafficOptions, read_traffic
from sembench.manifests.transforms import TransformOptions
from sembench.offline.replay import TOKENIZER_HELP, TextEncoder, choose_tokenizer
from sembench.settings import read_variable
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, say
from semblend.errors import InputError
from semblend.text.log_formats import FORMATS


def add(commands: Commands) -> None:
    _add_build(commands)
    _add_audit_manifest(commands)
    _add_checksum_manifest(commands)
    _add_freeze(commands)
    _add_verify_frozen(commands)


# -- build -----------------------------------------------------------------------------------------------------------


def _add_build(commands: Commands) -> None:
    parser = add_command(
        commands,
        "build",
        build,
        "make a manifest: the cases of a benchmark, built in or from your own logs",
        examples=[
            "sembench build --profile synthetic-v1 --output cases.jsonl",
            "sembench build --profile jsonl --input prompts.jsonl --output cases.jsonl",
        ],
    )
    flag = parser.add_argument
    flag("--profile", choices=(*PROFILES, OWN_LOGS), required=True, help="where the documents come from")
    flag("--output", required=True, metavar="FILE", help="manifest to write; packed if it ends in .gz")
    flag("--datasets", nargs="+", default=[], metavar="NAME", help="LongBench datasets (default: all)")
    flag(
        "--max-items-per-dataset",
        type=int,
        default=None,
        metavar="N",
        help="documents of a dataset that become donors (default: all)",
    )
    flag(
        "--transforms",
        nargs="+",
        default=list(ALL_TRANSFORMS),
        metavar="NAME",
        help="changes between a donor and its recipient; default: all of " + ", ".join(ALL_TRANSFORMS),
    )
    flag("--max-segments", type=int, default=4, metavar="N", help="passages that a document is cut into, at most")
    flag("--min-segment-chars", type=int, default=400, metavar="N", help="shortest passage, in characters")
    flag("--longbench-dir", default="", metavar="DIR", help="LongBench folder with NAME.jsonl or NAME.jsonl.gz files")
    flag("--hf-revision", default=None, metavar="REVISION", help="revision of the dataset on the Hugging Face hub")
    flag(
        "--frozen", action="store_true", help="change nothing: check that the output exists and would be built the same"
    )
    own = parser.add_argument_group(f"your own logs (--profile {OWN_LOGS})").add_argument
    own("--input", nargs="+", default=[], metavar="FILE", help="your logs: JSON Lines, or a server's log")
    own(
        "--format",
        choices=("auto", *FORMATS[:-1]),
        default="auto",
        help="format of --input (default: what it looks like)",
    )
    own("--max-prompts", type=int, default=None, metavar="N", help="read only the first N prompts")
    own("--max-donors", type=int, default=2, metavar="N", help="earlier prompts that a case gets as donors")
    own("--negatives", type=int, default=8, metavar="N", help="cases that share nothing with their donors")
    own("--skip-bad", action="store_true", help="leave lines out that hold no prompt")
    flag("--quiet", action="store_true", help="show no progress")


def build(args: argparse.Namespace) -> int:
    """Make a manifest: documents through transforms, decoys and negative controls; or your own logs (--profile jsonl).

    What is made from LongBench stays under LongBench's licence; keep such manifests out of your repository unless your
    policy says otherwise.
    """
    builder: Any
    builder, cases = _read_logs(args) if args.profile == OWN_LOGS else _load_documents(args)
    progress, counts = Progress(args.quiet), Counter[str]()

    def count_cases() -> Iterator[Case]:
        for case in cases:
            counts[case.transform] += 1
            if progress.due():
                progress.show(f"{counts.total()} cases, at {case.dataset}")
            yield case

    if args.frozen:
        _compare(args.output, count_cases())
    elif not write_manifest(args.output, count_cases()) and args.profile != OWN_LOGS:
        raise InputError("no case could be built", hint="look at the datasets and transforms that you asked for")
    progress.clear()
    for why, count in sorted(builder.left_out.items()):
        say(f"left out {count} x {why}")
    if args.profile == OWN_LOGS:
        if not counts[OWN_TRAFFIC] + counts[NEXT_TURN]:
            say("warning: no prompt shares text with an earlier one; there is nothing to reuse in this log")
    else:
        counts = Counter({name: counts[name] for name in builder.transforms})  # those that gave no case, too
        if NEGATIVE in counts and not counts[NEGATIVE]:
            say("warning: no negative control could be built; gates on negative controls will fail as missing")
    found = {"manifest": args.output, "items": counts.total(), "sha256": hash_file(args.output)}
    print(json.dumps(found | {"by_transform": dict(counts)}))
    return 0


def _load_documents(args: argparse.Namespace) -> tuple[ManifestBuilder, Iterator[Case]]:
    if args.input:
        raise InputError(f"profile {args.profile} reads no --input", hint=f"--profile {OWN_LOGS} does")
    if args.datasets and not args.profile.startswith("longbench"):
        raise InputError(f"profile {args.profile} has no --datasets", hint="leave --datasets out")
    builder = ManifestBuilder(
        tuple(dict.fromkeys(args.transforms)), TransformOptions(args.max_segments, args.min_segment_chars)
    )
    choice = SourceSelection(
        profile=args.profile,
        datasets=tuple(dict.fromkeys(args.datasets)),
        max_items=args.max_items_per_dataset,
        longbench_dir=args.longbench_dir or read_variable("SEMBENCH_LONGBENCH_DIR"),
        hf_revision=args.hf_revision,
        hold_out=NEGATIVE in args.transforms,
    )
    return builder, builder.build_cases(load_sources(choice))


def _read_logs(args: argparse.Namespace) -> tuple[TrafficBuilder, Iterator[Case]]:
    if not args.input:
        raise InputError("--profile jsonl needs a log", hint="--input FILE; docs/guides/benchmark.md lists the formats")
    if args.max_donors < 1 or args.negatives < 0 or (args.max_prompts or 1) < 1:
        raise InputError("--max-donors and --max-prompts start at 1, --negatives at 0", hint="leave them out")
    builder = TrafficBuilder(TrafficOptions(args.max_donors, args.negatives, args.max_prompts))
    return builder, builder.build_cases(read_traffic(args.input, args.format, skip_bad=args.skip_bad))


def _compare(path: str, cases: Iterator[Case]) -> None:
    with open_text(path) as stream:
        for number, case in enumerate(cases, start=1):
            if stream.readline() != format_case(case) + "\n":
                raise InputError(
                    f"{path} line {number} would be built differently", hint="build to another file and compare"
                )
        if stream.readline():
            raise InputError(f"{path} is longer than what would be built", hint="build to another file and compare")


# -- audit-manifest --------------------------------------------------------------------------------------------------


_SHOWN = 20


def _add_audit_manifest(commands: Commands) -> None:
    parser = add_command(commands, "audit-manifest", audit_manifest, "check that a manifest can be trusted")
    flag = parser.add_argument
    flag("--manifest", required=True, metavar="FILE", help="made by sembench build")
    flag("--block-size", type=int, default=16, metavar="N", help="tokens in a KV block")
    flag("--tokenizer", default=None, metavar="NAME", help=TOKENIZER_HELP)


def audit_manifest(args: argparse.Namespace) -> int:
    """Check that a manifest can be trusted: negative controls share nothing with any donor, planted facts are where
    they should be, and every recipient that expects a semantic hit really shares text with its donors.

    Exit code 1 when something is wrong; each finding is one line on standard error.
    """
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


# -- checksum-manifest -----------------------------------------------------------------------------------------------


def _add_checksum_manifest(commands: Commands) -> None:
    parser = add_command(commands, "checksum-manifest", checksum_manifest, "print the SHA-256 of a manifest")
    parser.add_argument("--manifest", required=True, metavar="FILE", help="made by sembench build")


def checksum_manifest(args: argparse.Namespace) -> int:
    """Print the SHA-256 of a manifest, after reading every line of it."""
    print(json.dumps({"manifest": args.manifest, **describe_manifest(Path(args.manifest))}))
    return 0


# -- freeze ----------------------------------------------------------------------------------------------------------


def _add_freeze(commands: Commands) -> None:
    parser = add_command(commands, "freeze", freeze, "write down the checksums of manifests")
    flag = parser.add_argument
    flag("--spec", required=True, metavar="FILE", help="the frozen file to write, JSON")
    flag("--manifests-dir", required=True, metavar="DIR", help="folder of the manifests")
    flag("--block-size", type=int, default=16, metavar="N", help="tokens in a KV block, for the check")


def freeze(args: argparse.Namespace) -> int:
    """Write down the checksums of all manifests of a folder, after checking that they can be trusted."""
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


# -- verify-frozen ---------------------------------------------------------------------------------------------------


def _add_verify_frozen(commands: Commands) -> None:
    parser = add_command(commands, "verify-frozen", verify_frozen, "check manifests against a frozen file")
    parser.add_argument("--spec", required=True, metavar="FILE", help="from sembench freeze")
    parser.add_argument("--manifests-dir", required=True, metavar="DIR", help="folder of the manifests")


def verify_frozen(args: argparse.Namespace) -> int:
    """Check that manifests are byte for byte what was frozen. Exit code 1 when one is not; each has one line."""
    frozen = read_frozen(args.spec)
    changed = find_differences(frozen, args.manifests_dir)
    for line in changed:
        say(line)
    print(json.dumps({"spec": args.spec, "manifests": len(frozen), "changed": len(changed), "passed": not changed}))
    return 1 if changed else 0
