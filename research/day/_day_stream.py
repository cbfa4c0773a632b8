"""What four tenants ask in a day, from real texts: conversations that go on, retrieved passages, shared documents."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _documents import qmsum, rag, read_jsonl

MOST_CHARACTERS = 3200
"""Of a prompt: below 1,000 tokens of SmolLM2 with its template."""
TENANTS = {"acme": "AX-7041", "bolt": "BR-2215", "corva": "CN-9960", "delta": "DK-3387"}
"""API key of each, and a code that stands in its prompts alone: in an answer to somebody else it would show."""
KINDS = ("conversation", "retrieval", "document")
INSTRUCTIONS = (
    "You answer questions about a text. Answer in one sentence.",
    "You are the analyst of a large company. Answer briefly, and only from the text.",
    "You are a careful assistant. If the text does not answer the question, say so.",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a tenant. ``documents`` are the texts in it, by name; ``session`` is empty where there is none."""

    number: int
    tenant: str
    kind: str
    messages: tuple[tuple[str, str], ...]
    documents: tuple[str, ...]
    session: str = ""


def make_day(data: Path, count: int, seed: int) -> list[Ask]:
    """``count`` requests in the order in which they are sent; a tenant's sessions go on in turn."""
    chance = random.Random(seed)
    sources = {
        tenant: {
            "conversation": _talk(data, tenant, random.Random(f"{seed} {tenant}")),
            "retrieval": _retrieve(data, tenant, random.Random(f"{seed} {tenant} r")),
            "document": _ask_about(data, tenant, random.Random(f"{seed} d")),
        }
        for tenant in TENANTS
    }
    asked = []
    for number in range(count):
        tenant = chance.choices(list(TENANTS), (4, 3, 2, 1))[0]
        kind = chance.choices(KINDS, (2, 2, 3))[0]
        messages, documents, session = next(sources[tenant][kind])
        asked.append(Ask(number, tenant, kind, messages, documents, session))
    return asked


Told = tuple[tuple[tuple[str, str], ...], tuple[str, ...], str]


def _talk(data: Path, tenant: str, chance: random.Random) -> Iterator[Told]:
    """Turns of real chats, each with what was said before; three chats of a tenant go on side by side."""
    rows = [row for row in read_jsonl(data / "chat" / "sharegpt_multiturn.jsonl.gz") if len(row["conversations"]) >= 5]
    chance.shuffle(rows)
    open_chats: list[Iterator[Told]] = []
    while True:
        while len(open_chats) < 3:
            open_chats.append(_go_on(rows.pop(), tenant))
        at = chance.randrange(len(open_chats))
        turn = next(open_chats[at], None)
        if turn is None:
            open_chats.pop(at)
        else:
            yield turn


def _go_on(row: dict, tenant: str) -> Iterator[Told]:
    shown = [("system", f"You are a helpful assistant. Customer file {TENANTS[tenant]}.")]
    for turn in row["conversations"]:
        shown.append((turn["role"], turn["content"][:900]))
        if sum(len(text) for _, text in shown) > MOST_CHARACTERS:
            return
        if turn["role"] == "user":
            yield tuple(shown), (f"chat {row['id']}",), f"{tenant}-{row['id']}"


def _retrieve(data: Path, tenant: str, chance: random.Random) -> Iterator[Told]:
    """Questions by popularity, each with three of its passages in an order of its own."""
    items = rag(data, "cacheblend_musique_s")[:24]
    weights = [rank**-0.9 for rank in range(1, len(items) + 1)]
    while True:
        number = chance.choices(range(len(items)), weights)[0]
        item = items[number]
        picked = chance.sample(range(min(5, len(item.parts))), 3)
        passages = "\n\n".join(item.parts[at][:850] for at in picked)
        text = f"{passages}\n\nQuestion: {item.questions[0]}"
        system = f"{chance.choice(INSTRUCTIONS)} Customer file {TENANTS[tenant]}."
        yield (("system", system), ("user", text)), tuple(f"passage {number}.{at}" for at in picked), ""


def _ask_about(data: Path, tenant: str, chance: random.Random) -> Iterator[Told]:
    """Questions about eight documents that every tenant has, behind one of three instructions."""
    documents = [one for one in qmsum(data) if len(one.questions) >= 4][:40]
    documents = random.Random(5).sample(documents, 8)
    chance = random.Random(f"{tenant} {chance.random()}")
    while True:
        number = min(chance.randrange(8), chance.randrange(8))
        one = documents[number]
        text = f"{one.text[:2400]}\n\nQuestion: {chance.choice(one.questions)}"
        system = f"{chance.choice(INSTRUCTIONS)} Customer file {TENANTS[tenant]}."
        yield (("system", system), ("user", text)), (f"document {number}",), ""
