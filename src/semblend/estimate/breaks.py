"""What broke a prefix: the first prompts of each kind, with the place and the text around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from semblend.prompt import Namespace
from semblend.text.logs import LoggedPrompt

EXAMPLES = 3
RECENT_PROMPTS = 256
MOST_TEXT_CHARS = 200_000
MOST_RECENT_CHARS = 8_000_000
CONTEXT_CHARS = 80
SHOWN_CHARS = 120


class BreakKind(StrEnum):
    """Why a prompt was not hit further; the words of the report."""

    FIELD = "a field in front changes"
    TOOLS = "tools in another order"
    REPEATS = "text that the prompt has twice"
    ORDER = "passages in another order"
    EVICTED = "evicted before it came again"
    PLACE = "same text at another place"
    SMALL = "same text elsewhere, too little for a pass"
    REST = "what follows is new"
    NEW = "nothing like it before"


@dataclass(frozen=True, slots=True)
class Break:
    """A prompt that was hit no further: why, before which stage, and what mending it would have saved."""

    kind: BreakKind
    stage: int
    prompt_tokens: int
    hit_tokens: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class BreakExample:
    """One prompt: where its prefix broke, and the text around that place, here and in the earlier prompt."""

    line: int
    request_id: str
    prompt_tokens: int
    position_tokens: int
    position_chars: int | None
    before: str
    here: str
    earlier: str | None


@dataclass(slots=True)
class BreakTally:
    """Prompts of one kind, and the tokens that mending it would have saved."""

    prompts: int = 0
    tokens: int = 0
    examples: list[BreakExample] = field(default_factory=list)


class BreakLog:
    """Counts breaks by kind and shows the first of each. Keeps the latest prompts for comparison, and no others.

    A prompt comes as the texts that were sent at each stage: a break that a step mends is shown as it was before that
    step, so that what earlier steps mend does not stand in front of it.
    """

    def __init__(self, *, redacted: bool = False) -> None:
        self._redacted = redacted
        self._recent: deque[tuple[Namespace, Sequence[str]]] = deque()
        self._chars = 0
        self.kinds: dict[BreakKind, BreakTally] = {kind: BreakTally() for kind in BreakKind}

    def add(self, found: Break | None, logged: LoggedPrompt, namespace: Namespace, texts: Sequence[str]) -> None:
        """Count a prompt; None stands for one that did not break. ``texts`` are empty where the log holds no text."""
        if found is not None:
            tally = self.kinds[found.kind]
            tally.prompts += 1
            tally.tokens += found.lost_tokens
            if len(tally.examples) < EXAMPLES:
                tally.examples.append(self._show(found, logged, namespace, texts))
        if texts:
            self._remember(namespace, [text[:MOST_TEXT_CHARS] for text in texts])

    def _remember(self, namespace: Namespace, texts: Sequence[str]) -> None:
        self._recent.append((namespace, texts))
        self._chars += sum(map(len, texts))
        while len(self._recent) > RECENT_PROMPTS or self._chars > MOST_RECENT_CHARS:
            self._chars -= sum(map(len, self._recent.popleft()[1]))

    def _show(self, found: Break, logged: LoggedPrompt, namespace: Namespace, texts: Sequence[str]) -> BreakExample:
        name = self._hide(logged.request_id)
        if not texts:
            return BreakExample(logged.line, name, found.prompt_tokens, found.hit_tokens, None, "", "", None)
        text = texts[found.stage]
        common, earlier = 0, None
        for other_namespace, others in self._recent:
            if other_namespace == namespace:
                shared = count_common(text, others[found.stage])
                if shared >= common:
                    common, earlier = shared, others[found.stage]
        return BreakExample(
            logged.line,
            name,
            found.prompt_tokens,
            found.hit_tokens,
            common,
            self._hide(text[max(0, common - CONTEXT_CHARS) : common]),
            self._hide(text[common : common + SHOWN_CHARS]),
            None if earlier is None else self._hide(earlier[common : common + SHOWN_CHARS]),
        )

    def _hide(self, text: str) -> str:
        return redact(text) if self._redacted else text

    def to_dict(self) -> dict[str, Any]:
        return {kind.value: asdict(tally) for kind, tally in self.kinds.items() if tally.prompts}


def count_common(one: str, other: str) -> int:
    """Leading characters that two texts share.

    >>> count_common("prefix", "preface")
    4
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def redact(text: str) -> str:
    """The shape of a text without its words: letters become x, digits 0; blanks and punctuation stay.

    >>> redact("Müller owes 30 €.")
    'xxxxxx xxxx 00 €.'
    """
    return "".join("0" if char.isdigit() else "x" if char.isalnum() else char for char in text)
