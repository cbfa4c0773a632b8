"""Multi-document questions with gold answers: passages in the order in which they were retrieved.

musique     CacheBlend's MuSiQue inputs, ten passages
hotpot      HotpotQA, distractor setting, ten passages
longbench   the multi-hop sets of LongBench, their passages
nq          Natural Questions: the passage with the answer among nine that BM25 finds for the question, by its ranks
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _documents import read_jsonl

RETRIEVED = 10


@dataclass(frozen=True, slots=True)
class Question:
    """``passages`` in retrieval order; any of ``golds`` is right."""

    question_id: str
    dataset: str
    text: str
    passages: tuple[str, ...]
    golds: tuple[str, ...]


def questions(folder: Path) -> Iterator[Question]:
    """All of them, the sets taking turns."""
    sets = (_contexts(folder, "cacheblend_musique_s", "musique"), _contexts(folder, "hotpotqa_distractor", "hotpot"),
            _longbench(folder), _natural(folder))  # fmt: skip
    for turn in itertools.zip_longest(*sets):
        yield from (question for question in turn if question is not None)


def _contexts(folder: Path, name: str, dataset: str) -> Iterator[Question]:
    for row in read_jsonl(folder / "rag" / f"{name}.jsonl.gz"):
        passages = tuple(_join(one) for one in row["ctxs"])
        yield Question(row["_id"], dataset, row["question"], passages, tuple(row["answers"]))


def _longbench(folder: Path) -> Iterator[Question]:
    for name in ("hotpotqa", "2wikimqa", "musique"):
        for row in read_jsonl(folder / "longbench" / f"{name}.jsonl.gz"):
            parts = [part.partition(":\n")[2].strip() for part in row["context"].split("Passage ")[1:]]
            yield Question(row["_id"], "longbench", row["input"], tuple(p for p in parts if p), tuple(row["answers"]))


def _natural(folder: Path) -> Iterator[Question]:
    rows = list(read_jsonl(folder / "rag" / "nq_open_oracle.jsonl.gz"))
    oracle = [_join(row["ctxs"][0]) for row in rows]
    others = [_join(one) for one in read_jsonl(folder / "rag" / "2wiki_corpus.jsonl.gz")]
    index = Bm25([*oracle, *others])
    for number, row in enumerate(rows):
        found = index.find(row["question"], RETRIEVED)
        if number not in found:
            found = [*found[: RETRIEVED - 1], number]
        passages = tuple(index.texts[i] for i in found)
        yield Question(row["_id"], "nq", row["question"], passages, tuple(row["answers"]))


def _join(context: dict[str, str]) -> str:
    return f"{context['title']}\n{context['text']}".strip()


class Bm25:
    """Okapi BM25 over a few thousand texts."""

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        self.texts = texts
        self._found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        counts = [Counter(_words(text)) for text in texts]
        mean = sum(sum(one.values()) for one in counts) / max(1, len(counts))
        for number, one in enumerate(counts):
            size = k1 * (1 - b + b * sum(one.values()) / mean)
            for word, count in one.items():
                self._found[word].append((number, count * (k1 + 1) / (count + size)))

    def find(self, query: str, most: int) -> list[int]:
        """The best texts, best first; ties by their place."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            found = self._found.get(word, [])
            weight = math.log(1 + (len(self.texts) - len(found) + 0.5) / (len(found) + 0.5))
            for number, score in found:
                scores[number] += weight * score
        return sorted(scores, key=lambda number: (-scores[number], number))[:most]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
