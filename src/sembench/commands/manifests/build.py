"""Make a manifest: documents through transforms, decoys and negative controls.

What is made from LongBench stays under LongBench's licence; keep such manifests out of your repository unless your
policy says otherwise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from sembench.files import hash_file, open_text
from sembench.manifests.build import ALL_TRANSFORMS, NEGATIVE, ManifestBuilder
from sembench.manifests.cases import Case, format_case, write_manifest
from sembench.manifests.datasets import PROFILES, SourceSelection, load_sources
from sembench.manifests.transforms import TransformOptions
from sembench.settings import read_variable
from semblend.cli.output import Progress, say
from semblend.errors import InputError


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "build", help="make a manifest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=PROFILES, required=True, help="where the documents come from")
    parser.add_argument("--output", required=True, help="manifest to write; packed if it ends in .gz")
    parser.add_argument("--datasets", nargs="+", default=[], metavar="NAME", help="LongBench datasets (default: all)")
    parser.add_argument(
        "--max-items-per-dataset",
        type=int,
        default=None,
        metavar="N",
        help="documents of a dataset that become donors",
    )
    parser.add_argument(
        "--transforms", nargs="+", default=list(ALL_TRANSFORMS), metavar="NAME",
        help="default: all of " + ", ".join(ALL_TRANSFORMS),
    )  # fmt: skip
    parser.add_argument("--max-segments", type=int, default=4, help="passages of a document, where it is cut")
    parser.add_argument("--min-segment-chars", type=int, default=400, help="shortest passage")
    parser.add_argument("--longbench-dir", default="", help="folder with NAME.jsonl or NAME.jsonl.gz files")
    parser.add_argument("--hf-revision", default=None, help="revision of the dataset on the Hugging Face hub")
    parser.add_argument(
        "--frozen", action="store_true", help="change nothing: check that the output exists and would be built the same"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
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
