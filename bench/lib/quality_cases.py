"""Prompts with donors for the quality benchmark, made of real texts, token by token, so that every span is exact.

    one_document   a document behind another instruction; several questions to each document
    edits          the donor's document has other words in about ten places, a planted fact among them
    several        ten retrieved passages and a multi-hop question; the passages come from three earlier prompts
    reordered      the same, from one earlier prompt that had them in another order
    code           a source file to be continued; the earlier prompt had another header and three edits
    summarization  XSum and CNN/DailyMail (one article), MultiNews (articles in another order), SAMSum (a dialogue among
                   twelve, from three earlier prompts)
    subset         as reordered, in the donor's order; the earlier prompt had others between them
    cleared, dropped, compacted, stripped, handed_over
                   an agent edited its history (`lib.histories`)

Donors are prompts as somebody would have sent them: the shared text lies in the middle of a prompt with another
instruction. Where a sentence with a code is planted and the donor holds another code, an answer with the donor's code
is KV of tokens that the prompt does not have.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lib.reporting as reporting
from lib import real_texts
from lib.histories import (
    BLOCK_TOKENS,
    DEPTHS,
    EDITS,
    EditedPrompt,
    Message,
    count_common,
    edited_prompts,
    is_held_out,
    read_runs,
)
from lib.real_texts import Document, read_jsonl
from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig
from semblend.span import Span

MIN_SPAN = 16
HISTORY_ANSWER = 48
QUESTIONS = 5  # to one document, or places where one file is continued
Tokens = list[int]
Encode = Callable[[str], Tokens]

DONOR_SYSTEM = (
    "You work for a large archive. Read everything that is handed to you before you say a word, quote the passage that "
    "supports each statement, keep a neutral tone, and do not guess. Today's file number is 77-140, opened on a Monday."
)
DONOR_TASK = "A reader left the material below. Go through it with care; a colleague will ask for a summary later.\n\n"
SYSTEM = "You are a helpful assistant."
TASK = "Answer from the text, in a few words.\n\n"
FACT = " The access code of the Meridian archive is {code}. "
ASK_FACT = "What is the access code of the Meridian archive?"
ASK_SUMMARY = "Sum up the text in one sentence."
DONOR_HEADER = "# Review of an open-source project, second reading: style, names, error paths, and what is tested.\n\n"
HEADER = "# Continue this file.\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, the prompts served before it (donor "0", "1", …), and what they share. ``cluster``: its document.

    ``exact_tokens``: a prefix cache holds so many. ``other``: the prompt as it might have been asked as well.
    """

    case_id: str
    scenario: str
    dataset: str
    cluster: str
    tokens: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]
    golds: tuple[str, ...] = ()
    code: str | None = None
    donor_code: str | None = None
    answer_tokens: int = 16
    exact_tokens: int = 0
    other: tuple[int, ...] = ()

    @property
    def is_history(self) -> bool:
        """Whether an agent edited its history: rows then hold no text of answers."""
        return self.scenario.partition("_x")[0] in EDITS

    @property
    def alone(self) -> tuple[tuple[tuple[int, ...], ...], tuple[Span, ...]]:
        """The same spans with every piece encoded on its own, at position 0: the setting of EPIC and others."""
        donors = tuple(self.tokens[span.target_start : span.target_end] for span in self.spans)
        return donors, tuple(Span(str(i), 0, s.target_start, s.length) for i, s in enumerate(self.spans))

    @property
    def digest(self) -> str:
        """What makes the prompt: its tokens, its donors and what they share, so another length is another prompt."""
        parts: tuple[object, ...] = (
            self.tokens, self.donors, [(s.donor_id, s.donor_start, s.target_start, s.length) for s in self.spans]
        )  # fmt: skip
        if self.exact_tokens or self.other:
            parts += (self.exact_tokens, self.other)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def held_out(self) -> bool:
        """Half of the documents, by a hash of their names: thresholds are set on the others."""
        return is_held_out(self.cluster)


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a model wants a chat written: ``begin`` up to the user's text, ``end`` from there to the answer; and one
    ``message`` of a conversation, whose tool results come from the user."""

    begin: str
    end: str
    message: str


CHATML = ChatForm(
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>{role}\n{text}<|im_end|>\n",
)  # fmt: skip
ZEPHYR = ChatForm("<|system|>\n{system}</s>\n<|user|>\n", "</s>\n<|assistant|>\n", "<|{role}|>\n{text}</s>\n")


def choose_chat_form(encode: Encode) -> ChatForm:
    """ChatML where its mark is one token (Qwen, SmolLM2); else Zephyr's form, which TinyLlama was tuned on."""
    return CHATML if len(encode("<|im_start|>")) == 1 else ZEPHYR


