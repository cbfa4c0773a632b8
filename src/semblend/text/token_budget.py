"""How many tokens a text may have, and how to find out without encoding much more than that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from semblend.errors import InputError

WINDOW_CHARS = 32_768  # the slowest text we know (digits) takes 0.1 s for this on one ARM core
CUT_TOKENS = 128  # more than a cut can add: half a word, or a word that was one unknown token
_LOOK_BACK_CHARS = 512


class TooManyTokensError(InputError):
    """A text has more tokens than its budget: the first ``chars`` of it have ``counted``. The rest was left alone."""

    def __init__(self, chars: int, counted: int, most: int) -> None:
        problem = f"the first {chars} characters have about {counted} tokens, and the context holds {most}"
        super().__init__(problem, hint="send a shorter text")
        self.chars = chars
        self.counted = counted


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """At most ``most_tokens`` for one text. ``check`` is called between pieces of work and raises to stop it."""

    most_tokens: int
    check: Callable[[], None] = lambda: None

    def refuse_longer(self, text: str, count: Callable[[str], int], window_chars: int = WINDOW_CHARS) -> None:
        """Raise `TooManyTokensError` where the text surely has more; ``count`` gives the tokens of a part of it.

        Parts are counted one by one, so the work follows from the budget and not from the text. A part cut out of a
        text can have some tokens more than it has inside; these are allowed for. A text of one window is not counted:
        encoding it costs no more than counting it.
        """
        self.check()
        chars, counted, allowed = 0, 0, self.most_tokens
        for part in cut_windows(text, window_chars) if len(text) > window_chars else ():
            chars, counted = chars + len(part), counted + count(part)
            if counted > allowed:
                raise TooManyTokensError(chars, counted, self.most_tokens)
            allowed += CUT_TOKENS
            self.check()

    def join(self, pieces: Iterable[str], most_chars: int) -> str:
        """The pieces as one text. `TooManyTokensError` once it has more than ``most_chars``, which cannot fit."""
        joined, chars = [], 0
        for piece in pieces:
            self.check()
            joined.append(piece)
            chars += len(piece)
            if chars > most_chars:
                raise TooManyTokensError(chars, self.most_tokens + 1, self.most_tokens)
        return "".join(joined)


def cut_windows(text: str, window_chars: int) -> Iterator[str]:
    """The text in parts of at most so many characters, cut in front of a blank where one is near.

    >>> list(cut_windows("one two three", 6))
    ['one', ' two', ' three']
    """
    start = 0
    while len(text) - start > window_chars:
        end = start + window_chars
        blank = text.rfind(" ", max(start + 1, end - _LOOK_BACK_CHARS), end)
        end = blank if blank > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]
