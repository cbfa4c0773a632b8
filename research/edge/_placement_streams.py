"""Request streams of bench/edge_placement.py, from real texts: what clients of several engines ask, in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from _documents import Document, leval, qmsum, rag, read_jsonl
from _streams import retrieve

DOCUMENT_BYTES = 12_000
"""Of a document so much is shown: 3k tokens."""
MOST_CHAT_BYTES = 16_000
RULE = "You answer questions about a document. Answer in one sentence, and only with what the document says."
ROLES = (
    "legal", "medical", "financial", "technical", "historical", "journalistic", "scientific", "educational",
    "editorial", "regulatory", "commercial", "diplomatic",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request: its messages as role and text, and the numbers of the documents in it."""

    messages: tuple[tuple[str, str], ...]
    documents: tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """Sessions side by side, the requests of one in turn. ``is_shifted``: what repeats stands behind other text."""

    name: str
    is_shifted: bool
    sessions: tuple[tuple[Ask, ...], ...]

    @property
    def requests(self) -> int:
        return sum(map(len, self.sessions))


def make_streams(data: Path, seed: int, count: int) -> list[Stream]:
    """The four streams of one seed, ``count`` requests each."""
    chance = random.Random(seed)
    documents = [one for one in [*qmsum(data), *leval(data)] if len(one.questions) >= 3 and len(one.text) > 6000]
    chosen = chance.sample(documents, 40)
    return [
        Stream("questions about documents", False, _ask(chosen, count, chance, [RULE])),
        Stream("chats", False, _chat(data, count, chance)),
        Stream(
            "documents behind other instructions", True, _ask(chosen, count, chance, [_write_role(r) for r in ROLES])
        ),
        Stream("retrieved passages", True, _retrieve(data, count, seed)),
    ]


def _ask(
    documents: list[Document], count: int, chance: random.Random, systems: list[str]
) -> tuple[tuple[Ask, ...], ...]:
    weights = [rank**-0.8 for rank in range(1, len(documents) + 1)]
    sessions = []
    for _ in range(count):
        number = chance.choices(range(len(documents)), weights)[0]
        one = documents[number]
        user = f"{one.text[:DOCUMENT_BYTES]}\n\nQuestion: {chance.choice(one.questions)}"
        sessions.append((Ask((("system", chance.choice(systems)), ("user", user)), (number,)),))
    return tuple(sessions)


def _write_role(role: str) -> str:
    return (
        f"You are the {role} assistant of a large company. Your readers expect {role} language. Name the passage that "
        f"each statement rests on, give no advice beyond the {role} question that was asked, and say so if the text "
        "does not answer it. Never guess names, dates or numbers."
    )


def _chat(data: Path, count: int, chance: random.Random) -> tuple[tuple[Ask, ...], ...]:
    rows = list(read_jsonl(data / "chat" / "sharegpt_multiturn.jsonl.gz"))
    chance.shuffle(rows)
    sessions: list[tuple[Ask, ...]] = []
    for number, row in enumerate(rows):
        shown: list[tuple[str, str]] = [("system", "You are a helpful assistant.")]
        turns = []
        for turn in row["conversations"]:
            shown.append((turn["role"], turn["content"]))
            if turn["role"] == "user" and sum(len(text) for _, text in shown) <= MOST_CHAT_BYTES:
                turns.append(Ask(tuple(shown), (number,)))
        if len(turns) >= 3:
            sessions.append(tuple(turns[:8]))
        if sum(map(len, sessions)) >= count:
            break
    return tuple(sessions)


def _retrieve(data: Path, count: int, seed: int) -> tuple[tuple[Ask, ...], ...]:
    items = rag(data, "cacheblend_musique_s")
    corpus = tuple(dict.fromkeys(part for item in items for part in item.parts))
    stream = retrieve("musique", corpus, [item.questions[0] for item in items], top=8, count=count, seed=seed)
    sessions = []
    for passages, question in zip(stream.prompts, stream.questions, strict=True):
        text = "\n\n".join(stream.texts[number] for number in passages)
        messages = (("system", RULE), ("user", f"{text}\n\nQuestion: {question}"))
        sessions.append((Ask(messages, passages),))
    return tuple(sessions)
