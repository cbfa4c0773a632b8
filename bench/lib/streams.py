"""Streams of prompts whose passages commute: a public trace, retrieval over real corpora, tools for real agents.

A stream is a list of passage lists in the order in which a retriever gave them. Sizes are in words, so that no
tokenizer takes part in the comparison.
"""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lib.real_texts import agents, rag, read_jsonl

DOCUMENT = re.compile(r"\[Document \d+: (.*?)\]\n\n(?=\[Document \d+: |Question:)", re.DOTALL)
QUESTION = "Based on the following reference documents"
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class PromptStream:
    """``prompts[i]`` are the passages of prompt i, by their number in ``texts``; all prompts begin alike.

    ``questions[i]`` is what prompt i asks, where that is known.
    """

    name: str
    texts: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    questions: tuple[str, ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(max(1, len(text.split())) for text in self.texts)


class Ranking:
    """BM25 (k1 1.2, b .75) over a corpus; ties by place in the corpus."""

    def __init__(self, corpus: Sequence[str]) -> None:
        bags = [Counter(find_words(text)) for text in corpus]
        lengths = np.array([max(1, bag.total()) for bag in bags])
        norm = 1.2 * (0.25 + 0.75 * lengths / lengths.mean())
        self._count = len(corpus)
        holders: dict[str, list[int]] = {}
        for number, bag in enumerate(bags):
            for word in bag:
                holders.setdefault(word, []).append(number)
        self._weights = {}
        for word, found in holders.items():
            rows = np.array(found)
            often = np.array([bags[row][word] for row in found], float)
            rarity = math.log(1 + (self._count - len(found) + 0.5) / (len(found) + 0.5))
            self._weights[word] = (rows, rarity * often * 2.2 / (often + norm[rows]))

    def find_best(self, question: Sequence[str], count: int) -> tuple[int, ...]:
        scores = np.zeros(self._count)
        for word in question:
            if word in self._weights:
                rows, weights = self._weights[word]
                scores[rows] += weights
        return tuple(int(row) for row in np.argsort(-scores, kind="stable")[:count])


def find_words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def read_public_trace(checkout: Path) -> PromptStream:
    """The document sets of the multi-turn RAG trace (a git directory or checkout), turn by turn, session by session.

    A turn is one request whose last message brings documents; a turn that was sent twice counts once.
    """
    turns: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for name, content in _read_git(checkout, "non_prefix_raw_traces/mtRag/"):
        for request in _read_requests(content):
            text = _join(request["body"]["messages"][-1]["content"])
            if text.startswith(QUESTION):  # others are compactions of a whole conversation, or answers of tools
                turns.setdefault((name, text), (request["timestamp_utc"], DOCUMENT.findall(text)))
    number: dict[str, int] = {}
    prompts = []
    for _, documents in sorted(turns.values()):
        prompts.append(tuple(dict.fromkeys(number.setdefault(one, len(number)) for one in documents)))
    return PromptStream("public trace", tuple(number), tuple(prompts))


def read_tools(checkout: Path) -> tuple[str, ...]:
    """Every tool definition that the public traces carry, as JSON."""
    found: dict[str, None] = {}
    for _, content in _read_git(checkout, ""):
        for request in _read_requests(content):
            for tool in request["body"].get("tools") or ():
                found[json.dumps(tool, sort_keys=True)] = None
    return tuple(found)


def retrieve(
    name: str, corpus: Sequence[str], questions: Sequence[str], *, top: int, count: int, seed: int
) -> PromptStream:
    """``count`` questions by Zipf's law, each asked in fewer words (30 % are left out), answered by BM25's ``top``."""
    rng = random.Random(seed)
    ranking, asked = Ranking(corpus), list(questions)
    rng.shuffle(asked)
    weights = [1 / rank for rank in range(1, len(asked) + 1)]
    prompts, drawn = [], rng.choices(asked, weights, k=count)
    for question in drawn:
        words = find_words(question)
        kept = [word for word in words if rng.random() > 0.3] or words
        prompts.append(ranking.find_best(kept, top))
    return PromptStream(name, tuple(corpus), tuple(prompts), tuple(drawn))


def read_streams(data: Path, trace: Path | None, seed: int) -> Iterator[PromptStream]:
    """All streams that the given data allows."""
    if trace is not None:
        yield read_public_trace(trace)
    for source, top in (("cacheblend_musique_s", 10), ("msmarco_rag_llma", 6)):
        items = rag(data, source)
        corpus = tuple(dict.fromkeys(part for item in items for part in item.parts))
        yield retrieve(source, corpus, [item.questions[0] for item in items], top=top, count=1500, seed=seed)
    wiki = [f"{row['title']}\n{row['text']}" for row in read_jsonl(data / "rag" / "2wiki_corpus.jsonl.gz")]
    for source in ("hotpotqa_distractor", "nq_open_oracle"):
        items = rag(data, source)
        wiki += [part for item in items for part in item.parts]
    questions = [
        item.questions[0] for source in ("hotpotqa_distractor", "nq_open_oracle") for item in rag(data, source)
    ]
    yield retrieve("wikipedia", tuple(dict.fromkeys(wiki)), questions, top=8, count=1500, seed=seed)
    if trace is not None:
        yield choose_tools(data, read_tools(trace))


def choose_tools(data: Path, tools: Sequence[str], top: int = 12) -> PromptStream:
    """For each call of the agent traces the tools that BM25 finds for the end of its prompt, sessions side by side."""
    ranking = Ranking(tools)
    sessions = [session for name in ("magagent", "taubench", "miniswe") for session in agents(data, name)]
    calls = [(step, number, text) for number, one in enumerate(sessions) for step, text in enumerate(one.prompts)]
    prompts = [ranking.find_best(find_words(prompt[-1500:]), top) for _, _, prompt in sorted(calls)]
    return PromptStream("agents' tools", tuple(tools), tuple(prompts))


def make_random_streams(seed: int) -> Iterator[PromptStream]:
    """Streams without text, in which sets differ by chance: where orders are furthest from the ceiling."""
    rng = random.Random(seed)

    def name(count: int) -> tuple[str, ...]:
        return tuple(f"passage {number} " + "word " * 98 for number in range(count))

    yield PromptStream("10 of 16 by chance", name(16), tuple(tuple(rng.sample(range(16), 10)) for _ in range(400)))
    yield PromptStream("5 of 40 by chance", name(40), tuple(tuple(rng.sample(range(40), 5)) for _ in range(1500)))
    weights = [1 / rank for rank in range(1, 201)]
    prompts = []
    for _ in range(1500):
        drawn: dict[int, None] = {}
        while len(drawn) < 8:
            drawn[rng.choices(range(200), weights)[0]] = None
        prompts.append(tuple(drawn))
    yield PromptStream("8 of 200 by Zipf", name(200), tuple(prompts))
    yield PromptStream("6 of a topic's 12", name(720), tuple(_draw_topic(rng) for _ in range(2000)))


def _draw_topic(rng: random.Random) -> tuple[int, ...]:
    topic = rng.choices(range(60), [1 / rank for rank in range(1, 61)])[0]
    own = range(topic * 12, topic * 12 + 12)
    drawn = list(dict.fromkeys(rng.choices(own, range(12, 0, -1), k=30)))[:6]
    if rng.random() < 0.3:
        drawn[-1] = rng.randrange(720)
    rng.shuffle(drawn)
    return tuple(dict.fromkeys(drawn))


def _join(content: str | list[dict[str, str]] | None) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())


def _read_requests(content: str) -> Iterator[dict]:  # type: ignore[type-arg]
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("type") == "request" and isinstance(row.get("body"), dict) and row["body"].get("messages"):
            yield row


def _read_git(checkout: Path, under: str) -> Iterator[tuple[str, str]]:
    """The JSONL files of the newest commit; those whose content is not there (too large for the copy) are left out."""
    listed = _git(checkout, "ls-tree", "-r", "--name-only", "HEAD")
    for name in (listed or b"").decode().splitlines():
        if name.startswith(under) and name.endswith(".jsonl") and (content := _git(checkout, "show", f"HEAD:{name}")):
            yield name, content.decode(errors="replace")


def _git(checkout: Path, *words: str) -> bytes | None:
    done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None
