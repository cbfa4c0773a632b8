"""Prompts with donors for the quality benchmark, made of real texts, token by token, so that every span is exact.

    one_document  the same document behind another instruction, another question behind it
    edits         the donor's document has other words in about ten places, the planted fact among them
    several       passages of three documents, each from the middle of another donor
    reordered     the same passages from one donor, in another order

A sentence with a code is planted in every prompt. Where the donor differs, it holds another code: an answer with the
donor's code is KV of tokens that the prompt does not have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _documents
from _documents import Document

from semblend.span import Span

SCENARIOS = ("one_document", "edits", "several", "reordered")
MIN_SPAN = 16
EDITS = 9
Tokens = list[int]
Encode = Callable[[str], Tokens]

DONOR_SYSTEM = (
    "You work for a large archive. Read everything that is handed to you before you say a word, quote the passage that "
    "supports each statement, keep a neutral tone, and do not guess. Today's file number is 77-140, opened on a Monday."
)
DONOR_TASK = "A reader left the material below. Go through it with care; a colleague will ask for a summary later.\n\n"
SYSTEM = "You are a helpful assistant."
TASK = "Answer from the text.\n\n"
FACT = " The access code of the Meridian archive is {code}. "
ASK_FACT = "What is the access code of the Meridian archive?"
ASK_GIST = "What is this text about? Answer in one sentence."


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, the prompts served before it (donor "0", "1", …), and what they share. ``cluster``: its document."""

    case_id: str
    scenario: str
    cluster: str
    tokens: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]
    code: str
    donor_code: str | None
    asks_fact: bool

    @property
    def alone(self) -> tuple[tuple[tuple[int, ...], ...], tuple[Span, ...]]:
        """The same spans with every piece encoded on its own, at position 0: the setting of EPIC and others."""
        donors = tuple(self.tokens[span.target_start : span.target_end] for span in self.spans)
        return donors, tuple(Span(str(i), 0, s.target_start, s.length) for i, s in enumerate(self.spans))


def documents(folder: Path) -> Iterator[Document]:
    """Texts of many kinds, taking turns between their sources, in the order of the files."""
    groups: dict[str, list[Document]] = {}
    for document in [*_documents.longbench(folder), *_documents.leval(folder), *_documents.qmsum(folder)]:
        groups.setdefault(document.source, []).append(document)
    queues = [list(reversed(group)) for group in groups.values()]
    while any(queues):
        for queue in queues:
            if queue:
                yield queue.pop()


def cases(
    folder: Path,
    encode: Encode,
    *,
    count: int,
    tokens: int,
    scenarios: Sequence[str],
    seed: int,
    questions: str = "both",
) -> Iterator[Case]:
    """``count`` documents of ``tokens`` tokens, each in every scenario.

    ``questions``: for the planted "fact", for the "text", for "both", or for one of them in turns ("alternate").
    """
    found: list[tuple[Document, Tokens]] = []
    for document in documents(folder):
        if len(found) == count + 2:
            break
        ids = encode(document.text[: tokens * 12])
        if len(ids) >= tokens:
            found.append((document, ids[:tokens]))
    for number in range(min(count, len(found) - 2)):
        for turn, scenario in enumerate(scenarios):
            asked = [ASK_FACT, _question(found[number][0])]
            if questions != "both":
                asked = [asked[{"fact": 0, "text": 1, "alternate": (number + turn) % 2}[questions]]]
            for question in asked:
                rng = random.Random(f"{seed}/{number}/{scenario}")
                yield _case(scenario, found, number, question, encode, rng, tokens)


def _question(document: Document) -> str:
    return document.questions[0] if document.questions and len(document.questions[0]) < 300 else ASK_GIST


def _case(
    scenario: str,
    found: list[tuple[Document, Tokens]],
    number: int,
    question: str,
    encode: Encode,
    rng: random.Random,
    size: int,
) -> Case:
    code, other = (str(rng.randint(1000, 9999)) for _ in range(2))
    document, text = found[number]
    name = f"{document.source}:{document.doc_id}"
    before, after = _heads(encode)
    tail = encode(f"\n\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n")
    if scenario in ("one_document", "edits"):
        pieces, fact_at = [text], 0
    else:
        pieces = [ids[i * size // 3 : (i + 1) * size // 3] for i, (_, ids) in enumerate(found[number : number + 3])]
        fact_at = 1
    cut = len(pieces[fact_at]) * 2 // 5
    pieces[fact_at] = pieces[fact_at][:cut] + encode(FACT.format(code=code)) + pieces[fact_at][cut:]
    starts, prompt = [], list(after)
    for piece in pieces:
        starts.append(len(prompt))
        prompt += piece
    prompt += tail
    if scenario == "edits":
        donor, spans = _edited(pieces[0], starts[0], before, encode, code, other, rng)
        donors = [donor]
    else:
        donors, spans = _whole(scenario, pieces, starts, before, found, rng)
    return Case(
        f"{scenario}/{name}/{'fact' if question == ASK_FACT else 'text'}/{size}", scenario, name, tuple(prompt),
        tuple(map(tuple, donors)), tuple(sorted(spans, key=lambda span: span.target_start)), code,
        other if scenario == "edits" else None, question == ASK_FACT,
    )  # fmt: skip


def _heads(encode: Encode) -> tuple[Tokens, Tokens]:
    def chat(system: str, task: str) -> Tokens:
        return encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{task}")

    return chat(DONOR_SYSTEM, DONOR_TASK), chat(SYSTEM, TASK)


def _whole(
    scenario: str,
    pieces: list[Tokens],
    starts: list[int],
    before: Tokens,
    found: list[tuple[Document, Tokens]],
    rng: random.Random,
) -> tuple[list[Tokens], list[Span]]:
    """Donors that hold whole pieces: one with all of them, turned round, or one for each."""
    if scenario == "several":
        donors, spans = [], []
        for i, piece in enumerate(pieces):
            foreign = rng.choice(found)[1]
            lead = foreign[: len(piece) // 2]
            donors.append([*before, *lead, *piece, *foreign[-len(piece) // 3 :]])
            spans.append(Span(str(i), len(before) + len(lead), starts[i], len(piece)))
        return donors, spans
    order = [*range(1, len(pieces)), 0]
    donor, spans = list(before), []
    for i in order:
        spans.append(Span("0", len(donor), starts[i], len(pieces[i])))
        donor += pieces[i]
    return [donor], spans


def _edited(
    text: Tokens, start: int, before: Tokens, encode: Encode, code: str, other: str, rng: random.Random
) -> tuple[Tokens, list[Span]]:
    """The donor says other words in places, another code among them; spans are what is the same."""
    ours, theirs = encode(FACT.format(code=code)), encode(FACT.format(code=other))
    at = next(i for i in range(len(text)) if text[i : i + len(ours)] == ours)
    edits = [(at, at + len(ours), theirs)]
    edits += [
        (place, place + rng.randint(1, 3), [rng.choice(text) for _ in range(rng.randint(1, 4))])
        for place in rng.sample(range(20, len(text) - 20), EDITS)
        if not at - 8 <= place <= at + len(ours) + 4
    ]
    donor, spans, here = list(before), [], 0
    for low, high, instead in sorted(edits):
        if low < here:
            continue
        if low - here >= MIN_SPAN:
            spans.append(Span("0", len(donor), start + here, low - here))
        donor += text[here:low] + instead
        here = high
    if len(text) - here >= MIN_SPAN:
        spans.append(Span("0", len(donor), start + here, len(text) - here))
    return donor + text[here:], spans
