"""`HistoryEditor`: shortens an agent's history in batches, so that most steps extend the prompt before them exactly.

Every edit makes a prefix cache compute again what lies behind it. So nothing is edited within the budget, and then
enough is removed at once that many steps need no edit. What was removed stays removed: each call replays the whole
history from its beginning, and the same history gives the same edits in any process. Give it the whole history each
time, not what it returned.

Removing is not forgetting: KV behind a removed span was computed with it in view. Where the model must not know it, it
has to be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any

from semblend.arrange.arranger import CHARS_PER_TOKEN
from semblend.errors import InputError

Message = Mapping[str, Any]
PLACEHOLDER = "[an old tool result was here]"
FRAME_TOKENS = 4  # what a chat template puts around a message, about
DATA_URL_CHARS = 4_000
ROLES = {name: name for name in ("system", "user", "assistant")}
ROLES |= {"developer": "system", "tool": "result", "function": "result"}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_REASONING_BLOCKS = ("thinking", "redacted_thinking", "reasoning")
_CALL_BLOCKS, _RESULT_BLOCKS, _THOUGHT = ("tool_use",), ("tool_result",), ("<think>", "</think>")


class EditOutcome(StrEnum):
    """What became of a history, and why."""

    WITHIN_BUDGET = "within_budget"
    EDITED = "edited"
    TOO_LITTLE = "too_little"
    """It is over the budget, and what may be removed would not pay for an edit."""


class Removed(StrEnum):
    """What was removed of messages."""

    RESULT = "result"
    REASONING = "reasoning"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Removal:
    """One range of messages, half-open, and about how many tokens went. A turn is deleted, anything else replaced."""

    what: Removed
    start: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class HistoryEdit:
    """What was removed since the base request, for whoever wants to tell an engine.

    Ranges count the messages that the base request sent, then those that came since: its answer, tool results.
    """

    removals: tuple[Removal, ...]
    base: str = ""

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.removals)

    def to_dict(self) -> dict[str, Any]:
        """As ``kv_transfer_params.semblend.edit`` holds it."""
        actions = ["delete" if one.what is Removed.TURN else "replace" for one in self.removals]
        places = zip(self.removals, actions, strict=True)
        return {"base": self.base, "ranges": [{"start": a.start, "end": a.end, "action": b} for a, b in places]}


@dataclass(frozen=True, slots=True)
class EditedHistory:
    """The messages to send, about how many tokens they have, and what was edited since the base request."""

    messages: list[Any]
    outcome: EditOutcome
    edit: HistoryEdit
    tokens: int


class Mark(IntEnum):
    """What becomes of a message; it only ever grows."""

    KEPT, LEAN, DROPPED = range(3)


@dataclass(frozen=True, slots=True)
class MessageFacts:
    """What an edit depends on. ``lean_tokens``: without the reasoning, or with a placeholder for the result.

    ``ids`` name the calls that an assistant's message makes, or those that a result answers.
    """

    role: str
    tokens: int
    lean_tokens: int
    ids: frozenset[str]

    def count(self, mark: Mark) -> int:
        """Tokens that are left of it."""
        return (self.tokens, self.lean_tokens, 0)[mark]


def count_message_tokens(message: Message) -> int:
    """About how many tokens a message has: a quarter of its characters, and its frame."""
    chars = _count_chars([value for key, value in message.items() if key != "role"])
    return -(-chars // CHARS_PER_TOKEN) + FRAME_TOKENS


@dataclass(frozen=True, slots=True)
class HistoryEditor:
    """Edits histories of more than ``budget_tokens`` down to ``target_tokens``, half of it unless told otherwise.

    An edit that would free fewer than ``at_least_tokens``, half of the way by default, is not made. It takes the
    reasoning of old assistant messages, then old tool results, then, with ``drop_turns``, old turns; the oldest first,
    and no more than needed. The system message, the first and the last turn of the user, and the last ``keep_results``
    tool results with their calls stay as they are; of the first and the last turn only rounds of tool calls are
    dropped. A call and its results go together. The budget is for messages: tool definitions are not counted.
    """

    budget_tokens: int = 32_000
    target_tokens: int = 0
    at_least_tokens: int = 0
    keep_results: int = 3
    clear_results: bool = True
    strip_reasoning: bool = True
    drop_turns: bool = False
    placeholder: str = PLACEHOLDER
    count: Callable[[Message], int] = count_message_tokens

    def __post_init__(self) -> None:
        target = self.target_tokens or self.budget_tokens // 2
        object.__setattr__(self, "target_tokens", target)
        object.__setattr__(self, "at_least_tokens", self.at_least_tokens or max(1, (self.budget_tokens - target) // 2))
        if not 0 < target < self.budget_tokens:
            what = f"target_tokens is {target} and budget_tokens {self.budget_tokens}"
            raise InputError(what, hint="the target lies above 0 and below the budget")
        for name in ("at_least_tokens", "keep_results"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}", hint="1 or more")

    def edit(self, messages: Sequence[Message], *, base: str = "", sent: int | None = None) -> EditedHistory:
        """The history as it is to be sent; ``messages`` are OpenAI's and stay as they are.

        ``base`` is the id of the request before this one, which had the first ``sent`` of these messages: all in front
        of the last answer unless told otherwise.
        """
        marks, edit, outcome, tokens = self.decide([self.read(one) for one in messages], base=base, sent=sent)
        return EditedHistory(self.apply(marks, messages), outcome, edit, tokens)

    def apply(self, marks: Sequence[Mark], messages: Sequence[Message]) -> list[Message]:
        """The messages as their marks want them."""
        kept = zip(marks, messages, strict=True)
        return [self.shorten(one) if mark is Mark.LEAN else one for mark, one in kept if mark is not Mark.DROPPED]

    def read(self, message: Message) -> MessageFacts:
        """The facts of a message."""
        role = _read_role(message)
        ids: set[str] = set()
        if role == "assistant":
            ids = {str(call.get("id")) for call in list_calls(message)}
            ids |= {str(block.get("id")) for block in _find_blocks(message, _CALL_BLOCKS)}
        elif role == "result":
            ids = {str(block.get("tool_use_id")) for block in _find_blocks(message, _RESULT_BLOCKS)}
            if message.get("tool_call_id") is not None:
                ids.add(str(message["tool_call_id"]))
        tokens, shorter = self.count(message), self.shorten(message)
        lean = tokens if shorter is message else min(tokens, self.count(shorter))
        return MessageFacts(role, tokens, lean, frozenset(ids))

    def shorten(self, message: Message) -> Message:
        """A result with its placeholder, an assistant's message without reasoning; the very same where nothing goes."""
        role = _read_role(message)
        if role == "assistant" and self.strip_reasoning:
            return without_reasoning(message)
        if role != "result" or not self.clear_results:
            return message
        if blocks := _find_blocks(message, _RESULT_BLOCKS):
            content = [one | {"content": self.placeholder} if one in blocks else one for one in message["content"]]
            return {**message, "content": content}
        return {**message, "content": self.placeholder}

    def decide(
        self, facts: Sequence[MessageFacts], *, base: str = "", sent: int | None = None
    ) -> tuple[list[Mark], HistoryEdit, EditOutcome, int]:
        """A mark for each message, what of it is new since the first ``sent`` messages, the outcome and the tokens.

        The budget is looked at behind every message, as if each were the end of a prompt. So whatever was sent, the
        edits made for it are made again here, before those that came later.
        """
        if sent is None:
            sent = max((at for at, one in enumerate(facts) if one.role == "assistant"), default=0)
        total, spare, marks, before = 0, 0, list[Mark](), list[Mark]()
        for end, one in enumerate(facts, 1):
            steps = self._count_steps(total)
            marks.append(Mark.KEPT)
            total += one.tokens
            spare += self._count_spare(one, Mark.KEPT)
            # A history that cannot be shortened enough is tried again when it has grown, not at every message; and not
            # at all while everything that may ever go, if none of it had to stay, would not pay for an edit.
            if self._count_steps(total) > max(steps, -1) and spare >= self.at_least_tokens:
                found = self._find_removals(facts[:end], marks, total)
                freed = sum(facts[at].count(marks[at]) - facts[at].count(mark) for at, mark in found.items())
                if freed >= self.at_least_tokens:
                    total -= freed
                    marks = [found.get(at, mark) for at, mark in enumerate(marks)]
                    spare = sum(map(self._count_spare, facts, marks))
            if end == sent:
                before = marks.copy()
        before += [Mark.KEPT] * (len(marks) - len(before))
        removals = tuple(_list_removals(facts, before, marks))
        over = EditOutcome.TOO_LITTLE if total > self.budget_tokens else EditOutcome.WITHIN_BUDGET
        return marks, HistoryEdit(removals, base), EditOutcome.EDITED if removals else over, total

    def _count_steps(self, total: int) -> int:
        """How often a history has grown by a quarter of what an edit must free, beyond its budget; below 0 within."""
        return (total - self.budget_tokens - 1) // max(1, self.at_least_tokens // 4)

    def _count_spare(self, one: MessageFacts, mark: Mark) -> int:
        """At most so many tokens can still go of a message."""
        return max(0, one.count(mark) - (0 if self.drop_turns else one.lean_tokens))

    def _find_removals(self, facts: Sequence[MessageFacts], marks: Sequence[Mark], total: int) -> dict[int, Mark]:
        """The messages that an edit would change, as few as bring the history to its target."""
        rounds = _find_rounds(facts)
        results = [at for at, one in enumerate(facts) if one.role == "result"]
        kept = {*results[-self.keep_results :], *rounds[-1]}
        free = [one for one in rounds if kept.isdisjoint(one)]
        talk = [[at] for one in free for at in one if facts[at].role == "assistant"]
        cleared = [[at] for at in results if at not in kept]
        found: dict[int, Mark] = {}
        dropped = _find_droppable(facts, rounds, kept) if self.drop_turns else ()
        units = [*((unit, Mark.LEAN) for unit in (*talk, *cleared)), *((unit, Mark.DROPPED) for unit in dropped)]
        for unit, mark in units:
            if total <= self.target_tokens:
                break
            for at in unit:
                now = found.get(at, marks[at])
                freed = facts[at].count(now) - facts[at].count(mark)
                if now < mark and (freed or mark is Mark.DROPPED):
                    found[at], total = mark, total - freed
        return found


