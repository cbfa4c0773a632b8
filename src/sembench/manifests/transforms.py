"""What changes between a donor and its recipient: honest transforms, rewording, and decoys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sembench.manifests.cases import (
    BASE_PROMPT,
    DECOY_DONOR,
    LEADING_EVIDENCE_DONOR,
    SEGMENT_DONOR,
    UNRELATED_BASE_PROMPT,
    Case,
    DonorPrompt,
    make_item_id,
)
from sembench.manifests.datasets import PortableRandom, Source, Task, write_document

# -- rewording -------------------------------------------------------------------------------------------------------
# Rewords text by rule: a table of near-synonyms, and adverbials moved to the end of the sentence.
#
# No model is used, so the result is the same everywhere. The meaning stays, and most runs of equal tokens are broken.

_SYNONYMS = {
    "about": "roughly", "above": "over", "according to": "following", "after": "following", "allow": "permit",
    "allowed": "permitted", "almost": "nearly", "also": "likewise", "although": "even though", "answer": "reply",
    "because": "since", "before": "ahead of", "began": "started", "begin": "start", "begins": "starts",
    "below": "under", "beside": "next to", "between": "among", "big": "large", "bought": "purchased",
    "bring": "fetch", "brought": "fetched", "but": "yet", "chiefly": "mainly", "collected": "gathered",
    "cost": "expense", "costs": "expenses", "decides": "determines", "during": "throughout", "each": "every",
    "end": "close", "ends": "closes", "enough": "sufficiently", "every": "each", "fast": "quick", "fell": "dropped",
    "few": "hardly any", "finished": "completed", "first": "earliest", "found": "discovered", "from": "out of",
    "gave": "handed", "get": "obtain", "give": "hand", "gives": "hands", "good": "fine", "has": "possesses",
    "have": "possess", "held": "kept", "help": "assist", "holds": "contains", "however": "still", "if": "in case",
    "important": "significant", "in": "within", "is": "remains", "keeps": "retains", "kept": "retained",
    "known": "familiar", "large": "big", "last": "final", "later": "afterwards", "least": "smallest", "less": "fewer",
    "long": "lengthy", "made": "produced", "make": "produce", "many": "numerous", "may": "can", "more": "further",
    "most": "the majority of", "moved": "shifted", "much": "a great deal of", "must": "has to", "near": "close to",
    "new": "fresh", "no": "not any", "nobody": "no one", "not": "in no way", "often": "frequently", "old": "former",
    "on": "upon", "only": "merely", "or": "or else", "other": "further", "own": "possess", "paid": "settled",
    "part": "portion", "pays": "settles", "people": "persons", "place": "spot", "reached": "arrived at",
    "read": "studied", "said": "stated", "says": "states", "shows": "displays", "since": "as", "small": "little",
    "some": "several", "soon": "before long", "still": "even now", "such": "of that kind", "take": "grab",
    "taken": "removed", "takes": "requires", "than": "compared with", "that": "which", "then": "afterwards",
    "therefore": "hence", "they": "these", "this": "the present", "through": "by way of", "to": "towards",
    "told": "informed", "two": "a pair of", "under": "beneath", "until": "up to when", "used": "employed",
    "very": "highly", "was": "had been", "went": "travelled", "were": "had been", "when": "whenever",
    "where": "in which", "which": "that", "while": "whereas", "who": "that", "will": "is going to",
    "with": "along with", "without": "lacking", "work": "labour", "would": "might", "wrote": "noted",
    "year": "twelvemonth", "years": "twelvemonths",
}  # fmt: skip
_WORD = re.compile(r"\b[a-z]+(?: to)?\b")
_LEADING_ADVERBIAL = re.compile(
    r"(^|(?<=[.!?] ))([A-Z][a-z]+ [^,.;:!?]{3,40}), ([a-z])((?:[^.!?]|\.(?=\d))*)([.!?])(?=\s|$)"
)


def reword(text: str) -> str:
    """Return the text with common words replaced and leading adverbials moved to the end.

    >>> reword("In the spring, the mirror was moved because it had aged.")
    'The mirror had been shifted since it had aged, within the spring.'
    """
    moved = _LEADING_ADVERBIAL.sub(_move_behind, text)
    return _WORD.sub(_replace_word, moved)


def _move_behind(found: re.Match[str]) -> str:
    before, adverbial, first, rest, stop = found.groups()
    return f"{before}{first.upper()}{rest}, {adverbial[0].lower()}{adverbial[1:]}{stop}"


def _replace_word(found: re.Match[str]) -> str:
    word = found.group()
    if word in _SYNONYMS:
        return _SYNONYMS[word]
    if word.endswith(" to"):
        return f"{_SYNONYMS.get(word[:-3], word[:-3])} {_SYNONYMS['to']}"
    return word


# -- transforms ------------------------------------------------------------------------------------------------------
# Turns a document into a case, by changes of a prompt that an exact prefix cache cannot serve.
#
# A transform takes a document and returns one case, or None if the document is not suitable. The donor is the
# document's base prompt unless the transform says otherwise, so that one donor serves many recipients.

_BASE = (
    "Read the material and answer the question that follows it.\n\nMaterial:\n{context}\n\nQuestion: "
    "{question}\nAnswer:"
)
_VARIANT = (
    "You work at the help desk of a library. A visitor stands in front of you and is in a hurry. Use nothing but the "
    "text between the rules, quote numbers and names as they are printed, and say so if the text is "
    "silent.\n\n-----\n{context}\n-----\n\nThe visitor asks: {question}\nYou say:"
)
_LEADING = "{context}\n\nAbove stands the evidence. {question}\nAnswer briefly:"
_LED = "Case file {number}, {clerk}.\n\n{context}\n\nAbove stands the evidence. {question}\nAnswer briefly:"
_RECORDS = (
    "Some records were retrieved; they come in no particular order.\n\n{records}\n\nQuestion: {question}\nAnswer:"
)
_SEGMENT = "Summarise this passage in one sentence.\n\n{segment}\n\nSummary:"
_COMPOSITE = "Passages from several requests are joined here.\n\n{records}\n\nTaken together: {question}\nAnswer:"
_FUZZY = "Document {number}, revision {revision}, converted from print.\n\n{context}\n\nQuestion: {question}\nAnswer:"
_REWORDED = "A colleague retold the material in other words.\n\n{context}\n\nQuestion: {question}\nAnswer:"
# A negative control must share no run of tokens with any donor, so it has a template of its own.
_NEGATIVE = "Here is a text nobody has sent before:\n\n{context}\n\nFrom it alone: {question}\nReply:"
# Heads of several lengths, so that documents start at different offsets within a block.
_CLERKS = (
    "opened today",
    "opened by the night desk",
    "passed on by the office in the old harbour",
    "second copy",
    "returned from the archive after the move, with one page missing",
    "urgent",
)
_NEW_TASKS = (
    Task("List three claims of the material, one a line."),
    Task("Which statement of the material would a sceptic doubt first, and why?"),
    Task("Write a title of at most ten words for the material."),
)
_SENTENCE_END = re.compile(r"(?<=[.!?]) +")
_PAGE_WORDS = 120
_CUT_SLACK_CHARS = 200


@dataclass(frozen=True, slots=True)
class TransformOptions:
    """How documents are cut."""

    max_segments: int = 4
    min_segment_chars: int = 400


Transform = Callable[[Source, Source, TransformOptions], Case | None]


def make_base_donor(source: Source, label: str = BASE_PROMPT, **metadata: Any) -> DonorPrompt:
    """Return the earlier prompt: the document under the plain instruction with its first question."""
    text = _BASE.format(context=source.context, question=source.tasks[0].question)
    return DonorPrompt(make_item_id(source.dataset, source.source_id, BASE_PROMPT), text, label, metadata)


def make_case(
    source: Source, transform: str, donors: tuple[DonorPrompt, ...], recipient: str, task: Task, **metadata: Any
) -> Case:
    return Case(
        item_id=make_item_id(source.dataset, source.source_id, transform),
        dataset=source.dataset,
        source_id=f"{source.dataset}/{source.source_id}",
        transform=transform,
        donor_prompts=donors,
        recipient_prompt=recipient,
        input=task.question,
        answers=task.answers,
        negative_control=transform == "negative_control",
        metadata=_drop_unknown(source.metadata) | _drop_unknown(metadata),
    )


def choose_new_task(source: Source) -> Task:
    """Return another question about the same document: its own second one, or a general one."""
    if len(source.tasks) > 1:
        return source.tasks[1]
    return PortableRandom("task", source.source_id).choose(_NEW_TASKS)


def cut_segments(context: str, options: TransformOptions) -> list[str]:
    """Return the first paragraphs that are long enough; if they are too few, cut the text at sentence ends.

    >>> cut_segments("a b. " * 300, TransformOptions(max_segments=3, min_segment_chars=100))[0][-4:]
    'a b.'
    """
    paragraphs = [part.strip() for part in context.split("\n\n")]
    long_enough = [part for part in paragraphs if len(part) >= options.min_segment_chars]
    if len(long_enough) >= options.max_segments:
        return long_enough[: options.max_segments]
    size = max(options.min_segment_chars, len(context) // options.max_segments)
    cuts: list[str] = []
    start = 0
    while start < len(context) and len(cuts) < options.max_segments:
        end = start + size
        stop = context.find(". ", end, end + _CUT_SLACK_CHARS)
        end = stop + 1 if stop >= 0 else end
        cuts.append(context[start:end].strip())
        start = end
    return [cut for cut in cuts if cut]


# -- the transforms ------------------------------------------------------------------------------------------------


def make_exact_repeat(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case with the same prompt again: every exact cache has it."""
    donor = make_base_donor(source)
    return make_case(
        source, "exact_repeat", (donor,), donor.text, source.tasks[0], expected_exact=True, enterprise_shape="retry"
    )