@dataclass(frozen=True, slots=True)
class _Source:
    """What the builders share: the data folder, the tokenizer, the largest document, how chats are written."""

    folder: Path
    encode: Encode
    tokens: int
    seed: int
    form: ChatForm
    lengths: Sequence[int] = ()

    def rng(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed}/{'/'.join(map(str, key))}")

    def chat(self, system: str, task: str) -> Tokens:
        return self.encode(self.form.begin.format(system=system) + task)

    def ask(self, question: str) -> Tokens:
        return self.encode(f"\n\nQuestion: {question}{self.form.end}")


def cases(
    folder: Path,
    encode: Encode,
    *,
    scenarios: Sequence[str],
    prompts: int,
    tokens: int,
    seed: int,
    form: ChatForm = CHATML,
    lengths: Sequence[int] = (),
) -> Iterator[Case]:
    """``prompts`` cases of every scenario (twice as many of the four data sets of summarization), taking turns, so that
    a run cut short has some of each. ``lengths``: of edited histories, in tokens before the edit."""
    source = _Source(folder, encode, tokens, seed, form, lengths or (tokens,))
    lines = [itertools.islice(SCENARIOS[name](source), prompts * (1 + (name == "summarization"))) for name in scenarios]
    for row in itertools.zip_longest(*lines):
        yield from (case for case in row if case is not None)


def _long_documents(source: _Source) -> Iterator[tuple[Document, list[tuple[str, str]], Tokens]]:
    """Documents that fill a prompt, with questions and answers, taking turns between data sets."""
    groups: dict[str, list[tuple[Document, list[tuple[str, str]]]]] = {}
    for folder, name in [("leval", n) for n in real_texts.LEVAL] + [("qmsum", "qmsum_val")]:
        for row in read_jsonl(source.folder / folder / f"{name}.jsonl.gz"):
            asked = [(q, a) for q, a in zip(row["questions"], row["answers"], strict=True) if len(q) < 400]
            groups.setdefault(name, []).append((Document(name, row["_id"], row["context"]), asked))
    for name in ("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"):
        for row in read_jsonl(source.folder / "longbench" / f"{name}.jsonl.gz"):
            asked = [(row["input"], row["answers"][0])]
            groups.setdefault(name, []).append((Document(name, row["_id"], row["context"]), asked))
    for turn in itertools.zip_longest(*groups.values()):
        for found in turn:
            if found is None or not found[1]:
                continue
            ids = source.encode(found[0].text[: source.tokens * 12])[: source.tokens]
            if len(ids) >= source.tokens:
                yield found[0], found[1], ids


def one_document(source: _Source) -> Iterator[Case]:
    before, after = source.chat(DONOR_SYSTEM, DONOR_TASK), source.chat(SYSTEM, TASK)
    for document, asked, text in _long_documents(source):
        for number, (question, gold) in enumerate(asked[:QUESTIONS]):
            tokens = (*after, *text, *source.ask(question))
            donors, spans = ((*before, *text),), (Span("0", len(before), len(after), len(text)),)
            name = f"one_document/{document.doc_id}/{number}"
            yield Case(name, "one_document", document.source, document.doc_id, tokens, donors, spans, (gold,))