def _find_rounds(facts: Sequence[MessageFacts]) -> list[range]:
    """Messages that stay together: an assistant's with the results behind it; any other is alone."""
    alone = ("system", "user")  # a result behind one of these has lost its call
    starts = [at for at, one in enumerate(facts) if one.role != "result" or at == 0 or facts[at - 1].role in alone]
    return [range(start, end) for start, end in pairwise([*starts, len(facts)])]


def _find_droppable(facts: Sequence[MessageFacts], rounds: Sequence[range], kept: set[int]) -> Iterator[list[int]]:
    """Old turns of the user, and rounds of tool calls where a turn has to stay; oldest first."""
    turns: list[list[range]] = [[]]
    for one in rounds:
        if facts[one[0]].role == "user":
            turns.append([])
        turns[-1].append(one)
    for number, turn in enumerate(turns):
        spoken = [one for one in turn if facts[one[0]].role != "system"]
        whole = [
            one for one in spoken
            if kept.isdisjoint(one) and facts[one[0]].role != "result"
            and facts[one[0]].ids == frozenset().union(*(facts[at].ids for at in one[1:]))
        ]  # fmt: skip
        if 1 < number < len(turns) - 1 and len(whole) == len(spoken):
            yield [at for one in spoken for at in one]
        else:
            yield from (list(one) for one in whole if len(one) > 1 and one != spoken[-1])


