"""Passages that already stand in the same prompt: replaced by a reference, and put back for citations.

Only on request: a reference costs the model a look back, and what is saved is the passage's tokens. Nothing is guessed:
a passage is replaced only where the same text, to the character, stands further up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter

from semblend.errors import InputError

TEMPLATE = "[same as passage {number}]"
LEAST_CHARS = 64
_FIELDS = {"number", "start"}


@dataclass(frozen=True, slots=True)
class Reference:
    """Passage ``index`` (in the order of reading, over all turns) is the same text as the earlier ``first``."""

    index: int
    first: int


@dataclass(frozen=True, slots=True)
class Deduplicated:
    """Turns of passages in which repeats are references. ``saved_chars`` is what the prompt is shorter by."""

    turns: tuple[tuple[str, ...], ...]
    references: tuple[Reference, ...]
    saved_chars: int

    def restore(self) -> tuple[tuple[str, ...], ...]:
        """The turns as they were, to the character."""
        flat = [passage for turn in self.turns for passage in turn]
        for reference in self.references:
            flat[reference.index] = flat[reference.first]
        found, at = [], 0
        for turn in self.turns:
            found.append(tuple(flat[at : at + len(turn)]))
            at += len(turn)
        return tuple(found)

    def find_source(self, index: int) -> int:
        """The passage that a citation of ``index`` means: the first with that text, or itself."""
        return next((one.first for one in self.references if one.index == index), index)


def replace_repeats(
    turns: Sequence[Sequence[str]], *, template: str = TEMPLATE, least_chars: int = LEAST_CHARS
) -> Deduplicated:
    """Replace each passage that stands earlier in the same prompt by a reference to it.

    ``turns`` are the passages of each turn, in the order of the prompt. In the template ``{number}`` is the number of
    the earlier passage, counted from 1 over all turns, and ``{start}`` its first words. A passage shorter than
    ``least_chars``, or than its reference, stays.

    >>> long = "a passage that is long enough to be worth a reference " * 2
    >>> found = replace_repeats([[long, "other"], [long]])
    >>> found.turns[1]
    ('[same as passage 1]',)
    >>> found.restore()[1] == (long,)
    True
    """
    _check_template(template)
    first: dict[str, int] = {}
    references: list[Reference] = []
    saved = number = 0
    replaced: list[tuple[str, ...]] = []
    for turn in turns:
        if isinstance(turn, str):
            raise InputError("a turn is a list of passages", hint='replace_repeats([["...", "..."], ["..."]])')
        now = []
        for passage in turn:
            earlier = first.setdefault(passage, number)
            reference = template.format(number=earlier + 1, start=_take_start(passage)) if earlier < number else passage
            if len(passage) >= max(least_chars, len(reference) + 1):
                references.append(Reference(number, earlier))
                saved += len(passage) - len(reference)
                now.append(reference)
            else:
                now.append(passage)
            number += 1
        replaced.append(tuple(now))
    return Deduplicated(tuple(replaced), tuple(references), saved)


def _take_start(passage: str) -> str:
    return " ".join(passage[:200].split()[:6])


def _check_template(template: str) -> None:
    hint = "such as " + TEMPLATE
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise InputError(f"the template {template!r} cannot be read: {error}", hint=hint) from None
    if not parts or any(name not in _FIELDS or spec or conversion for name, spec, conversion in parts):
        problem = f"the template {template!r} must name the earlier passage, by {{number}} or {{start}} alone"
        raise InputError(problem, hint=hint)
