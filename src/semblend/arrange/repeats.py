"""Passages that already stand in the same prompt: replaced by a reference, and put back for citations.

Only on request: a reference costs the model a look back, and what is saved is the passage's tokens. Nothing is guessed:
a passage is replaced only where the same text, to the character, stands further up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from string import Formatter

from semblend.errors import InputError

TEMPLATE = "[same as passage {number}]"
TEMPLATE_BY_START = "[same as the passage that begins with “{start}”]"
"""Stays true where passages change places afterwards."""
MIN_CHARS = 64
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
        rest = iter(flat)
        return tuple(tuple(islice(rest, len(turn))) for turn in self.turns)

    def find_source(self, index: int) -> int:
        """The passage that a citation of ``index`` means: the first with that text, or itself."""
        return next((one.first for one in self.references if one.index == index), index)


def find_repeats(passages: Iterable[Hashable]) -> Iterator[Reference]:
    """Passages that are equal to an earlier one, in order.

    >>> [(one.index, one.first) for one in find_repeats(["a", "b", "a", "a"])]
    [(2, 0), (3, 0)]
    """
    seen: dict[Hashable, int] = {}
    for index, passage in enumerate(passages):
        first = seen.setdefault(passage, index)
        if first < index:
            yield Reference(index, first)


def replace_repeats(
    turns: Sequence[Sequence[str]],
    *,
    template: str = TEMPLATE,
    least_chars: int = MIN_CHARS,
    count: Callable[[str], int] = len,
) -> Deduplicated:
    """Replace each passage that stands earlier in the same prompt by a reference to it.

    ``turns`` are the passages of each turn, in the order of the prompt. In the template ``{number}`` is the number of
    the earlier passage, counted from 1 over all turns, and ``{start}`` its first words. A passage shorter than
    ``least_chars``, or than its reference, stays. ``count`` gives a text's length, for texts that stand for longer
    ones.

    >>> long = "a passage that is long enough to be worth a reference " * 2
    >>> found = replace_repeats([[long, "other"], [long]])
    >>> found.turns[1]
    ('[same as passage 1]',)
    >>> found.restore()[1] == (long,)
    True
    """
    _check_template(template)
    if any(isinstance(turn, str) for turn in turns):
        raise InputError("a turn is a list of passages", hint='replace_repeats([["...", "..."], ["..."]])')
    flat = [passage for turn in turns for passage in turn]
    references: list[Reference] = []
    saved = 0
    for repeat in find_repeats(tuple(flat)):
        passage = flat[repeat.index]
        reference = template.format(number=repeat.first + 1, start=_take_start(passage))
        if (chars := count(passage)) >= max(least_chars, len(reference) + 1):
            references.append(repeat)
            saved += chars - len(reference)
            flat[repeat.index] = reference
    rest = iter(flat)
    return Deduplicated(tuple(tuple(islice(rest, len(turn))) for turn in turns), tuple(references), saved)


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
