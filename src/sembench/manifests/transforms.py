"""What changes between a donor and its recipient: honest transforms, rewording, and decoys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from sembench.manifests.datasets import WORDS, PortableRandom, Source, Task, write_document

# -- rewording -------------------------------------------------------------------------------------------------------
# Rewords text by rule: a table of near-synonyms, and adverbials moved to the end of the sentence.
#
# No model is used, so the result is the same everywhere. The meaning stays, and most runs of equal tokens are broken.

_SYNONYMS: Mapping[str, str] = WORDS["synonyms"]
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

_PROMPTS: Mapping[str, Any] = WORDS["prompts"]
_NEW_TASKS = tuple(map(Task, _PROMPTS["new_tasks"]))
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
    text = _fill("base", source, source.tasks[0])
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
    text = _fill("variant", source, source.tasks[0])
    return _make_semantic_case(source, "instruction_variant", text, "prompt_template_change", "shifted")


def make_same_evidence_new_task(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case with the same document in the same place and another question: a prefix cache serves it."""
    task = choose_new_task(source)
    text = _fill("base", source, task)
    return _make_semantic_case(source, "same_evidence_new_task", text, "shared_document", "prefix", task=task)


def make_leading_evidence_new_task(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case where one line stands before the document, so that no prefix is shared.

    The line has one of several lengths, so that documents start at different offsets within a block.
    """
    task = choose_new_task(source)
    donor_id = make_item_id(source.dataset, source.source_id, LEADING_EVIDENCE_DONOR)
    donors = (DonorPrompt(donor_id, _fill("leading", source, source.tasks[0]), LEADING_EVIDENCE_DONOR),)
    rng = PortableRandom("case file", source.dataset, source.source_id)
    number, clerk = 1000 + rng.draw_below(9_999_000), rng.choose(_PROMPTS["clerks"])
    text = _fill("led", source, task, number=number, clerk=clerk)
    return _make_semantic_case(source, "leading_evidence_new_task", text, "case_file", "shifted", donors, task=task)


def make_rag_reorder(source: Source, _other: Source, options: TransformOptions) -> Case | None:
    """Make a case with the same passages in the opposite order, as a retriever might rank them."""
    segments = cut_segments(source.context, options)
    if len(segments) < 2:
        return None
    text = _fill("records", source, source.tasks[0], records=_format_records(segments[::-1]))
    return _make_semantic_case(source, "rag_reorder", text, "rag", "scattered", segment_count=len(segments))


def make_multi_donor_composite(source: Source, _other: Source, options: TransformOptions) -> Case | None:
    """Make a case with passages that each come from another request."""
    segments = cut_segments(source.context, options)
    if len(segments) < 2:
        return None
    donors = tuple(
        DonorPrompt(
            make_item_id(source.dataset, source.source_id, SEGMENT_DONOR, options.max_segments, at),
            _PROMPTS["segment"].format(segment=segment),
            SEGMENT_DONOR,
            {"segment_index": at},
        )
        for at, segment in enumerate(segments)
    )
    text, count = _fill("composite", source, source.tasks[0], records=_format_records(segments)), len(segments)
    return _make_semantic_case(
        source, "multi_donor_composite", text, "agent_memory", "scattered", donors, segment_count=count
    )


def make_fuzzy_edit(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case with the document after a conversion: blanks collapsed, new line breaks, page marks."""
    rng = PortableRandom("fuzzy", source.dataset, source.source_id)
    number, revision = 1 + rng.draw_below(900), 2 + rng.draw_below(7)
    converted = replace(source, context=_convert_pages(source.context))
    text = _fill("fuzzy", converted, source.tasks[0], number=number, revision=revision)
    return _make_semantic_case(source, "fuzzy_edit", text, "document_revision", "edited")


def make_paraphrase(source: Source, _other: Source, _options: TransformOptions) -> Case | None:
    """Make a case with the same content in other words. Only equal tokens may be reused."""
    retold = replace(source, context=reword(source.context))
    if retold == source:
        return None
    text = _fill("reworded", retold, source.tasks[0])
    return _make_semantic_case(source, "paraphrase", text, "retelling", "evidence_only")


def make_negative_control(source: Source, other: Source, _options: TransformOptions) -> Case:
    """Make a case with a held-out document and an unrelated donor: it must stay cold.

    It must share no run of tokens with any donor, so it has a template of its own.
    """
    task = source.tasks[0]
    where = f"{other.dataset}/{other.source_id}"
    donor = make_base_donor(other, UNRELATED_BASE_PROMPT, negative_source_id=where)
    return make_case(
        source, "negative_control", (donor,), _fill("negative", source, task), task,
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


def _fill(prompt: str, source: Source, task: Task, **fields: Any) -> str:
    """Return a prompt of ``case_words.toml`` with the document, the question and further fields in it."""
    return str(_PROMPTS[prompt].format(context=source.context, question=task.question, **fields))


def _make_semantic_case(
    source: Source, transform: str, text: str, shape: str, kv: str, donors: tuple[DonorPrompt, ...] = (),
    *, task: Task | None = None, segment_count: int | None = None,
) -> Case:  # fmt: skip
    """Return a case that a planner should find; the base prompt is its donor where no other is named."""
    return make_case(
        source, transform, donors or (make_base_donor(source),), text, task or source.tasks[0],
        expected_exact=kv == "prefix", expected_semantic=True, enterprise_shape=shape, materialization_shape=kv,
        segment_count=segment_count,
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
_FILE_WORDS = 300
_CODE_QUESTION = "What is the access code of the granary?"
_FORM_QUESTION = "What is the access code?"
Change = tuple[str, str, str, str]  # the changed text, the sentence with a gap, planted fact, donor fact


def make_swapped_numbers(source: Source, _other: Source, _options: TransformOptions) -> Case | None:
    """Make a case in which one number of the document is another one."""
    return _make_changed(source, "swapped_numbers", _NUMBER, _pick_other_number)


def make_swapped_names(source: Source, _other: Source, _options: TransformOptions) -> Case | None:
    """Make a case in which one name of the document is another one."""
    rng = PortableRandom("name", source.source_id)
    return _make_changed(source, "swapped_names", _NAME, lambda _: rng.choose(_PROMPTS["other_names"]))


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
    return _make_twins(source, "shared_preamble", _CODE_QUESTION, _write_file)


def make_template_trap(source: Source, _other: Source, _options: TransformOptions) -> Case:
    """Make a case with one form filled in twice: long equal parts, and what is asked about stands between them."""
    return _make_twins(source, "template_trap", _FORM_QUESTION, _fill_form)


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
    text = _PROMPTS["cloze"].format(context=context, sentence=gap)
    return _make_trap(source, transform, make_base_donor(source), text, task, donor_fact)


def _make_twins(source: Source, transform: str, question: str, write: Callable[[Source, str], tuple[str, str]]) -> Case:
    """Make a case of two texts that are written alike, each with a code of its own."""
    (ours, code), (theirs, other_code) = write(source, "recipient"), write(source, "donor")
    donor_id = make_item_id(source.dataset, source.source_id, DECOY_DONOR, transform)
    donor = DonorPrompt(donor_id, theirs, DECOY_DONOR)
    return _make_trap(source, transform, donor, ours, Task(question, (code,)), other_code)


def _make_trap(source: Source, transform: str, donor: DonorPrompt, text: str, task: Task, donor_fact: str) -> Case:
    return make_case(
        source, transform, (donor,), text, task, planted_fact=task.answers[0], donor_fact=donor_fact,
        expected_semantic=True, enterprise_shape="decoy", decoy=True,
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
    text = _PROMPTS["file"].format(preamble=_PROMPTS["preamble"], context=made.context, question=_CODE_QUESTION)
    return text, made.facts[0][1]


def _fill_form(source: Source, role: str) -> tuple[str, str]:
    """Return the filled-in form and its access code."""
    rng = PortableRandom("form", source.dataset, source.source_id, role)
    code = str(1000 + rng.draw_below(9000))
    remark = next((part.strip() for part in source.context.split(". ") if 30 < len(part) < 300), source.source_id)
    order, person = 10_000 + rng.draw_below(90_000), rng.choose(_PROMPTS["other_names"])
    text = _PROMPTS["form"].format(
        order=order, code=code, person=person, days=2 + rng.draw_below(60), remark=f"{remark}.", question=_FORM_QUESTION
    )
    return text, code
