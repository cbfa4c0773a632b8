"""Cases that look reusable but differ in one fact. A server that uses the donor's KV for that fact gives a wrong
answer.

The recipient is the donor's document with one fact changed, or another document in the same template. ``planted_fact``
is what the recipient's own text says, ``donor_fact`` what the donor's says in its place. Everything around the fact is
equal and may be reused; the fact itself must be computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sembench.manifests.cases import DECOY_DONOR, Case, DonorPrompt, make_item_id
from sembench.manifests.datasets import Source, Task
from sembench.manifests.portable_random import PortableRandom
from sembench.manifests.transforms import Transform, TransformOptions, make_base_donor, make_case
from sembench.manifests.writer import write_document

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
