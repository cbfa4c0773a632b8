"""What happens to a text between two requests: cut, reordered, edited, or the same form with other facts.

All functions take the random generator that they use, so that a seed fixes the whole corpus.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_WORD = re.compile(r"\s*\S+")
_NUMBER = re.compile(r"\d+")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}")
_VERB = re.compile(r"\b(is|was|are|were|will|can|could|would|has|have|did)\b( not)?")


def words(text: str) -> list[str]:
    """The words with the blanks before them: joined, they are the text again (less blanks at its end).

    >>> words("a  bc\\nd")
    ['a', '  bc', '\\nd']
    """
    return _WORD.findall(text)


def window(text: str, length: int, rng: random.Random) -> str:
    """``length`` words from anywhere in the text, or the whole text if it is shorter."""
    pieces = words(text)
    if len(pieces) <= length:
        return text.strip()
    start = rng.randrange(len(pieces) - length + 1)
    return "".join(pieces[start : start + length]).strip()


def pieces_of(text: str, parts: Sequence[str], target_words: int) -> list[str]:
    """The document's own passages where it has them, else paragraphs joined up to about ``target_words``."""
    if len(parts) >= 3:
        return [part.strip() for part in parts if part.strip()]
    lines = [line for line in re.split(r"\n+", text) if line.strip()]
    if len(lines) < 6:  # one long line: sentences are the next best border
        lines = re.split(r"(?<=[.!?]) +", text)
    pieces: list[str] = []
    held: list[str] = []
    held_words = 0
    for line in lines:
        held.append(line)
        held_words += len(line.split())
        if held_words >= target_words:
            pieces.append("\n".join(held))
            held, held_words = [], 0
    return [*pieces, "\n".join(held)] if held else pieces


def reordered(pieces: Sequence[str], rng: random.Random) -> list[str]:
    """Another order, never the same one, for two or more pieces."""
    order = list(range(len(pieces)))
    while len(order) > 1:
        rng.shuffle(order)
        if order != sorted(order):
            break
    return [pieces[index] for index in order]


def edited(text: str, every: int, rng: random.Random) -> str:
    """About one word in ``every`` is replaced, inserted or deleted; the new words come from the same text."""
    pieces = words(text)
    if not pieces:
        return text
    result: list[str] = []
    next_edit = rng.randrange(1, 2 * every)
    for index, piece in enumerate(pieces):
        if index < next_edit:
            result.append(piece)
            continue
        next_edit = index + rng.randrange(1, 2 * every)
        action = rng.choice(("replace", "insert", "delete"))
        other = " " + rng.choice(pieces).strip()
        if action == "replace":
            result.append(other + "x" if other.strip() == piece.strip() else other)
        elif action == "insert":
            result += [piece, other]
    return "".join(result)


def other_facts(text: str, names: Sequence[str], rng: random.Random) -> str:
    """The same form with other facts: every number, every name inside a sentence and every verb's polarity changes.

    >>> other_facts("It was 40 in Paris, says Marie.", ["Oslo", "Ole"], random.Random(1))
    'It was not 29 in Oslo, says Ole.'
    """
    text = _NUMBER.sub(lambda found: _other_number(found.group(), rng), text)
    swaps: dict[str, str] = {}

    def swap(found: re.Match[str]) -> str:
        name = found.group()
        if name not in swaps:
            choices = [item for item in names if item != name and item not in swaps.values()]
            swaps[name] = rng.choice(choices) if choices else name[::-1].capitalize()
        return swaps[name]

    text = _NAME.sub(swap, text)
    return _VERB.sub(lambda found: found.group(1) if found.group(2) else f"{found.group(1)} not", text)


def names_in(text: str) -> list[str]:
    """Capitalised words inside sentences, each once, in order."""
    return list(dict.fromkeys(_NAME.findall(text)))


def _other_number(digits: str, rng: random.Random) -> str:
    while True:
        other = "".join(rng.choice("0123456789") for _ in digits)
        if other != digits:
            return other