def edits(source: _Source) -> Iterator[Case]:
    before, after = source.chat(DONOR_SYSTEM, DONOR_TASK), source.chat(SYSTEM, TASK)
    for document, asked, text in _long_documents(source):
        for number, (question, gold) in enumerate([(ASK_FACT, ""), *asked[:3], (ASK_FACT, "")]):
            rng = source.rng("edits", document.doc_id, number)
            code, other = (str(rng.randint(1000, 9999)) for _ in range(2))
            at = int(len(text) * rng.uniform(0.2, 0.8))
            ours, theirs = (source.encode(FACT.format(code=one)) for one in (code, other))
            whole = text[:at] + ours + text[at:]
            changes = [(at, at + len(ours), theirs), *_changes(whole, 9, rng, avoid=(at, at + len(ours)))]
            donor, spans = _edited(whole, len(after), before, changes)
            fact = question == ASK_FACT
            yield Case(
                f"edits/{document.doc_id}/{number}", "edits", document.source, document.doc_id,
                (*after, *whole, *source.ask(question)), (tuple(donor),), tuple(spans), (code if fact else gold,),
                code if fact else None, other if fact else None,
            )  # fmt: skip


def several(source: _Source) -> Iterator[Case]:
    yield from _passages(source, "several")


def reordered(source: _Source) -> Iterator[Case]:
    yield from _passages(source, "reordered")


def subset(source: _Source) -> Iterator[Case]:
    yield from _passages(source, "subset")


