"""The benchmark corpus: donors and queries made from real texts, the same for every system and every run.

    PYTHONPATH=bench python -m lib.corpus --data-dir DATA        # what is in it, by class and by source

A donor is a prompt that was served before; a query is a prompt that comes now. All donors stand in one store. What
differs between a query and its donor is the class:

    instruction_change  the same document, another instruction before it and another question behind it
    next_turn           a chat or an agent, one turn later
    reorder             the same passages in another order
    light_edit          1 word in about 120 replaced, inserted or deleted
    heavy_edit          1 word in about 25
    multi_donor         passages of three or four donors in one prompt
    contained           about 1,500 tokens out of a long donor
    shared_preamble     many donors begin with the same long preamble, and so does the query
    template_trap       the same form with other numbers, names and negations
    repeated            one passage twice in the query
    unrelated           nothing shared: no run of 32 tokens, by the oracle

Everything follows from --seed.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import lib.reporting as reporting
from lib import real_texts
from lib import transforms as transforms
from lib.oracle import SharedRuns, Tokens
from lib.real_texts import Document

MIN_TOKENS = 64
QUERIES_PER_CLASS = 40
LONG_DONORS = 4
# Fewer than 32 tokens each, so that a shared instruction alone is no shared run.
DONOR_HEADS = (
    "Read the text below and keep to what it says.",
    "Use only the following material.",
    "Here is the document that the user uploaded. Answer from it.",
    "You help people who work with long documents. Stay close to the source.",
)
QUERY_HEADS = (
    "New task. The attachment is the same as before, but please look at it with fresh eyes and be brief.",
    "Context:",
    "A colleague left these notes. Check them before the meeting at noon.",
    "System: cite the sentence that supports each claim.\nUser: please work through this.",
    "Below you find the source. Quote it exactly.",
)
TAILS = (
    "What are the three most important points?",
    "Write two sentences for a reader in a hurry.",
    "Which statement here would you check first, and why?",
    "List all people and places that are mentioned.",
    "Is anything here in doubt?",
    "Give the text a title.",
)


class Encoder(Protocol):
    def encode(self, text: str) -> Tokens: ...


@dataclass(frozen=True, slots=True)
class Donor:
    donor_id: str
    source: str
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Query:
    """``gold`` names the donors that it was made from; others may hold parts of it too."""

    query_id: str
    kind: str
    source: str
    tokens: Tokens
    gold: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    donors: tuple[Donor, ...]
    queries: tuple[Query, ...]
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(query.kind for query in self.queries))

    def oracle(self) -> SharedRuns:
        return SharedRuns([donor.tokens for donor in self.donors])

    def shorter_than(self, tokens: int) -> Corpus:
        """Without longer prompts; a query goes too when a donor that it was made from goes."""
        donors = tuple(donor for donor in self.donors if len(donor.tokens) <= tokens)
        kept = {donor.donor_id for donor in donors}
        fits = [query for query in self.queries if len(query.tokens) <= tokens and kept.issuperset(query.gold)]
        return Corpus(donors, tuple(fits), self.notes)

    def capped(self, donors: int, per_class: int) -> Corpus:
        """A smaller corpus for slow systems: spread over the queries of each class, their donors, then others."""
        queries: list[Query] = []
        for kind in self.kinds:
            own = [query for query in self.queries if query.kind == kind]
            queries += own if len(own) <= per_class else [own[i * len(own) // per_class] for i in range(per_class)]
        needed = {donor_id for query in queries for donor_id in query.gold}
        spare = [donor for donor in self.donors if donor.donor_id not in needed]
        room = max(donors - len(needed), 0)
        needed |= {spare[i * len(spare) // room].donor_id for i in range(room)} if room < len(spare) else set()
        if room >= len(spare):
            needed |= {donor.donor_id for donor in spare}
        kept = tuple(donor for donor in self.donors if donor.donor_id in needed)
        return Corpus(kept, tuple(queries), self.notes)


@dataclass(slots=True)
class Builder:
    """Collects donors and queries; ``base`` and ``long`` are documents whose donors are in the store."""

    encoder: Encoder
    seed: int
    per_class: int
    donors: dict[str, Donor] = field(default_factory=dict)
    queries: list[Query] = field(default_factory=list)
    base: list[Document] = field(default_factory=list)
    long: list[Document] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def add_donor(self, donor_id: str, source: str, text: str) -> bool:
        """False when it is too short for a prompt of this benchmark, or the same id came before."""
        tokens = self.encoder.encode(text)
        if len(tokens) < MIN_TOKENS or donor_id in self.donors:
            return False
        self.donors[donor_id] = Donor(donor_id, source, tokens)
        return True

    def add_documents(self, documents: Iterable[Document], into: list[Document]) -> None:
        for document in documents:
            rng = self.rng(donor_id_of(document))
            question = rng.choice(document.questions) if document.questions else rng.choice(TAILS)
            text = f"{rng.choice(DONOR_HEADS)}\n\n{document.text}\n\n{question}"
            if self.add_donor(donor_id_of(document), document.source, text):
                into.append(document)

    def add_query(self, kind: str, source: str, text: str, gold: Sequence[str]) -> bool:
        tokens = self.encoder.encode(text)
        if len(tokens) < MIN_TOKENS:
            return False
        number = sum(query.kind == kind for query in self.queries)
        self.queries.append(Query(f"{kind}-{number:03d}", kind, source, tokens, tuple(gold)))
        return True

    def pick(self, kind: str, long: int = 0, fits: Callable[[Document], bool] = lambda _: True) -> list[Document]:
        """``per_class`` documents, ``long`` of them from the longest, the others in turn from every source."""
        rng = self.rng(f"pick/{kind}")
        chosen = rng.sample(self.long, min(long, len(self.long), self.per_class))
        by_source: dict[str, list[Document]] = {}
        for document in rng.sample(self.base, len(self.base)):
            if fits(document):
                by_source.setdefault(document.source, []).append(document)
        while len(chosen) < self.per_class and any(by_source.values()):
            chosen += [documents.pop() for documents in by_source.values() if documents]
        return chosen[: self.per_class]


def donor_id_of(document: Document) -> str:
    return f"{document.source}/{document.doc_id}"


def build_corpus(folder: Path, encoder: Encoder, seed: int = 20, per_class: int = QUERIES_PER_CLASS) -> Corpus:
    """Donors first, then the queries of every class, then unrelated prompts, checked against all donors."""
    builder = Builder(encoder, seed, per_class)
    spare = add_donors(builder, folder)
    for make in (instruction_change, reorder, light_edit, heavy_edit, multi_donor, contained, repeated):
        make(builder)
    next_turn(builder, folder)
    shared_preamble(builder, folder)
    template_trap(builder, folder)
    unrelated(builder, folder, spare)
    return Corpus(tuple(builder.donors.values()), tuple(builder.queries), tuple(builder.notes))


def add_donors(builder: Builder, folder: Path) -> list[Document]:
    """Fills the store; returns the documents that were kept out of it for unrelated prompts."""
    reviews: list[Document] = []
    others: list[Document] = []
    for document in real_texts.leval(folder):
        (reviews if document.source == "leval/review_summ" else others).append(document)
    articles = real_texts.articles(folder)
    xsum = [document for document in articles if document.source == "summ/xsum"]
    cnndm = [document for document in articles if document.source == "summ/cnndm"]
    dialogues = [document for document in real_texts.dialogues(folder) if document.source == "dialogue/samsum"]
    short = real_texts.rag(folder, "nq_open_oracle")
    base = [*real_texts.longbench(folder), *others[1::2], *real_texts.qmsum(folder)]
    for name in ("cacheblend_musique_s", "hotpotqa_distractor", "msmarco_rag_llma"):
        base += real_texts.rag(folder, name)
    builder.add_documents([*base, *short[:80], *xsum[:60], *cnndm[:60], *dialogues[:60]], builder.base)
    builder.add_documents(joined(others[0::2], LONG_DONORS), builder.long)
    return [*reviews, *joined(reviews, 2), *xsum[100:], *dialogues[60:], *short[80:]]


def joined(documents: Sequence[Document], count: int) -> list[Document]:
    """``count`` very long documents, each made of every ``count``-th document."""
    return [
        Document("joined", f"{documents[i].doc_id}+", "\n\n".join(document.text for document in documents[i::count]))
        for i in range(count)
    ]


def with_new_instruction(text: str, document: Document, rng: random.Random) -> str:
    tail = rng.choice(document.questions) if document.questions and rng.random() < 0.5 else rng.choice(TAILS)
    return f"{rng.choice(QUERY_HEADS)}\n\n{text}\n\n{tail}"


def instruction_change(builder: Builder) -> None:
    rng = builder.rng("instruction_change")
    for document in builder.pick("instruction_change", long=3):
        text = with_new_instruction(document.text, document, rng)
        builder.add_query("instruction_change", document.source, text, [donor_id_of(document)])


def reorder(builder: Builder) -> None:
    rng = builder.rng("reorder")

    def has_pieces(document: Document) -> bool:
        return len(document.text.split()) >= 300

    for document in builder.pick("reorder", long=2, fits=has_pieces):
        pieces = transforms.reordered(transforms.pieces_of(document.text, document.parts, 150), rng)
        text = with_new_instruction("\n\n".join(pieces), document, rng)
        builder.add_query("reorder", document.source, text, [donor_id_of(document)])


def light_edit(builder: Builder) -> None:
    edits(builder, "light_edit", every=120, long=2)


def heavy_edit(builder: Builder) -> None:
    edits(builder, "heavy_edit", every=25, long=1)


def edits(builder: Builder, kind: str, every: int, long: int) -> None:
    rng = builder.rng(kind)
    for document in builder.pick(kind, long=long, fits=lambda document: len(document.text.split()) >= 150):
        text = with_new_instruction(transforms.edited(document.text, every, rng), document, rng)
        builder.add_query(kind, document.source, text, [donor_id_of(document)])


def multi_donor(builder: Builder) -> None:
    """Short ones from the base; the first two take a third of three very long donors each."""
    rng = builder.rng("multi_donor")
    candidates = [document for document in builder.base if len(document.text.split()) >= 150]
    for number in range(builder.per_class):
        chosen = rng.sample(builder.long, 3) if number < 2 else rng.sample(candidates, rng.choice((3, 4)))
        length = 28_000 if number < 2 else rng.randrange(120, 600)
        passages = [transforms.window(document.text, length, rng) for document in chosen]
        text = with_new_instruction("\n\n".join(passages), chosen[0], rng)
        builder.add_query("multi_donor", "mixed", text, [donor_id_of(document) for document in chosen])


def contained(builder: Builder) -> None:
    rng = builder.rng("contained")
    for document in builder.pick("contained", long=4, fits=lambda document: len(document.text.split()) >= 4_000):
        text = with_new_instruction(transforms.window(document.text, 1_150, rng), document, rng)
        builder.add_query("contained", document.source, text, [donor_id_of(document)])


def repeated(builder: Builder) -> None:
    rng = builder.rng("repeated")
    for document in builder.pick("repeated", fits=lambda document: len(document.text.split()) >= 100):
        passage = transforms.window(document.text, rng.randrange(80, 800), rng)
        between = f"{rng.choice(TAILS)} Then read it once more, since the second reading tells more:"
        text = with_new_instruction(f"{passage}\n\n{between}\n\n{passage}", document, rng)
        builder.add_query("repeated", document.source, text, [donor_id_of(document)])


def next_turn(builder: Builder, folder: Path) -> None:
    """Half chats, half agent calls; of every session used, the turn before is in the store."""
    rng = builder.rng("next_turn")
    chats = [session for session in real_texts.chats(folder)[:120] if len(session.prompts) >= 4]
    runs = [*real_texts.agents(folder, "magagent"), *real_texts.agents(folder, "miniswe")]
    turns = [(session, rng.randrange(1, len(session.prompts) - 1)) for session in rng.sample(chats, 60)]
    for session in runs:
        steps = rng.sample(range(1, len(session.prompts) - 1), min(4, len(session.prompts) - 2))
        turns += [(session, step) for step in sorted(steps)]
    rng.shuffle(turns)
    wanted = {"chat": builder.per_class - builder.per_class // 2, "agent": builder.per_class // 2}
    for session, turn in turns:
        donor_id = f"{session.source}/{session.session_id}/{turn}"
        kind = session.source.partition("/")[0]
        if builder.add_donor(donor_id, session.source, session.prompts[turn]) and wanted[kind]:
            wanted[kind] -= 1
            builder.add_query("next_turn", session.source, session.prompts[turn + 1], [donor_id])


def shared_preamble(builder: Builder, folder: Path) -> None:
    """A real report as house rules of about 1,500 tokens, before forty different articles."""
    rng = builder.rng("shared_preamble")
    report = next(d for d in real_texts.leval(folder) if d.source == "leval/gov_report_summ")
    preamble = "".join(transforms.words(report.text)[-1_150:]).strip()
    for document in real_texts.articles(folder)[60:100]:
        donor_id = f"preamble/{document.doc_id}"
        text = f"{preamble}\n\nArticle:\n{document.text}\n\n{rng.choice(TAILS)}"
        if builder.add_donor(donor_id, "preamble", text) and len(document.text.split()) >= 60:
            query = f"{preamble}\n\n{rng.choice(QUERY_HEADS)}\n\n{document.text}\n\n{rng.choice(TAILS)}"
            if sum(q.kind == "shared_preamble" for q in builder.queries) < builder.per_class:
                builder.add_query("shared_preamble", document.source, query, [donor_id])


def template_trap(builder: Builder, folder: Path) -> None:
    """A donor and its twin with other facts: what is equal may be reused, what was swapped never."""
    rng = builder.rng("template_trap")
    cnndm = [d for d in real_texts.articles(folder) if d.source == "summ/cnndm"][60:]
    talks = [d for d in real_texts.dialogues(folder) if d.source == "dialogue/dialogsum"]
    names = sorted({name for document in cnndm for name in transforms.names_in(document.text)})
    for document in [*cnndm[: builder.per_class - builder.per_class // 3], *talks[: builder.per_class // 3]]:
        head, tail, donor_id = rng.choice(DONOR_HEADS), rng.choice(TAILS), f"trap/{document.doc_id}"
        if builder.add_donor(donor_id, "trap", f"{head}\n\n{document.text}\n\n{tail}"):
            twin = transforms.other_facts(document.text, names, rng)
            builder.add_query("template_trap", document.source, f"{head}\n\n{twin}\n\n{tail}", [donor_id])


def unrelated(builder: Builder, folder: Path, spare: Sequence[Document]) -> None:
    """Texts that no donor was made from; any that shares a run all the same (quotes, boilerplate) is left out."""
    rng = builder.rng("unrelated")
    oracle = SharedRuns([donor.tokens for donor in builder.donors.values()])
    by_source: dict[str, list[tuple[str, str]]] = {}
    for document in spare:
        text = f"{document.text}\n\n{document.questions[0] if document.questions else rng.choice(TAILS)}"
        by_source.setdefault(document.source, []).append((document.source, text))
    for session in real_texts.chats(folder)[200:]:
        by_source.setdefault(session.source, []).append((session.source, session.prompts[-1]))
    for texts in by_source.values():
        rng.shuffle(texts)
    kept = dropped = 0
    while kept < builder.per_class and any(by_source.values()):
        for source, text in [texts.pop() for texts in by_source.values() if texts]:
            shares = bool(oracle.windows(builder.encoder.encode(text)).any())
            dropped += shares
            kept += not shares and kept < builder.per_class and builder.add_query("unrelated", source, text, [])
    builder.notes.append(f"unrelated: {dropped} texts left out because a donor holds 32 tokens of them in a row")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reporting.add_common_arguments(parser, "corpus")
    args = parser.parse_args(arguments)
    report = reporting.Report("corpus", args)
    corpus = load(args)
    rows = []
    for kind in corpus.kinds:
        lengths = sorted(len(query.tokens) for query in corpus.queries if query.kind == kind)
        rows.append([kind, len(lengths), lengths[0], lengths[len(lengths) // 2], lengths[-1], sum(lengths)])
    report.table("Queries", ["class", "n", "fewest tokens", "median", "most", "together"], rows)
    counts = Counter(donor.source for donor in corpus.donors)
    sizes: Counter[str] = Counter()
    for donor in corpus.donors:
        sizes[donor.source] += len(donor.tokens)
    report.table("Donors", ["source", "n", "tokens"], [[source, n, sizes[source]] for source, n in counts.items()])
    report.note(f"{len(corpus.donors):,} donors, {sum(sizes.values()):,} tokens, all in one store")
    for note in corpus.notes:
        report.note(note)
    report.write(args.out)
    return 0


def load_encoder(args: argparse.Namespace) -> Encoder:
    from semblend.errors import SemBlendError
    from semblend.text.tokenization import load_tokenizer

    try:
        return load_tokenizer(args.tokenizer)
    except SemBlendError as error:
        reporting.fail(error.message, hint=error.hint or "use --tokenizer stable")


def load(args: argparse.Namespace) -> Corpus:
    """The corpus that the common flags ask for."""
    per_class = 8 if args.quick else QUERIES_PER_CLASS
    corpus = build_corpus(reporting.data_dir(args), load_encoder(args), args.seed, per_class)
    if args.quick:
        corpus = corpus.capped(donors=150, per_class=per_class)
    reporting.progress(f"corpus: {len(corpus.donors)} donors, {len(corpus.queries)} queries")
    return corpus


if __name__ == "__main__":
    raise SystemExit(main())