def _list_removals(facts: Sequence[MessageFacts], before: Sequence[Mark], after: Sequence[Mark]) -> list[Removal]:
    """What changed between two states, in places of the first, with neighbours in one range."""
    found: list[Removal] = []
    place = 0
    for one, old, new in zip(facts, before, after, strict=True):
        if new > old:
            what = Removed.RESULT if one.role == "result" else Removed.REASONING
            what = Removed.TURN if new is Mark.DROPPED else what
            start, freed = place, one.count(old) - one.count(new)
            if found and (found[-1].what, found[-1].end) == (what, place):
                start, freed = found[-1].start, freed + found.pop().tokens
            found.append(Removal(what, start, place + 1, freed))
        place += old is not Mark.DROPPED
    return found


def without_reasoning(message: Message) -> Message:
    """An assistant's message without what it thought; the very same where there is none, or nothing else."""
    short = {key: value for key, value in message.items() if key not in _REASONING_FIELDS}
    content = message.get("content")
    if isinstance(content, str) and content.lstrip().startswith(_THOUGHT[0]) and _THOUGHT[1] in content:
        short["content"] = content.split(_THOUGHT[1], 1)[1].lstrip()
    elif thoughts := _find_blocks(message, _REASONING_BLOCKS):
        short["content"] = [one for one in message["content"] if one not in thoughts]
    if short.get("content") is content and len(short) == len(message):
        return message
    return short if short.get("content") or short.get("tool_calls") else message


def _read_role(message: Message) -> str:
    role = ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
    if role is None:
        raise InputError("a message without a role that is known", hint="chat messages: " + ", ".join(ROLES))
    return "result" if role == "user" and _find_blocks(message, _RESULT_BLOCKS) else role


def list_calls(message: Message) -> list[Mapping[str, Any]]:
    """The tool calls of an assistant's message."""
    calls = message.get("tool_calls")
    return [one for one in calls if isinstance(one, Mapping)] if isinstance(calls, list) else []


def _find_blocks(message: Message, kinds: Sequence[str]) -> list[Mapping[str, Any]]:
    """The parts of a message's content that are of these types."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else ()
    return [one for one in blocks if isinstance(one, Mapping) and one.get("type") in kinds]


def _count_chars(value: Any) -> int:
    """Characters of all texts in a value; of a picture in a URL as many as its tokens may be worth."""
    if isinstance(value, str):
        return min(len(value), DATA_URL_CHARS) if value.startswith("data:") else len(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return sum(map(_count_chars, value)) if isinstance(value, list | tuple) else len(str(value))