def _passages(source: _Source, scenario: str) -> Iterator[Case]:
    rows = list(read_jsonl(source.folder / "rag" / "cacheblend_musique_s.jsonl.gz"))
    for number, row in enumerate(rows):
        pieces = [source.encode(f"{ctx['title']}\n{ctx['text']}".strip() + "\n\n") for ctx in row["ctxs"]]
        pieces = [piece[: source.tokens // 4] for piece in pieces]  # a passage has some 600 tokens
        pieces = pieces[: max(3, source.tokens * 2 // max(map(len, pieces)))]
        filler = source.encode("\n\n".join(ctx["text"] for ctx in rows[number - 1]["ctxs"]))
        rng = source.rng(scenario, row["_id"])
        tokens, donors, spans = _assembled(source, scenario, pieces, filler, row["question"], rng)
        yield Case(
            f"{scenario}/{row['_id']}", scenario, "musique", row["_id"], tokens, donors, spans, tuple(row["answers"])
        )


def code(source: _Source) -> Iterator[Case]:
    """Files of two collections, continued at places of their own: the next line is known."""
    groups = [list(read_jsonl(source.folder / "longbench" / f"{name}.jsonl.gz")) for name in ("repobench-p", "lcc")]
    before, after = source.encode(DONOR_HEADER), source.encode(HEADER)
    rows = [row for turn in itertools.zip_longest(*groups) for row in turn if row is not None]
    for place, row in itertools.product(range(QUESTIONS), rows):
        lines = row["context"].rstrip("\n").split("\n")
        rng = source.rng("code", row["_id"], place)
        ends = [i for i, line in enumerate(lines) if i > len(lines) // 2 and len(line.strip()) > 12]
        if not ends:
            continue
        end = len(lines) if place == 0 else rng.choice(ends)
        gold = row["answers"][0] if place == 0 else lines[end]
        text = source.encode("\n".join(lines[:end]) + "\n")[-source.tokens :]
        if len(text) < 400:
            continue
        donor, spans = _edited(text, len(after), before, _changes(text, 3, rng))
        yield Case(
            f"code/{row['_id']}/{place}", "code", row["dataset"], row["_id"], (*after, *text), (tuple(donor),),
            tuple(spans), (gold,), answer_tokens=24,
        )  # fmt: skip


def summarization(source: _Source) -> Iterator[Case]:
    """Four data sets, taking turns."""
    lines = (_articles(source, "xsum"), _articles(source, "cnndm"), _multi_news(source), _samsum(source))
    for turn in itertools.zip_longest(*lines):
        yield from (case for case in turn if case is not None)


def _articles(source: _Source, name: str) -> Iterator[Case]:
    before, after = source.chat(DONOR_SYSTEM, DONOR_TASK), source.chat(SYSTEM, TASK)
    file = {"xsum": "xsum", "cnndm": "cnndm_realsumm"}[name]
    for row in read_jsonl(source.folder / "summ" / f"{file}.jsonl.gz"):
        text = row.get("article") or row["prompt"].split("Article:", 1)[-1].rsplit("Summarize", 1)[0].strip()
        ids = source.encode(text)[: source.tokens]
        tokens = (*after, *ids, *source.ask(ASK_SUMMARY))
        donors, spans = ((*before, *ids),), (Span("0", len(before), len(after), len(ids)),)
        yield Case(
            f"summarization/{name}/{row['_id']}", "summarization", name, row["_id"], tokens, donors, spans,
            (row["summary"],), answer_tokens=32,
        )  # fmt: skip


def _multi_news(source: _Source) -> Iterator[Case]:
    for row in read_jsonl(source.folder / "longbench" / "multi_news.jsonl.gz"):
        parts = row["context"].replace("NEWLINE_CHAR", "\n").split("Passage ")[1:]
        pieces = [source.encode(part.partition(":")[2].strip() + "\n\n")[: source.tokens // 3] for part in parts][:4]
        if len(pieces) < 2 or min(map(len, pieces)) < MIN_SPAN:
            continue
        rng = source.rng("multi_news", row["_id"])
        tokens, donors, spans = _assembled(source, "reordered", pieces, [], ASK_SUMMARY, rng)
        yield Case(
            f"summarization/multi_news/{row['_id']}", "summarization", "multi_news", row["_id"], tokens, donors, spans,
            tuple(row["answers"]), answer_tokens=32,
        )  # fmt: skip


def _samsum(source: _Source) -> Iterator[Case]:
    rows = [r for r in read_jsonl(source.folder / "dialogue" / "samsum.jsonl.gz") if len(r["dialogue"]) > 500]
    for number, row in enumerate(rows):
        rng = source.rng("samsum", row["id"])
        others = rng.sample([r for r in rows if r["id"] != row["id"]], 11)
        shown = rng.sample([row, *others], 12)
        pieces = [source.encode(f"Dialogue {r['id'][-4:]}\n{r['dialogue']}\n\n")[: source.tokens // 8] for r in shown]
        filler = source.encode(rows[number - 1]["dialogue"])
        question = f"Sum up dialogue {row['id'][-4:]} in one sentence."
        tokens, donors, spans = _assembled(source, "several", pieces, filler, question, rng)
        yield Case(
            f"summarization/samsum/{row['id']}", "summarization", "samsum", row["id"], tokens, donors, spans,
            (row["summary"],), answer_tokens=32,
        )  # fmt: skip


def _assembled(
    source: _Source, scenario: str, pieces: list[Tokens], filler: Tokens, question: str, rng: random.Random
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[Span, ...]]:
    """The prompt with the pieces in order. One donor holds them in another order, or three hold some each, in order,
    or one all of them, among passages that nobody asks for now."""
    before, prompt = source.chat(DONOR_SYSTEM, DONOR_TASK), source.chat(SYSTEM, TASK)
    starts = []
    for piece in pieces:
        starts.append(len(prompt))
        prompt += piece
    order = rng.sample(range(len(pieces)), len(pieces))
    if order == sorted(order):
        order.reverse()
    shares = {"several": [sorted(order[i::3]) for i in range(3)], "subset": [sorted(order)]}.get(scenario, [order])
    donors, spans = [], []
    for number, share in enumerate(shares):
        donor, foreign = list(before), rng.sample(range(len(share) + 1), min(2, len(share)))
        for place, i in enumerate(share):
            if scenario in ("several", "subset") and place in foreign:
                donor += filler[: rng.randint(50, min(600, source.tokens // 4))]
            if len(pieces[i]) >= MIN_SPAN:
                spans.append(Span(str(number), len(donor), starts[i], len(pieces[i])))
            donor += pieces[i]
        donors.append(tuple(donor))
    spans.sort(key=lambda span: span.target_start)
    return (*prompt, *source.ask(question)), tuple(donors), tuple(spans)


def _changes(
    text: Tokens, count: int, rng: random.Random, avoid: tuple[int, int] = (-1, -1)
) -> list[tuple[int, int, Tokens]]:
    """``count`` places of one to three tokens where the donor had others: ``[low, high)`` and what stood there."""
    return [
        (place, place + rng.randint(1, 3), [rng.choice(text) for _ in range(rng.randint(1, 4))])
        for place in rng.sample(range(20, len(text) - 20), count)
        if not avoid[0] - 8 <= place <= avoid[1] + 4
    ]


def _edited(
    text: Tokens, start: int, before: Tokens, changes: list[tuple[int, int, Tokens]]
) -> tuple[Tokens, list[Span]]:
    """The donor says other words in places; spans are what is the same."""
    donor, spans, here = list(before), [], 0
    for low, high, instead in sorted(changes):
        if low < here:
            continue
        if low - here >= MIN_SPAN:
            spans.append(Span("0", len(donor), start + here, low - here))
        donor += text[here:low] + instead
        here = high
    if len(text) - here >= MIN_SPAN:
        spans.append(Span("0", len(donor), start + here, len(text) - here))
    return donor + text[here:], spans


def _histories(how: str, depth: int = 1) -> Callable[[_Source], Iterator[Case]]:
    def make(source: _Source) -> Iterator[Case]:
        """Lengths take turns, so that a run cut short has some of each."""
        runs = read_runs(source.folder / "agent_traces")
        held: dict[Message, Tokens] = {}

        def encode(message: Message) -> Tokens:
            if message not in held:
                role = "user" if message.role == "tool" else message.role
                held[message] = source.encode(source.form.message.format(role=role, text=message.text))
            return held[message]

        lines = [edited_prompts(runs, how, lambda one: len(encode(one)), length, depth) for length in source.lengths]
        asked = source.encode(source.form.end.partition("\n")[2])
        for turn in itertools.zip_longest(*lines):
            for found in turn:
                if found is not None:
                    yield make_history(found, how if depth == 1 else f"{how}_x{depth}", encode, asked)

    return make


def make_history(found: EditedPrompt, how: str, encode: Callable[[Message], Tokens], asked: Tokens) -> Case:
    """Without spans where donors hold nothing worth moving: such a prompt is computed behind its exact tokens."""
    donor, tokens, other = (
        [token for message in messages for token in encode(message)] + asked
        for messages in (found.before, found.now, found.reworded)
    )
    exact = min(count_common(donor, tokens), len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with SemBlend(SemBlendConfig(embedder="none")) as semblend:
        semblend.register(Prompt(donor), donor_id="0")
        plan = semblend.lookup(Prompt(tokens), exact_tokens=exact)
    spans = plan.spans if isinstance(plan, ReusePlan) else ()
    return Case(
        found.name, how, found.dataset, found.run.cluster, tuple(tokens), (tuple(donor),), spans,
        answer_tokens=HISTORY_ANSWER, exact_tokens=exact, other=tuple(other),
    )  # fmt: skip


SCENARIOS: dict[str, Callable[[_Source], Iterator[Case]]] = {
    "one_document": one_document,
    "edits": edits,
    "several": several,
    "reordered": reordered,
    "code": code,
    "summarization": summarization,
    "subset": subset,
    **{how: _histories(how) for how in EDITS},
    **{f"cleared_x{depth}": _histories("cleared", depth) for depth in DEPTHS},
}


def refuse_other_prompts(path: str | Path, rows: Sequence[dict[str, Any]], cases: Sequence[Case]) -> None:
    """End with an error where the rows of a case were made with another prompt: a table would mix the two.

    Rows of before 2026-11-17 hold no digest of their prompt; their number of tokens is compared.
    """
    digests, lengths = {case.case_id: case.digest for case in cases}, {case.case_id: case.tokens for case in cases}
    known: dict[str, set[str]] = {}
    for row in rows:
        if row["case"] in digests:
            of_length = digests[row["case"]] if row["tokens"] == len(lengths[row["case"]]) else ""
            known.setdefault(row["case"], set()).add(row.get("prompt", of_length))
    for case, found in known.items():
        if digests[case] not in found:
            reporting.fail(
                f"{path} holds {case} with another prompt",
                hint="name another file for the rows, or give the --tokens, --seed and data of the run that wrote it",
            )
