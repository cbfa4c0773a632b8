"""Turns a document into a case, by changes of a prompt that an exact prefix cache cannot serve.

A transform takes a document and returns one case, or None if the document is not suitable. The donor is the
document's base prompt unless the transform says otherwise, so that one donor serves many recipients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sembench.manifests.cases import (
    BASE_PROMPT,
    LEADING_EVIDENCE_DONOR,
    SEGMENT_DONOR,
    UNRELATED_BASE_PROMPT,
    Case,
    DonorPrompt,
    make_item_id,
)
from sembench.manifests.datasets import Source, Task
from sembench.manifests.paraphrase import reword
from sembench.manifests.portable_random import PortableRandom

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
