"""The offline benchmark on its own fixture, ours beside the peers, and how long 1,000 items of 8,000 tokens take.

    python bench/sembench_offline.py --data-dir DATA [--quick] [--out bench/results/sembench_offline.json]

First table: every planner on the fixture, with one store for all donors and with a store for each item. The peer
(semblend 0.3.25) runs in its own environment (python bench/peers.py --setup makes it); what it proposes is judged by
the same check as everything else. Second table: the time of the whole command, one core, on windows of real texts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lib.reporting as reporting
import numpy as np
from lib import real_texts
from lib.reporting import REPO, progress

from sembench.manifests.build import ALL_TRANSFORMS, ManifestBuilder
from sembench.manifests.cases import read_manifest, write_manifest
from sembench.manifests.datasets import Source, SourceSelection, Task, load_sources
from sembench.manifests.transforms import TransformOptions
from sembench.offline.planners import Proposal
from sembench.offline.replay import TokenSpool, check_proposal
from sembench.result import RequestRecord, read_result
from sembench.scoring.aggregate import aggregate, aggregate_by_transform
from semblend.span import Span
from semblend.text.tokenization import StableTokenizer

BLOCK = 16
PEER = "semblend-0.3.25"
ADAPTER = Path(__file__).resolve().parent / "lib" / "peer_adapters" / "semblend_0325_sembench.py"
PEER_FLAGS = {  # several donors is the default of the peer's own benchmark; on edited texts one donor finds more
    "semblend 0.3.25, jaccard": ("--embedder", "jaccard"),
    "semblend 0.3.25, jaccard, one donor": ("--embedder", "jaccard", "--multi-donor", "0"),
    "semblend 0.3.25, perfect embedder": ("--embedder", "oracle"),
    "semblend 0.3.25, perfect embedder, one donor": ("--embedder", "oracle", "--multi-donor", "0"),
}
PLANNERS = ("ours", "none", "block-hash", "lmcache-chunks")
WINDOW_CHARS = 34_000  # about 8,000 built-in tokens
WHOLE = (
    "exact_repeat", "instruction_variant", "same_evidence_new_task", "leading_evidence_new_task", "rag_reorder",
    "fuzzy_edit", "paraphrase", "near_duplicate", "swapped_numbers", "negative_control",
)  # fmt: skip
COLUMNS = ("exact_prefix_block_hit_rate", "exact_block_hit_rate", "semantic_candidate_block_rate",
           "semantic_eligible_block_rate", "semantic_eligible_lift")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reporting.add_common_arguments(parser, "sembench_offline")
    parser.add_argument("--peers-dir", default=str(REPO / ".peers"), help="what bench/peers.py --setup made")
    parser.add_argument("--items", type=int, default=1000, help="items of the timed run")
    parser.add_argument("--only", choices=("fixture", "speed"), default=None)
    args = parser.parse_args(arguments)
    report = reporting.Report("sembench_offline", args)
    with tempfile.TemporaryDirectory() as scratch:
        if args.only != "speed":
            on_the_fixture(report, Path(scratch), Path(args.peers_dir))
        if args.only != "fixture":
            speed(report, args, Path(scratch), 60 if args.quick else args.items)
    report.write(args.out)
    return 0


# -- the fixture ---------------------------------------------------------------------------------------------------


def on_the_fixture(report: reporting.Report, scratch: Path, peers: Path) -> None:
    manifest = scratch / "fixture.jsonl"
    write_manifest(manifest, ManifestBuilder().build_cases(load_sources(SourceSelection())))
    found: dict[tuple[str, str], list[RequestRecord]] = {}
    for store in ("one", "per-item"):
        for planner in PLANNERS:
            progress(f"fixture: {planner}, {store}")
            found[planner, store] = offline(manifest, scratch, "--planner", planner, "--store", store)[0]
        for name, flags in PEER_FLAGS.items():
            records = peer(manifest, scratch, peers / PEER, ("--store", store, *flags), found["none", store], report)
            if records:
                found[name, store] = records
    totals = {key: aggregate(records) for key, records in found.items()}
    report.table(
        f"The fixture, {len(found['none', 'one'])} items, blocks of {BLOCK}, stable tokenizer",
        ["planner", "store", "exact prefix", "exact blocks", "candidate", "eligible", "lift", "lift 95 % low", "high",
         "wrong tokens", "negatives eligible"],
        [
            [planner, store, *(own[name] for name in COLUMNS), *(own["semantic_eligible_lift_ci"] or (None, None)),
             own["wrong_tokens"], own["negative_control_semantic_eligible_rate"]]
            for (planner, store), own in totals.items()
        ],
    )  # fmt: skip
    for store in ("one", "per-item"):
        split = {
            key[0]: aggregate_by_transform(own) for key, own in found.items() if key[1] == store and key[0] != "none"
        }
        report.table(
            f"Eligible blocks by transform, store: {store}",
            ["transform", *split],
            [[name, *(own[name]["semantic_eligible_block_rate"] for own in split.values())] for name in ALL_TRANSFORMS],
        )
    report.note("one store: all donors of the manifest and 32 distractors (the peer: all donors, no distractors)")
    report.note("exact blocks: full blocks on the grid by content, anywhere; exact prefix: chained, as in vLLM")
    report.note("intervals: bootstrap over documents")


def offline(manifest: Path, scratch: Path, *flags: str) -> tuple[tuple[RequestRecord, ...], dict[str, float]]:
    """The command itself, in a process of its own; its records, and what it cost."""
    output = scratch / "result.json"
    command = [sys.executable, "-m", "sembench", "run-offline", "--manifest", str(manifest), "--output", str(output)]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--quiet", *flags], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)  # this child's own usage; getrusage would mix all children
    wall_s, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    if process.returncode:
        reporting.fail(f"run-offline {' '.join(flags)} failed", hint="its message stands above")
    cost = {"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}
    return read_result(output).requests, cost


def peer(
    manifest: Path, scratch: Path, environment: Path, flags: Sequence[str], frame: Sequence[RequestRecord],
    report: reporting.Report,
) -> list[RequestRecord] | None:  # fmt: skip
    """The peer's proposals, judged by our check; ``frame`` are the records without a planner, which it fills in."""
    python = environment / "bin" / "python"
    if not python.exists():
        report.note(f"{PEER} is missing: python bench/peers.py --setup makes its environment")
        return None
    progress(f"fixture: {PEER} {' '.join(flags)}")
    cases, out = scratch / "cases.npz", scratch / "peer.json"
    tokens, donors = write_cases(manifest, cases)
    done = subprocess.run(
        [str(python), str(ADAPTER), "--cases", str(cases), "--out", str(out), *flags],
        env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        report.note(f"{PEER} {' '.join(flags)}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        return None
    answers = json.loads(out.read_text(encoding="utf-8"))["answers"]
    records = []
    for record in frame:
        spans = tuple(Span(*span) for span in answers[record.item_id]["spans"])
        verdict = check_proposal(tokens[record.item_id], Proposal(spans), donors, BLOCK)
        records.append(
            replace(
                record,
                semantic_candidate_blocks=verdict.candidate_blocks,
                semantic_candidate_tokens=verdict.candidate_tokens,
                semantic_eligible_blocks=verdict.eligible_blocks,
                semantic_eligible_tokens=verdict.eligible_tokens,
                wrong_tokens=verdict.wrong_tokens,
                semblend_found=bool(spans),
                semblend_latency_ms=answers[record.item_id]["cpu_ms"],
            )
        )
    donors.close()
    return records


def write_cases(manifest: Path, path: Path) -> tuple[dict[str, np.ndarray], TokenSpool]:
    """Tokens and texts for the peer's process; the tokens of recipients and donors for the judge."""
    encode = StableTokenizer().encode
    texts: dict[str, str] = {}
    donors: dict[str, list[str]] = {}
    spool = TokenSpool()
    for case in read_manifest(manifest):
        texts[case.item_id] = case.recipient_prompt
        donors[case.item_id] = [donor.donor_id for donor in case.donor_prompts]
        for donor in case.donor_prompts:
            if spool.get_length(donor.donor_id) is None:
                texts[donor.donor_id] = donor.text
                spool.add(donor.donor_id, encode(donor.text))
    tokens = {key: encode(text) for key, text in texts.items()}
    names = {"order": list(texts), "texts": texts, "donors": donors}
    ends = np.cumsum([len(own) for own in tokens.values()])
    np.savez(path, tokens=np.concatenate(list(tokens.values())), ends=ends, names=np.array(json.dumps(names)))
    return {item: tokens[item] for item in donors}, spool


# -- speed ---------------------------------------------------------------------------------------------------------


def speed(report: reporting.Report, args: argparse.Namespace, scratch: Path, items: int) -> None:
    manifest = scratch / "long.jsonl"
    builder = ManifestBuilder(WHOLE, TransformOptions(max_segments=4, min_segment_chars=400))
    count = -(-items // (len(WHOLE) - 2))  # some documents do not lend themselves to every transform
    sources = list(windows(reporting.data_dir(args), count + count // 4))
    if len(sources) < count:
        report.note(f"the real texts gave {len(sources)} windows of {count}")
    cases = builder.build_cases([[replace(own, held_out=at >= count) for at, own in enumerate(sources)]])
    write_manifest(manifest, _first(cases, items))
    rows = []
    for planner, store in (("ours", "one"), ("ours", "per-item"), ("none", "one")):
        progress(f"speed: {planner}, {store}")
        records, cost = offline(
            manifest, scratch, "--planner", planner, "--store", store, "--tokenizer", args.tokenizer
        )
        own = aggregate(records)
        rows.append([
            planner, store, len(records), own["prompt_tokens"] // len(records), cost["wall_s"], cost["cpu_s"],
            cost["peak_mib"], own["mean_semblend_latency_ms"], own["semantic_eligible_block_rate"],
            own["semantic_eligible_lift"], own["wrong_tokens"],
        ])  # fmt: skip
    report.table(
        f"The whole command on windows of real texts, tokenizer {args.tokenizer}, one core",
        ["planner", "store", "items", "tokens an item", "wall s", "CPU s", "peak MiB", "lookup ms (mean)", "eligible",
         "lift", "wrong tokens"],
        rows,
    )  # fmt: skip
    report.note(f"{count} documents of about 8,000 tokens, every transform of each; held-out ones for the negatives")
    report.note("wall and CPU of the process from start to exit: reading, tokenizing, donors, lookups, checks, writing")


def windows(data: Path, count: int) -> Iterator[Source]:
    """Stretches of real documents, none twice, each about 8,000 tokens; short documents are joined."""
    held, number = "", 0
    for document in (*real_texts.longbench(data), *real_texts.leval(data)):
        held += document.text.replace("\n\n", "\n") + "\n"
        while len(held) >= WINDOW_CHARS and number < count:
            yield Source("real", f"window-{number:04d}", held[:WINDOW_CHARS], (Task("What is described?"),))
            held, number = held[WINDOW_CHARS:], number + 1


def _first(cases: Iterable[Any], count: int) -> Iterator[Any]:
    """The negative controls come last; keep them, and as many others as fit."""
    kept = list(cases)
    negatives = [case for case in kept if case.negative_control]
    others = [case for case in kept if not case.negative_control]
    yield from others[: count - len(negatives)]
    yield from negatives


if __name__ == "__main__":
    raise SystemExit(main())