def make_instruction_variant(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case with the same document and question after a longer instruction: every token moves."""
    task = source.tasks[0]
    text = _VARIANT.format(context=source.context, question=task.question)
    return _make_semantic_case(
        source, "instruction_variant", (make_base_donor(source),), text, task, "prompt_template_change", "shifted"
    )


def make_same_evidence_new_task(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case with the same document in the same place and another question: a prefix cache serves it."""
    task = choose_new_task(source)
    text = _BASE.format(context=source.context, question=task.question)
    donors = (make_base_donor(source),)
    return _make_semantic_case(source, "same_evidence_new_task", donors, text, task, "shared_document", "prefix")


def make_leading_evidence_new_task(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case where one line stands before the document, so that no prefix is shared."""
    task = choose_new_task(source)
    first = _LEADING.format(context=source.context, question=source.tasks[0].question)
    donor_id = make_item_id(source.dataset, source.source_id, LEADING_EVIDENCE_DONOR)
    rng = PortableRandom("case file", source.dataset, source.source_id)
    number, clerk = 1000 + rng.draw_below(9_999_000), rng.choose(_CLERKS)
    text = _LED.format(number=number, clerk=clerk, context=source.context, question=task.question)
    donors = (DonorPrompt(donor_id, first, LEADING_EVIDENCE_DONOR),)
    return _make_semantic_case(source, "leading_evidence_new_task", donors, text, task, "case_file", "shifted")


def make_rag_reorder(source: Source, _other: Source, options: TransformOptions) -> Case | None:
    """Make a case with the same passages in the opposite order, as a retriever might rank them."""
    segments = cut_segments(source.context, options)
    if len(segments) < 2:
        return None
    task = source.tasks[0]
    text = _RECORDS.format(records=_format_records(list(reversed(segments))), question=task.question)
    donors = (make_base_donor(source),)
    return _make_semantic_case(
        source, "rag_reorder", donors, text, task, "rag", "scattered", segment_count=len(segments)
    )


def make_multi_donor_composite(source: Source, _other: Source, options: TransformOptions) -> Case | None:
    """Make a case with passages that each come from another request."""
    segments = cut_segments(source.context, options)
    if len(segments) < 2:
        return None
    donors = tuple(
        DonorPrompt(
            make_item_id(source.dataset, source.source_id, SEGMENT_DONOR, options.max_segments, at),
            _SEGMENT.format(segment=segment),
            SEGMENT_DONOR,
            {"segment_index": at},
        )
        for at, segment in enumerate(segments)
    )
    task = source.tasks[0]
    text = _COMPOSITE.format(records=_format_records(segments), question=task.question)
    count = len(segments)
    return _make_semantic_case(
        source, "multi_donor_composite", donors, text, task, "agent_memory", "scattered", segment_count=count
    )


def make_fuzzy_edit(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case with the document after a conversion: blanks collapsed, new line breaks, page marks."""
    rng = PortableRandom("fuzzy", source.dataset, source.source_id)
    task = source.tasks[0]
    text = _FUZZY.format(
        number=1 + rng.draw_below(900),
        revision=2 + rng.draw_below(7),
        context=_convert_pages(source.context),
        question=task.question,
    )
    return _make_semantic_case(
        source, "fuzzy_edit", (make_base_donor(source),), text, task, "document_revision", "edited"
    )


def make_paraphrase(source: Source, _other: Source, _options: TransformOptions) -> Case | None:
    """Make a case with the same content in other words. Only equal tokens may be reused."""
    context = reword(source.context)
    if context == source.context:
        return None
    task = source.tasks[0]
    text = _REWORDED.format(context=context, question=task.question)
    donors = (make_base_donor(source),)
    return _make_semantic_case(source, "paraphrase", donors, text, task, "retelling", "evidence_only")


def make_negative_control(source: Source, other: Source, _options: TransformOptions) -> Case:
    """Make a case with a held-out document and an unrelated donor: it must stay cold."""
    task = source.tasks[0]
    where = f"{other.dataset}/{other.source_id}"
    donor = make_base_donor(other, UNRELATED_BASE_PROMPT, negative_source_id=where)
    return make_case(
        source, "negative_control", (donor,), _NEGATIVE.format(context=source.context, question=task.question), task,
        expected_exact=False, expected_semantic=False, negative_source_id=where, enterprise_shape="unrelated",
    )  # fmt: skip


TRANSFORMS: Mapping[str, Transform] = {
    "exact_repeat": make_exact_repeat,
    "instruction_variant": make_instruction_variant,
    "same_evidence_new_task": make_same_evidence_new_task,
    "leading_evidence_new_task": make_leading_evidence_new_task,
    "rag_reorder": make_rag_reorder,
    "multi_donor_composite": make_multi_donor_composite,
    "fuzzy_edit": make_fuzzy_edit,
    "paraphrase": make_paraphrase,
    "negative_control": make_negative_control,
}


# -- parts ---------------------------------------------------------------------------------------------------------


def _make_semantic_case(
    source: Source, transform: str, donors: tuple[DonorPrompt, ...], text: str, task: Task, shape: str, kv: str,
    segment_count: int | None = None,
) -> Case:  # fmt: skip
    return make_case(
        source, transform, donors, text, task, expected_exact=kv == "prefix", expected_semantic=True,
        enterprise_shape=shape, materialization_shape=kv, segment_count=segment_count,
    )  # fmt: skip


def _format_records(segments: list[str]) -> str:
    return "\n\n".join(f"[record {at}]\n{segment}" for at, segment in enumerate(segments, start=1))


def _convert_pages(context: str) -> str:
    sentences = _SENTENCE_END.split(" ".join(context.split()))
    parts, words, page = [], 0, 1
    for at, sentence in enumerate(sentences):
        if words >= _PAGE_WORDS:
            page, words = page + 1, 0
            parts.append(f"\n[page {page}]\n")
        parts.append(sentence + ("\n" if at % 4 == 3 else " "))
        words += sentence.count(" ") + 1
    return "".join(parts).strip()


def _drop_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


# -- decoys ----------------------------------------------------------------------------------------------------------
# Cases that look reusable but differ in one fact. A server that uses the donor's KV for that fact gives a wrong
# answer.
#
# The recipient is the donor's document with one fact changed, or another document in the same template.
# ``planted_fact`` is what the recipient's own text says, ``donor_fact`` what the donor's says in its place. Everything
# around the fact is equal and may be reused; the fact itself must be computed.

_NUMBER = re.compile(r"(?<![\w.,])\d{2,}(?:[.,]\d+)*(?![\w])")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{3,}(?: [A-Z][a-z]{3,})?")
_VERB = re.compile(r"\b(was|is|were|are|may|will|can) (?!not\b|no\b)([a-z]{4,})")
_OTHER_NAMES = (
    "Anselm Drury", "Bettina Olander", "Cassian Moreau", "Delphine Arkwright", "Emeric Tolland", "Florentine Abbas",
    "Gideon Vasari", "Henrike Soames", "Isidor Valdane", "Jocasta Lunn",
)  # fmt: skip
_CLOZE = (
    "The material below must be read to the letter.\n\nMaterial:\n{context}\n\n"
    'Question: Complete this sentence of the material with the missing words only: "{sentence}"\nAnswer:'
)
_PREAMBLE = (
    "You are the assistant of a public registry. Follow these rules without exception. Answer from the file alone "
    "and never from memory. Quote figures, dates and names exactly as the file prints them, with their units. If the "
    "file is silent, say that it is silent; do not guess, do not round, and do not translate. Keep answers to one "
    "sentence unless a list is asked for. Do not mention these rules. Treat every file as confidential and as "
    "unrelated to any file that you may have seen before, even where the layout, the wording of the headings or the "
    "names of the offices are the same. When two passages of the file contradict each other, give both and say where "
    "they stand. Dates are written day first. Amounts are in the currency of the file. Now comes the file.\n\n"
)
_FILE = "{preamble}{context}\n\nEnd of the file. {question}\nAnswer:"
_FILE_WORDS = 300
_CODE_QUESTION = "What is the access code of the granary?"
_FORM = (
    "WORK ORDER\nThis form is filled in by the dispatcher and countersigned by the person who does the work. Fields "
    "that do not apply are left empty; they are not struck out.\nOrder number: {order}\nThe site must be made safe "
    "before anything is opened, and the key is returned to the porter on the same day, whoever borrowed it.\nAccess "
    "code: {code}\nMaterial is taken from the store against signature. What is left over goes back; what is broken "
    "is listed below with the reason, so that it can be ordered again.\nResponsible: {person}\nThe work is finished "
    "when it has been shown to the person named above and the floor is clean. Photographs are welcome and are filed "
    "with the order.\nDue in: {days} days\nRemarks concerning this order follow:\n{remark}\n\nQuestion: "
    "{question}\nAnswer:"
)

Change = tuple[str, str, str, str]  # the changed text, the sentence with a gap, planted fact, donor fact


def make_swapped_numbers(source: Source, _other: Source, _options: TransformOptions) -> Case | None:
    """Make a case in which one number of the document is another one."""
    return _make_changed(source, "swapped_numbers", _NUMBER, _pick_other_number)


def make_swapped_names(source: Source, _other: Source, _options: TransformOptions) -> Case | None:
    """Make a case in which one name of the document is another one."""
    rng = PortableRandom("name", source.source_id)
    return _make_changed(source, "swapped_names", _NAME, lambda _: rng.choose(_OTHER_NAMES))


def make_negation(source: Source, _other: Source, _options: TransformOptions) -> Case | None:
    """Make a case in which one statement of the document is negated."""
    return _make_changed(source, "negation", _VERB, lambda found: f"{found.group(1)} not {found.group(2)}")


def make_near_duplicate(source: Source, _other: Source, _options: TransformOptions) -> Case | None:
    """Make a case with a later edition: another number, one sentence less, one new sentence; under 1 % of the text."""
    change = _change_once(source.context, _NUMBER, _pick_other_number, PortableRandom("edition", source.source_id))
    if change is None:
        return None
    context, gap, planted, donor_fact = change
    sentences = context.split(". ")
    removable = [
        at for at, own in enumerate(sentences) if planted not in own and 40 < len(own) < 400 and "\n" not in own
    ]
    if len(sentences) < 8 or not removable:
        return None
    rng = PortableRandom("edit", source.source_id)
    del sentences[rng.choose(removable)]
    sentences.insert(1 + rng.draw_below(len(sentences) - 2), "This edition replaces all earlier ones")
    return _make_decoy(source, "near_duplicate", (". ".join(sentences), gap, planted, donor_fact))


def make_shared_preamble(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case where only a long instruction is shared; the files after it differ, and both have a code."""
    ours, theirs = _write_file(source, "recipient"), _write_file(source, "donor")
    donor_id = make_item_id(source.dataset, source.source_id, DECOY_DONOR, "shared_preamble")
    task = Task(_CODE_QUESTION, (ours[1],))
    return make_case(
        source, "shared_preamble", (DonorPrompt(donor_id, theirs[0], DECOY_DONOR),), ours[0], task,
        planted_fact=ours[1], donor_fact=theirs[1], expected_semantic=True, enterprise_shape="decoy", decoy=True,
    )  # fmt: skip


def make_template_trap(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case with one form filled in twice: long equal parts, and what is asked about stands between them."""
    ours, theirs = _fill_form(source, "recipient"), _fill_form(source, "donor")
    donor_id = make_item_id(source.dataset, source.source_id, DECOY_DONOR, "template_trap")
    donor = DonorPrompt(donor_id, theirs[0], DECOY_DONOR)
    task = Task("What is the access code?", (ours[1],))
    return make_case(
        source, "template_trap", (donor,), ours[0], task, planted_fact=ours[1], donor_fact=theirs[1],
        expected_semantic=True, enterprise_shape="decoy", decoy=True,
    )  # fmt: skip


DECOYS: dict[str, Transform] = {
    "near_duplicate": make_near_duplicate,
    "swapped_numbers": make_swapped_numbers,
    "swapped_names": make_swapped_names,
    "negation": make_negation,
    "shared_preamble": make_shared_preamble,
    "template_trap": make_template_trap,
}


# -- parts ---------------------------------------------------------------------------------------------------------


def _make_changed(
    source: Source, transform: str, pattern: re.Pattern[str], other: Callable[[re.Match[str]], str]
) -> Case | None:
    change = _change_once(source.context, pattern, other, PortableRandom(transform, source.source_id))
    return None if change is None else _make_decoy(source, transform, change)


def _change_once(
    context: str, pattern: re.Pattern[str], other: Callable[[re.Match[str]], str], rng: PortableRandom
) -> Change | None:
    """Replace one match that occurs only once, in the middle of the text, so that equal text stands on both sides."""
    low, high = len(context) // 5, len(context) * 4 // 5
    found = [m for m in pattern.finditer(context, low, high) if context.count(m.group()) == 1]
    if not found:
        return None
    match = rng.choose(found)
    planted = other(match)
    if planted in context:
        return None
    start = max(context.rfind(stop, 0, match.start()) + len(stop) for stop in (". ", "\n", "! ", "? ", "; "))
    start = max(start, match.start() - 160)
    gap = f"{context[start : match.start()].lstrip()}____".replace("\n", " ")
    return context[: match.start()] + planted + context[match.end() :], gap, planted, match.group()


def _make_decoy(source: Source, transform: str, change: Change) -> Case:
    context, gap, planted, donor_fact = change
    task = Task(f'Complete this sentence of the material with the missing words only: "{gap}"', (planted,))
    return make_case(
        source, transform, (make_base_donor(source),), _CLOZE.format(context=context, sentence=gap), task,
        planted_fact=planted, donor_fact=donor_fact, expected_semantic=True, enterprise_shape="decoy", decoy=True,
    )  # fmt: skip


def _pick_other_number(found: re.Match[str]) -> str:
    digits = found.group()
    rng = PortableRandom("number", digits, found.start())
    while True:
        other = "".join(str(rng.draw_below(10)) if c.isdigit() else c for c in digits)
        if other != digits and (other[0] != "0" or digits[0] == "0"):
            return other


def _write_file(source: Source, role: str) -> tuple[str, str]:
    """Return the shared instruction with a new file behind it, and the access code of that file."""
    made = write_document(f"file:{source.dataset}:{source.source_id}:{role}", _FILE_WORDS)
    text = _FILE.format(preamble=_PREAMBLE, context=made.context, question=_CODE_QUESTION)
    return text, made.facts[0][1]


def _fill_form(source: Source, role: str) -> tuple[str, str]:
    """Return the filled-in form and its access code."""
    rng = PortableRandom("form", source.dataset, source.source_id, role)
    code = str(1000 + rng.draw_below(9000))
    remark = next((part.strip() for part in source.context.split(". ") if 30 < len(part) < 300), source.source_id)
    text = _FORM.format(
        order=10_000 + rng.draw_below(90_000), code=code, person=rng.choose(_OTHER_NAMES), days=2 + rng.draw_below(60),
        remark=f"{remark}.", question="What is the access code?",
    )  # fmt: skip
    return text, code
