"""What an engine says, piece by piece, and what the pieces add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from semblend.arrange import ArrangedGroup
from semblend.confirm.receipt import JsonObject, Receipt

IMPOSSIBLE = -9999.0
MAX_RUNS = 2048
"""A prompt whose recomputed tokens lie in more runs than this says only how many they are."""

CALLER_FIELDS = (
    "outcome", "mode", "exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens", "risk", "escalations",
    "ttft_ms", "reason", "detail",
)  # fmt: skip

Runs = tuple[tuple[int, int], ...]


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """A drawn token and, in ``top``, the likeliest ones at its place (each without a ``top`` of its own)."""

    token: str
    token_id: int
    logprob: float
    top: tuple[Logprob, ...] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.logprob):  # JSON has no infinity; this number is what OpenAI writes for it
            object.__setattr__(self, "logprob", IMPOSSIBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next piece of answer ``index`` to a request, as an engine emits it. ``finish_reason`` ends that answer.

    The receipt comes with the first token; ``recomputed`` comes with it: the runs ``[start, end)`` of the prompt that a
    donor held and that were computed again, where the engine knows them. ``matched`` is the stop string or the token
    that ended the answer. ``detail`` says why an answer was cancelled or failed; it is for the server's log.
    """

    request_id: str = ""
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    receipt: Receipt | None = None
    recomputed: Runs = ()
    detail: str = ""


@dataclass(slots=True)
class Answer:
    """One of the n texts, as far as it has come."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    receipt: Receipt | None = None

    def add(self, chunk: Chunk) -> None:
        self.receipt = chunk.receipt or self.receipt
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason, self.matched = chunk.finish_reason, chunk.matched


@dataclass(frozen=True, slots=True)
class Head:
    """What every reply opens with."""

    id: str
    created: int
    model: str

    def write_body(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        """A reply of OpenAI's object ``kind`` with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request took: tokens in and out, and the engine's receipt (None where it gave none).

    A request of several prompts has one of these in ``parts`` for each. ``operator`` says that whoever asked may see
    donors and places. ``arranged`` are the orders of passages that were used.
    """

    prompt_tokens: int
    completion_tokens: int
    receipt: Receipt | None
    seconds: float = 0.0
    recomputed: Runs = ()
    parts: tuple[Spent, ...] = ()
    operator: bool = False
    arranged: tuple[ArrangedGroup, ...] = ()

    @classmethod
    def add_up(cls, parts: Sequence[Spent]) -> Spent:
        """The sum over several prompts.

        >>> Spent.add_up([Spent(10, 2, None), Spent(5, 1, None)]).usage()["total_tokens"]
        18
        """
        return cls(
            sum(part.prompt_tokens for part in parts),
            sum(part.completion_tokens for part in parts),
            None,
            max(part.seconds for part in parts),
            parts=tuple(parts),
        )

    @property
    def cached_tokens(self) -> int:
        """Tokens that were not computed: exact prefix hits and donor KV that was moved."""
        if self.parts:
            return sum(part.cached_tokens for part in self.parts)
        return 0 if self.receipt is None else self.receipt.exact_tokens + self.receipt.reused_tokens

    def usage(self) -> JsonObject:
        """OpenAI's usage object.

        >>> Spent(10, 2, None).usage()["total_tokens"]
        12
        """
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def semblend(self) -> JsonObject | list[Any] | None:
        """The receipt's short form that goes with every answer; a list of them for several prompts."""
        if self.parts:
            return [part.semblend() for part in self.parts]
        if self.receipt is None:
            return None
        shown = describe_receipt(self.receipt, self.recomputed, operator=self.operator)
        return shown | {"arranged": [group.to_dict() for group in self.arranged]} if self.arranged else shown


def describe_receipt(receipt: Receipt, recomputed: Runs = (), *, operator: bool = False) -> JsonObject:
    """The receipt as an answer shows it: counts, outcome, reason, risk and times.

    Only an ``operator`` also sees the donors, the places in ``recomputed`` and the reason's own words: they would tell
    one caller which text stands in another caller's prompt. ``recomputed`` is null where the places are not known,
    which is not the same as none.
    """
    record = receipt.to_dict() if operator else receipt.to_caller_dict()
    shown = {name: record[name] for name in CALLER_FIELDS}
    if not operator:
        return shown
    told = len(recomputed) <= MAX_RUNS and sum(end - start for start, end in recomputed) == receipt.recomputed_tokens
    runs = [list(run) for run in recomputed] if told else None
    return shown | {"recomputed": runs, "donors": list(receipt.donor_ids)}


@dataclass(frozen=True, slots=True)
class OpenAiReply:
    """What chat and completions have in common: a body, or events of the same form, around choices of their own.

    A reply says the same thing whole, or as a stream: an opening ahead of the first piece, pieces (``answer`` already
    holds the chunk), and a closing with finish reasons, then usage if asked for. Its last event carries ``semblend``.
    """

    head: Head
    logprobs: bool = False
    include_usage: bool = False
    whole_kind: ClassVar[str]
    event_kind: ClassVar[str]

    def write_choice(self, answer: Answer) -> JsonObject:
        """The whole answer as a choice."""
        raise NotImplementedError

    def write_end(self, answer: Answer) -> JsonObject:
        """The choice that ends a stream's answer."""
        raise NotImplementedError

    def write_whole(self, answers: Sequence[Answer], spent: Spent) -> JsonObject:
        body = self.head.write_body(self.whole_kind, [self.write_choice(answer) for answer in answers])
        return body | {"usage": spent.usage(), "semblend": spent.semblend()}

    def write_opening(self, n: int) -> list[JsonObject]:
        del n
        return []

    def write_closing(self, answers: Sequence[Answer], spent: Spent) -> list[JsonObject]:
        events = [self.write_event(self.write_end(answer)) for answer in answers]
        if self.include_usage:
            events.append(self.head.write_body(self.event_kind, []) | {"usage": spent.usage()})
        events[-1]["semblend"] = spent.semblend()
        return events

    def write_event(self, choice: JsonObject) -> JsonObject:
        body = self.head.write_body(self.event_kind, [choice])
        return body | {"usage": None} if self.include_usage else body
