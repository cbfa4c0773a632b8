"""The text of an answer while it comes, and stop strings wherever they fall between tokens.

Text that may turn out to be the beginning of a stop string is held back; what was handed out is never taken back.
(Half characters are held back one floor below, by the tokenizer's own stream.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Pieces(Protocol):
    """Tokens to text, one by one; see `semblend.engine.model.tokenizer.TextStream`."""

    def add(self, token: int) -> str: ...
    def finish(self) -> str: ...


class Detokenizer(Protocol):
    """What the engine needs of a tokenizer: a fresh stream for each answer, and the text of one token."""

    def stream(self) -> Pieces: ...
    def token_text(self, token: int) -> str: ...


class NoText:
    """Stands in where no tokenizer is given, as both of the above: tokens only, every text is empty."""

    def stream(self) -> NoText:
        return self

    def token_text(self, token: int) -> str:
        del token
        return ""

    def add(self, token: int) -> str:
        del token
        return ""

    def finish(self) -> str:
        return ""


class AnswerText:
    """The text of one answer up to its first stop string, which ``matched`` names then.

    >>> class Letters(NoText):
    ...     def add(self, token): return chr(token)
    >>> text = AnswerText(Letters(), stops=("END",))
    >>> [text.push(ord(letter)) for letter in "aExyEND"], text.matched
    (['a', '', 'Ex', 'y', '', '', ''], 'END')
    """

    def __init__(self, pieces: Pieces, stops: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """The text that is certain after this token."""
        return self._release(self._pieces.add(token))

    def flush(self) -> str:
        """What was held back, once no token will follow."""
        if self.matched is not None:
            return ""
        text = self._release(self._pieces.finish())
        held, self._held = self._held, ""  # empty where a stop string was completed just now
        return text + held

    def _release(self, text: str) -> str:
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, self.matched = min(found)
            out, self._held = self._held[:end], ""
            return out
        keep = max((_measure_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


def _measure_overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
