"""How well does each embedder find the donor that a prompt resembles, and what does it cost?

Real text from the data folder: long news clusters and short articles are the donors; queries change their instruction,
their order, their words, or retell them. One case puts the same long preamble before everything: a reader of the first
4,000 characters sees every donor as equal there, windows over the whole text do not.

    python bench/evidence.py --data-dir DATA [--documents 40]

A donor that ties with the true one counts as ranked before it, so guessing among equals is never a success.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
import numpy as np

from semblend.config import load_config
from semblend.fingerprint.embedder import Embedder, describe_embedders, make_embedder
from semblend.fingerprint.simhash import estimate_overlap, make_sketch
from semblend.prompt import Prompt

HEAD_CHARACTERS = 4000
PREAMBLE_CHARACTERS = 6000
EVIDENCE_AT = 0.60  # the default of SEMBLEND_MIN_SIMILARITY


@dataclass(frozen=True)
class Query:
    """``donor`` is the index of the true donor; None: nothing in the pool belongs to it."""

    case: str
    text: str
    donor: int | None


@dataclass(frozen=True)
class Pool:
    donors: list[str]
    queries: list[Query]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "evidence")
    parser.add_argument("--documents", type=int, default=40, help="long documents in the pool (at most 50)")
    parser.add_argument("--embedders", default="", help="comma-separated; default: all that work here")
    args = parser.parse_args()
    if args.quick:
        args.documents = 5
    report = _report.Report("evidence", args)
    models_dir = load_config().models_dir
    available = [row.name for row in describe_embedders(models_dir) if row.available and row.name != "none"]
    names = args.embedders.split(",") if args.embedders else available
    pools = build_pools(_report.data_dir(args), args.documents)
    rows: list[dict[str, Any]] = []
    for name in names:
        embedder = make_embedder(name, models_dir)
        for reach in ("whole", "head"):
            rows += measure(name, reach, pools, EmbedderScorer(embedder, reach))
    rows += measure("simhash", "whole", pools, SketchScorer())
    report.table("Who finds the donor that a prompt resembles", list(rows[0]), [list(row.values()) for row in rows])
    report.note(f"other_is_evidence: another donor is as similar as {EVIDENCE_AT}; cpu_ms: of one text")
    report.write(args.out)
    return 0


def build_pools(data_dir: Path, documents: int) -> list[Pool]:
    """The plain pool, and one in which every prompt starts with the same preamble. Seeded: the same every time."""
    rng = random.Random(7)
    long_texts = [item["context"] for item in read(data_dir / "longbench" / "multi_news.jsonl.gz")]
    stories = [(item["article"], item["summary"]) for item in read(data_dir / "summ" / "cnndm_realsumm.jsonl.gz")]
    known, unknown = long_texts[: min(documents, 50)], long_texts[50:]
    donors = [f"Summarize the following.\n\n{text}" for text in known + [story for story, _ in stories]]
    queries = []
    for index, text in enumerate(known):
        question = "\n\nQuestion: who is mentioned first, and why?"
        queries.append(Query("other_instruction", f"Answer from the text below only.\n\n{text}{question}", index))
        queries.append(Query("reordered", "Summarize the following.\n\n" + reordered(text, rng), index))
        queries.append(Query("edited_1_in_10", "Summarize the following.\n\n" + edited(text, rng), index))
    queries += [Query("retold", summary, len(known) + i) for i, (_, summary) in enumerate(stories)]
    queries += [Query("unrelated", f"Summarize the following.\n\n{text}", None) for text in unknown]
    preamble = next(read(data_dir / "longbench" / "gov_report.jsonl.gz"))["context"][:PREAMBLE_CHARACTERS]
    behind = [
        Query("shared_preamble", f"{preamble}\n\n{text}\n\nWhat happened, in one line?", index)
        for index, text in enumerate(known)
    ]
    return [Pool(donors, queries), Pool([f"{preamble}\n\n{donor}" for donor in donors], behind)]


def read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def reordered(text: str, rng: random.Random) -> str:
    """Passages of three sentences, shuffled."""
    sentences = re.split(r"(?<=[.!?]) ", text)
    passages = [" ".join(sentences[i : i + 3]) for i in range(0, len(sentences), 3)]
    rng.shuffle(passages)
    return "\n".join(passages)


def edited(text: str, rng: random.Random) -> str:
    """One word in ten replaced by another word of the text."""
    words = text.split(" ")
    return " ".join(rng.choice(words) if rng.random() < 0.1 else word for word in words)


def as_prompt(text: str) -> Prompt:
    """Words and marks as token ids: any injective numbering serves, this one needs no tokenizer."""
    return Prompt([zlib.crc32(word.encode()) & 0x7FFFFFFF for word in re.findall(r"\w+|[^\w\s]", text)], text=text)


class EmbedderScorer:
    """Cosines of a query with every donor; ``reach`` is the whole prompt or its first 4,000 characters."""

    def __init__(self, embedder: Embedder, reach: str) -> None:
        self.embedder = embedder
        self.reach = reach
        self.cpu_ms: list[float] = []
        self.rows = np.zeros((0, 0), dtype=np.float32)
        self.embed("load the model before the clock runs")
        self.cpu_ms.clear()

    def index(self, donors: list[str]) -> None:
        self.rows = np.stack([self.embed(text) for text in donors])

    def score(self, query: str) -> np.ndarray:
        return self.rows @ self.embed(query)

    def embed(self, text: str) -> np.ndarray:
        prompt = as_prompt(text if self.reach == "whole" else text[:HEAD_CHARACTERS])
        start = time.process_time()
        vector = self.embedder.embed(prompt)
        self.cpu_ms.append((time.process_time() - start) * 1000.0)
        if vector is None:
            raise SystemExit(f"{self.embedder.name} found nothing to embed in {text[:60]!r}")
        return vector


class SketchScorer:
    """Share of 3-grams in common, from sketches."""

    def __init__(self) -> None:
        self.cpu_ms: list[float] = []
        self.sketches: list[Any] = []

    def index(self, donors: list[str]) -> None:
        self.sketches = [self.sketch(text) for text in donors]

    def score(self, query: str) -> np.ndarray:
        mine = self.sketch(query)
        return np.array([estimate_overlap(mine, other) for other in self.sketches])

    def sketch(self, text: str) -> Any:
        tokens = as_prompt(text).token_ids
        start = time.process_time()
        made = make_sketch(tokens)
        self.cpu_ms.append((time.process_time() - start) * 1000.0)
        return made


def measure(name: str, reach: str, pools: list[Pool], scorer: EmbedderScorer | SketchScorer) -> list[dict[str, Any]]:
    outcomes: dict[str, list[tuple[int | None, float, float]]] = {}
    for pool in pools:
        print(f"{name} ({reach}): {len(pool.donors)} donors, {len(pool.queries)} queries", file=sys.stderr)
        scorer.index(pool.donors)
        for query in pool.queries:
            scores = scorer.score(query.text)
            true = None if query.donor is None else float(scores[query.donor])
            rank = None if true is None else int((scores >= true - 1e-6).sum())
            others = np.delete(scores, query.donor) if query.donor is not None else scores
            outcomes.setdefault(query.case, []).append((rank, true if true is not None else 0.0, float(others.max())))
    cpu_ms = mean(scorer.cpu_ms)
    return [row(name, reach, case, results, cpu_ms) for case, results in outcomes.items()]


def row(
    name: str, reach: str, case: str, results: list[tuple[int | None, float, float]], cpu_ms: float
) -> dict[str, Any]:
    ranks = [rank for rank, _, _ in results if rank is not None]
    return {
        "embedder": name,
        "reach": reach,
        "case": case,
        "n": len(results),
        "first": mean(rank == 1 for rank in ranks) if ranks else None,
        "top5": mean(rank <= 5 for rank in ranks) if ranks else None,
        "similarity": mean(true for rank, true, _ in results if rank is not None) if ranks else None,
        "best_other": mean(other for _, _, other in results),
        "other_is_evidence": mean(other >= EVIDENCE_AT for _, _, other in results),
        "cpu_ms": cpu_ms,
    }


if __name__ == "__main__":
    sys.exit(main())
