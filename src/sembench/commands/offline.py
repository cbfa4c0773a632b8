"""``sembench run-offline``: replay a manifest without a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from sembench.files import hash_file
from sembench.live.run import ResumeLog
from sembench.manifests.cases import Case, check_versions, choose_cases, read_manifest
from sembench.manifests.datasets import write_document
from sembench.offline.planners import BUILT_IN, PlannerOptions, make_planner_factory
from sembench.offline.replay import STORES, TOKENIZER_HELP, ChosenTokenizer, Distractor, OfflineReplay, choose_tokenizer
from sembench.result import RequestRecord, Result, describe_run, write_result
from sembench.scoring.aggregate import build_result
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, say, table
from semblend.errors import InputError

DEFAULT_DISTRACTORS = "32"
_DISTRACTOR_WORDS = 700


def add(commands: Commands) -> None:
    parser = add_command(commands, "run-offline", run_offline, "replay a manifest without a server")
    flag = parser.add_argument
    flag("--manifest", required=True, metavar="FILE", help="made by sembench build; packed if it ends in .gz")
    flag("--output", required=True, metavar="FILE", help="result file to write, JSON")
    flag("--block-size", type=int, default=16, metavar="N", help="tokens in a KV block")
    flag("--tokenizer", default=None, metavar="NAME", help=TOKENIZER_HELP)
    flag("--no-tokenizer-stand-in", action="store_true", help="fail where a named tokenizer is not at hand")
    flag(
        "--planner",
        default="ours",
        metavar="NAME",
        help=f"what decides on reuse: {', '.join(BUILT_IN)}, or module:Class",
    )
    flag("--store", choices=STORES, default="one", help="one donor store for all cases, or one for each")
    flag(
        "--distractors",
        default=DEFAULT_DISTRACTORS,
        metavar="N|MANIFEST",
        help="unrelated donors in the one store: so many made ones, or all donors of another manifest",
    )
    flag(
        "--max-items",
        type=int,
        default=None,
        metavar="N",
        help="run N cases and their donors, every transform in turn (default: all)",
    )
    flag("--chunk-size", type=int, default=256, metavar="N", help="tokens in a chunk, for --planner lmcache-chunks")
    flag("--semblend-path", default="", metavar="DIR", help="folder to import a module:Class planner from")
    flag(
        "--semblend-embedder",
        default=None,
        metavar="NAME",
        help="embedder that adds evidence to the spans (default: none)",
    )
    flag(
        "--semblend-min-similarity",
        type=float,
        default=None,
        metavar="COSINE",
        help="lowest cosine similarity of that evidence (default: the package's)",
    )
    flag(
        "--semblend-min-reuse-ratio",
        type=float,
        default=None,
        metavar="SHARE",
        help="decline reuse below this share of the prompt (default: the package's)",
    )
    flag("--disable-multi-donor", action="store_true", help="use only the spans of the best donor")
    flag("--resume", action="store_true", help="go on with an interrupted run")
    flag("--skip-bad", action="store_true", help="leave out lines that cannot be read, and count them")
    flag("--skip-verify", action="store_true", help="accept a manifest of mixed benchmark versions")
    flag("--quiet", action="store_true", help="no progress and no table")
    for name in ("--run-id", "--backend-id", "--baseline-id", "--engine-version"):
        flag(name, default=None, metavar="NAME", help="a name to keep in the result")
    flag("--arm", default="single", choices=("cold", "warm", "single"), help="name of the arm, to keep in the result")


def run_offline(args: argparse.Namespace) -> int:
    """Replay a manifest without a server: exact blocks, what a planner proposes, and what of it is token-equal.

    All donors of the manifest and the distractors are in one store; --store per-item gives every case its own donors
    only.
    """
    if args.block_size < 1 or args.chunk_size < 1:
        raise InputError("--block-size and --chunk-size start at 1", hint="use 16 and 256")
    if args.semblend_path:
        sys.path.insert(0, args.semblend_path)
    options = PlannerOptions(
        args.block_size, args.chunk_size, args.semblend_embedder, args.semblend_min_similarity,
        args.semblend_min_reuse_ratio, not args.disable_multi_donor,
    )  # fmt: skip
    make_planner_factory(args.planner, options)  # a wrong name is reported before the long work
    chosen = choose_tokenizer(args.tokenizer, allow_stand_in=not args.no_tokenizer_stand_in)
    if chosen.stand_in:
        say(f"warning: {chosen.note}")
    manifest = _Manifest(args.manifest, args.max_items, args.skip_bad, args.skip_verify)
    config = _build_config(args, options, chosen)
    capacity = (
        manifest.donor_chars + _count_distractor_chars(args) if args.store == "one" else manifest.largest_item_chars
    )
    factory = make_planner_factory(args.planner, replace(options, capacity_chars=capacity))
    resume_log = ResumeLog(args.output, {"manifest_sha256": manifest.sha256, **config}, resume=args.resume)
    finished = False
    try:
        distractors = _make_distractors(args.distractors if args.store == "one" else "0")
        replay = OfflineReplay(manifest, factory, chosen.encoder, args.block_size, args.arm, distractors)
        records = _replay_cases(replay, manifest, resume_log, args)
        result = _build_result(args, manifest, config, records)
        write_result(args.output, result)
        finished = True
    finally:
        resume_log.close(finished=finished)
    _print_summary(args, result, manifest)
    return 0


class _Manifest:
    """A manifest that is read several times; a bad line is reported once."""

    def __init__(self, path: str, max_items: int | None, skip_bad: bool, skip_verify: bool) -> None:
        if max_items is not None and max_items < 1:
            raise InputError(f"--max-items is {max_items}", hint="ask for one item or more")
        self.path, self._max_items = path, max_items
        self.sha256 = hash_file(path)
        self.items = 0
        self._bad_lines: set[str] = set()
        self._on_bad = self._record_bad_line if skip_bad else None
        versions: set[str] = set()
        seen: set[str] = set()
        self.donor_chars = self.largest_item_chars = 0
        for case in self():
            self.items += 1
            chars = {donor.donor_id: len(donor.text) for donor in case.donor_prompts}
            self.largest_item_chars = max(self.largest_item_chars, sum(chars.values()))
            self.donor_chars += sum(own for donor_id, own in chars.items() if donor_id not in seen)
            seen |= chars.keys()
            versions.add(case.benchmark_version)
        check_versions(path, list(versions)[:1] if skip_verify else versions)
        if self.bad:
            say(f"warning: {self.bad} lines left out")

    @property
    def bad(self) -> int:
        return len(self._bad_lines)

    def __call__(self) -> Iterator[Case]:
        return choose_cases(self.path, self._max_items, self._on_bad)

    def _record_bad_line(self, error: InputError) -> None:
        if error.message not in self._bad_lines:  # the file is read more than once
            self._bad_lines.add(error.message)
            say(f"left out: {error.message}")


def _replay_cases(
    replay: OfflineReplay, manifest: _Manifest, resume_log: ResumeLog, args: argparse.Namespace
) -> list[RequestRecord]:
    progress = Progress(args.quiet)

    def report_progress(what: str, count: int) -> None:
        if progress.due():
            of = f" of {manifest.items}" if what == "recipients" else ""
            progress.show(f"{what}: {count}{of}")

    walk = replay.replay_in_one_store if args.store == "one" else replay.replay_per_item
    earlier = dict(resume_log.done)
    if earlier:
        say(f"going on after {len(earlier)} of {manifest.items} items")
    for record in walk(report_progress, earlier.__contains__):
        resume_log.add(record.item_id, (record,))
    progress.clear()
    return [resume_log.done[case.item_id][0] for case in manifest()]


def _make_distractors(given: str) -> Any:
    """Return a function that yields (id, text) pairs, each time from the start."""
    if given.isdigit():
        return lambda: (
            (f"distractor-{number:05d}", write_document(f"distractor:{number}", _DISTRACTOR_WORDS).context)
            for number in range(int(given))
        )

    def read_distractors() -> Iterable[Distractor]:
        for case in read_manifest(given):
            for donor in case.donor_prompts:
                yield f"distractor-{donor.donor_id}", donor.text

    return read_distractors


def _count_distractor_chars(args: argparse.Namespace) -> int:
    if args.distractors.isdigit():
        return int(args.distractors) * _DISTRACTOR_WORDS * 8
    return sum(len(donor.text) for case in read_manifest(args.distractors) for donor in case.donor_prompts)


def _build_config(args: argparse.Namespace, options: PlannerOptions, chosen: ChosenTokenizer) -> dict[str, Any]:
    return {
        "mode": "offline",
        "planner": args.planner,
        "store": args.store,
        "distractors": args.distractors if args.store == "one" else "0",
        "block_size": args.block_size,
        "tokenizer": chosen.as_dict(),
        "max_items": args.max_items,
        "chunk_size": options.chunk_size,
        "semblend_embedder": options.embedder,
        "semblend_min_similarity": options.min_similarity,
        "semblend_min_reuse_ratio": options.min_reuse_ratio,
        "multi_donor": options.multi_donor,
    }


def _build_result(args: argparse.Namespace, manifest: _Manifest, config: Any, records: list[RequestRecord]) -> Result:
    run_object = describe_run(
        engine="offline",
        manifest_path=args.manifest,
        manifest_sha256=manifest.sha256,
        run_id=args.run_id,
        arm=args.arm,
        engine_version=args.engine_version,
        backend_id=args.backend_id,
        baseline_id=args.baseline_id,
    )
    return build_result(records, run=run_object, config={**config, "bad_lines": manifest.bad})


def _print_summary(args: argparse.Namespace, result: Result, manifest: _Manifest) -> None:
    names = ("exact_prefix_block_hit_rate", "exact_block_hit_rate", "semantic_candidate_block_rate",
             "semantic_eligible_block_rate", "semantic_eligible_lift", "wrong_tokens")  # fmt: skip
    if not args.quiet:
        groups = {**result.by_transform, "all": result.aggregate}
        rows = [
            [name, own["request_count"], *(_format_value(own[key]) for key in names)] for name, own in groups.items()
        ]
        head = ("transform", "n", "exact prefix", "exact blocks", "candidate", "eligible", "lift", "wrong tokens")
        say(table(rows, head=head, right=range(1, len(head))))
    shared = result.aggregate["negative_control_semantic_eligible_tokens"]
    if shared:
        say(
            f"warning: {shared} tokens of negative controls are held by donors; "
            f"sembench audit-manifest --manifest {args.manifest} shows which"
        )
    summary = {key: result.aggregate[key] for key in (*names, "negative_control_semantic_eligible_rate")}
    print(json.dumps({"result": args.output, "items": manifest.items, **summary}))


def _format_value(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
