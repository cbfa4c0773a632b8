"""A volatile field of a prompt: how it is recognised in a text, and the text with the field moved to its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW_CHARS = 8_192
"""Fields are looked for in so many characters at the beginning of a prompt."""
MOST_FIELD_CHARS = 256
LONGEST_LINE_CHARS = 200
"""A line up to this length moves as a whole; of a longer one only the value does."""
_MARK = "(see the end)"


@dataclass(frozen=True, slots=True)
class VolatileField:
    """A place in front of long shared text where prompts differ: a date, an id, a name.

    ``before`` and ``after`` are the texts that stand around the value (digits in them stand for any digits; an empty
    ``before`` is the beginning of the prompt). ``offset_chars`` is where the value usually begins, ``prompts`` how many
    hold it, ``values`` some of its values. ``gain_tokens`` are the tokens of all prompts that an exact prefix cache
    would hit in addition, once this field and those in front of it in the result stood at the end.
    """

    name: str
    before: str
    after: str
    offset_chars: int
    prompts: int
    values: tuple[str, ...]
    gain_tokens: int = 0
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        start = _write_pattern(self.before) if self.before else r"\A"
        end = _write_pattern(self.after) if self.after else r"\Z"
        object.__setattr__(self, "_pattern", re.compile(f"{start}(.{{1,{MOST_FIELD_CHARS}}}?){end}", re.DOTALL))

    def find(self, prompt: str) -> tuple[int, int] | None:
        """Where the value stands in a prompt, half-open; None where it does not.

        >>> found = VolatileField("date", "Today is ", ".", 9, 2, ("Monday", "Friday"))
        >>> found.find("Today is Sunday. Be kind.")
        (9, 15)
        """
        match = self._pattern.search(prompt, 0, WINDOW_CHARS + MOST_FIELD_CHARS)
        return None if match is None else match.span(1)


def move_to_end(prompt: str, fields: Sequence[VolatileField]) -> str:
    """The prompt with its volatile fields behind everything else; the same prompt where it has none of them.

    A short line moves as it is. From a long line the value moves, and a mark points to the end.

    >>> date = VolatileField("date", "Date: ", "\\nYou", 6, 2, ("Monday", "Friday"))
    >>> move_to_end("Date: Sunday\\nYou are kind.", [date])
    'You are kind.\\nDate: Sunday'
    """
    kept, moved = cut_fields(prompt, fields)
    return "\n".join([kept, *moved])


def cut_fields(prompt: str, fields: Sequence[VolatileField]) -> tuple[str, list[str]]:
    """The prompt without its volatile fields, and what `move_to_end` puts behind it, line by line."""
    cuts: list[tuple[int, int, str]] = []  # start, end, mark
    moved: list[str] = []
    for one in fields:
        found = one.find(prompt)
        if found is None:
            continue
        start, end = found
        line_start = prompt.rfind("\n", 0, start) + 1
        line_end = prompt.find("\n", end)
        if line_end >= 0 and line_end - line_start <= LONGEST_LINE_CHARS:
            cut = (line_start, line_end + 1, "")
        else:
            cut = (start, end, _MARK)
        if any(cut[0] < other[1] and other[0] < cut[1] for other in cuts):
            continue  # it moves with its line, or would cut into what moves already
        cuts.append(cut)
        text = prompt[cut[0] : cut[1]].rstrip("\n")
        moved.append(text if not cut[2] else f"{one.name}: {text}")
    kept, at = [], 0
    for start, end, mark in sorted(cuts):
        kept += [prompt[at:start], mark]
        at = end
    kept.append(prompt[at:])
    return "".join(kept), moved


def _write_pattern(text: str) -> str:
    """Digits as a whole run, never a part of one: a prompt of digits alone must not cost a search its square."""
    return r"(?<!\d)\d++".join(re.escape(part) for part in re.split(r"\d+", text))
