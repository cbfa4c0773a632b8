"""Make a manifest: documents through transforms, decoys and negative controls; or your own logs (--profile jsonl).

What is made from LongBench stays under LongBench's licence; keep such manifests out of your repository unless your
policy says otherwise.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator

from sembench.files import hash_file, open_text
from sembench.manifests.build import ALL_TRANSFORMS, NEGATIVE, ManifestBuilder
from sembench.manifests.cases import Case, format_case, write_manifest
from sembench.manifests.datasets import OWN_LOGS, PROFILES, SourceSelection, load_sources
from sembench.manifests.traffic import NEXT_TURN, OWN_TRAFFIC, TrafficBuilder, TrafficOptions, read_traffic
from sembench.manifests.transforms import TransformOptions
from sembench.settings import read_variable
from semblend.cli.output import Progress, say
from semblend.errors import InputError
from semblend.text.log_formats import FORMATS

EXAMPLES = (
    "sembench build --profile synthetic-v1 --output cases.jsonl",
    "sembench build --profile jsonl --input prompts.jsonl --output cases.jsonl",
)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "build", help="make a manifest: the cases of a benchmark, built in or from your own logs", description=__doc__
    )
    parser.add_argument("--profile", choices=(*PROFILES, OWN_LOGS), required=True, help="where the documents come from")
    parser.add_argument("--output", required=True, metavar="FILE", help="manifest to write; packed if it ends in .gz")
    parser.add_argument("--datasets", nargs="+", default=[], metavar="NAME", help="LongBench datasets (default: all)")
    parser.add_argument(
        "--max-items-per-dataset",
        type=int,
        default=None,
        metavar="N",
        help="documents of a dataset that become donors (default: all)",
    )
    parser.add_argument(
        "--transforms", nargs="+", default=list(ALL_TRANSFORMS), metavar="NAME",
        help="changes between a donor and its recipient; default: all of " + ", ".join(ALL_TRANSFORMS),
    )  # fmt: skip
    parser.add_argument(
        "--max-segments", type=int, default=4, metavar="N", help="passages that a document is cut into, at most"
    )
    parser.add_argument(
        "--min-segment-chars", type=int, default=400, metavar="N", help="shortest passage, in characters"
    )
    parser.add_argument(
        "--longbench-dir", default="", metavar="DIR", help="LongBench folder with NAME.jsonl or NAME.jsonl.gz files"
    )
    parser.add_argument(
        "--hf-revision", default=None, metavar="REVISION", help="revision of the dataset on the Hugging Face hub"
    )
    parser.add_argument(
        "--frozen", action="store_true", help="change nothing: check that the output exists and would be built the same"
    )
    own = parser.add_argument_group(f"your own logs (--profile {OWN_LOGS})")
    own.add_argument("--input", nargs="+", default=[], metavar="FILE", help="your logs: JSON Lines, or a server's log")
    own.add_argument(
        "--format",
        choices=("auto", *FORMATS[:-1]),
        default="auto",
        help="format of --input (default: what it looks like)",
    )
    own.add_argument("--max-prompts", type=int, default=None, metavar="N", help="read only the first N prompts")
    own.add_argument(
        "--max-donors", type=int, default=2, metavar="N", help="earlier prompts that a case gets as donors (default: 2)"
    )
    own.add_argument(
        "--negatives", type=int, default=8, metavar="N", help="cases that share nothing with their donors (default: 8)"
    )
    own.add_argument("--skip-bad", action="store_true", help="leave lines out that hold no prompt")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    if args.profile == OWN_LOGS:
        return _build_from_logs(args)
    if args.input:
        raise InputError(f"profile {args.profile} reads no --input", hint=f"--profile {OWN_LOGS} does")
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
    if args.datasets and not args.profile.startswith("longbench"):
        raise InputError(f"profile {args.profile} has no --datasets", hint="leave --datasets out")
    progress, counts = Progress(args.quiet), dict.fromkeys(builder.transforms, 0)

    def build_cases() -> Iterator[Case]:
        for case in builder.build_cases(load_sources(choice)):
            counts[case.transform] += 1
            if progress.due():
                progress.show(f"{sum(counts.values())} cases, at {case.dataset}")
            yield case

    if args.frozen:
        _compare(args.output, build_cases())
    elif not write_manifest(args.output, build_cases()):
        raise InputError("no case could be built", hint="look at the datasets and transforms that you asked for")
    progress.clear()
    for why, count in sorted(builder.left_out.items()):
        say(f"left out {count} x {why}")
    if NEGATIVE in counts and not counts[NEGATIVE]:
        say("warning: no negative control could be built; gates on negative controls will fail as missing")
    print(json.dumps(_summarize(args.output, counts)))
    return 0


def _build_from_logs(args: argparse.Namespace) -> int:
    if not args.input:
        raise InputError("--profile jsonl needs a log", hint="--input FILE; docs/guides/benchmark.md lists the formats")
    if args.max_donors < 1 or args.negatives < 0 or (args.max_prompts or 1) < 1:
        raise InputError("--max-donors and --max-prompts start at 1, --negatives at 0", hint="leave them out")
    builder = TrafficBuilder(TrafficOptions(args.max_donors, args.negatives, args.max_prompts))
    progress, counts = Progress(args.quiet), Counter[str]()

    def build_cases() -> Iterator[Case]:
        for case in builder.build_cases(read_traffic(args.input, args.format, skip_bad=args.skip_bad)):
            counts[case.transform] += 1
            if progress.due():
                progress.show(f"{sum(counts.values())} cases")
            yield case

    if args.frozen:
        _compare(args.output, build_cases())
    else:
        write_manifest(args.output, build_cases())
    progress.clear()
    for why, count in sorted(builder.left_out.items()):
        say(f"left out {count} x {why}")
    if not counts[OWN_TRAFFIC] + counts[NEXT_TURN]:
        say("warning: no prompt shares text with an earlier one; there is nothing to reuse in this log")
    print(json.dumps(_summarize(args.output, dict(counts))))
    return 0


def _summarize(path: str, counts: dict[str, int]) -> dict[str, object]:
    return {"manifest": path, "items": sum(counts.values()), "sha256": hash_file(path), "by_transform": counts}


def _compare(path: str, cases: Iterator[Case]) -> None:
    with open_text(path) as stream:
        for number, case in enumerate(cases, start=1):
            if stream.readline() != format_case(case) + "\n":
                raise InputError(
                    f"{path} line {number} would be built differently", hint="build to another file and compare"
                )
        if stream.readline():
            raise InputError(f"{path} is longer than what would be built", hint="build to another file and compare")
