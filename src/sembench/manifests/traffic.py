"""Your own traffic as a manifest: a logged prompt is a recipient, earlier prompts that share text with it are donors.

The formats are those of `semblend.text.logs`: OpenAI requests, ShareGPT, and the request logs of vLLM and SGLang. Chat
messages and tools are kept as they were logged, so that a server's own template is applied to them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sembench.manifests.blocks import hash_content, hash_every_offset
from sembench.manifests.cases import Case, DonorPrompt, make_item_id
from sembench.manifests.datasets import write_document
from semblend.errors import InputError
from semblend.text.logs import LoggedPrompt, PromptLog
from semblend.text.tokenization import StableTokenizer

OWN_TRAFFIC = "own_traffic"
NEXT_TURN = "next_turn"
NEGATIVE = "negative_control"
RUN_TOKENS = 16
FEWEST_SHARED = 3
"""A donor shares at least so many places with a full block of 16 tokens: 18 tokens in a row."""
FEWEST_WORDS, MOST_WORDS = 40, 600
"""A made-up negative control is as long as the prompts of the log, within these bounds."""


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """How many donors a recipient gets at most, how many negative controls are added, how many prompts are read."""

    max_donors: int = 2
    negatives: int = 8
    max_prompts: int | None = None
    seed: int = 0


@dataclass
class TrafficBuilder:
    """Builds cases from logged prompts, and counts what it left out and why."""

    options: TrafficOptions = field(default_factory=TrafficOptions)
    left_out: Counter[str] = field(default_factory=Counter)

    def build_cases(self, prompts: Iterable[LoggedPrompt]) -> Iterator[Case]:
        """Yield a case for each prompt that shares text with an earlier one of its tenant, then negative controls."""
        index, kept = _SharedRuns(), []
        for prompt in prompts:
            if prompt.text is None:
                raise InputError(
                    f"line {prompt.line} holds token ids, not text", hint="log prompts as text or as chat messages"
                )
            kept.append(prompt)
            if self.options.max_prompts is not None and len(kept) > self.options.max_prompts:
                break
            found = index.find_donors(len(kept) - 1, prompt, self.options.max_donors)
            if found:
                yield _make_case(prompt, [kept[at] for at in found], number=len(kept))
            else:
                self.left_out["shares nothing with an earlier prompt of its tenant"] += 1
        if not kept:
            raise InputError("the log holds no prompt", hint="docs/guides/benchmark.md lists the formats")
        yield from self._build_negatives(kept, index)

    def _build_negatives(self, kept: Sequence[LoggedPrompt], index: _SharedRuns) -> Iterator[Case]:
        """Yield prompts that share nothing with any other, beside an unrelated donor; made-up ones where they lack."""
        drawn = random.Random(self.options.seed)
        lonely = [at for at in range(len(kept)) if index.count_partners(at) == 0]
        drawn.shuffle(lonely)
        lengths = sorted(len((prompt.text or "").split()) for prompt in kept)
        words = min(max(lengths[len(lengths) // 2], FEWEST_WORDS), MOST_WORDS)
        for number in range(self.options.negatives):
            donor = kept[drawn.randrange(len(kept))]
            if number < len(lonely):
                prompt = kept[lonely[number]]
                others = [one for one in kept if one is not prompt]
                if not others:
                    continue
                donor = others[drawn.randrange(len(others))]
                yield _make_case(prompt, [donor], negative=True, number=lonely[number])
            else:
                text = write_document(f"negative:{self.options.seed}:{number}", words).context
                made = LoggedPrompt(line=0, text=f"{text}\n\nWhat is this text about?", tenant=donor.tenant)
                yield _make_case(made, [donor], negative=True, number=number)


class _SharedRuns:
    """Which earlier prompts share runs of tokens with a prompt, by the built-in tokenizer and no planner under test."""

    def __init__(self) -> None:
        self._tokenizer = StableTokenizer()
        self._owners: dict[int, list[int]] = {}
        self._partners: Counter[int] = Counter()
        self._tenants: list[str] = []

    def find_donors(self, at: int, prompt: LoggedPrompt, most: int) -> list[int]:
        """Return the earlier prompts of the same tenant that share most with this one, and remember this one."""
        tokens = self._tokenizer.encode(prompt.text or "")
        shared: Counter[int] = Counter()
        for value in set(hash_every_offset(tokens, RUN_TOKENS).tolist()):
            shared.update(self._owners.get(value, ()))
        for other, count in shared.items():
            if count >= FEWEST_SHARED:
                self._partners[other] += 1
                self._partners[at] += 1
        own = [
            (count, other)
            for other, count in shared.items()
            if count >= FEWEST_SHARED and self._tenants[other] == prompt.tenant
        ]
        for value in set(hash_content(tokens, RUN_TOKENS).tolist()):
            self._owners.setdefault(value, []).append(at)
        self._tenants.append(prompt.tenant)
        return sorted(other for _, other in sorted(own, reverse=True)[:most])

    def count_partners(self, at: int) -> int:
        return self._partners[at]


def _make_case(
    prompt: LoggedPrompt, donors: Sequence[LoggedPrompt], *, negative: bool = False, number: int = 0
) -> Case:
    text = prompt.text or ""
    name = make_item_id("jsonl", prompt.line, number, text[:4000], len(text), negative)
    continues = any(_is_earlier_turn(donor, prompt) for donor in donors)
    return Case(
        item_id=name,
        dataset="jsonl",
        source_id=(prompt.request_id or f"line-{prompt.line}") if prompt.line else f"made-{number}",
        transform=NEGATIVE if negative else NEXT_TURN if continues else OWN_TRAFFIC,
        donor_prompts=tuple(
            DonorPrompt(f"line-{donor.line}-{len(donor.text or '')}", donor.text or "", metadata=_keep_chat(donor))
            for donor in donors
        ),
        recipient_prompt=text,
        input=text[-400:],
        negative_control=negative,
        metadata={
            **_keep_chat(prompt),
            **({"tenant": prompt.tenant} if prompt.tenant else {}),
            **({"logged_answer": prompt.answer} if prompt.answer else {}),
            "traffic_class": "own",
        },
    )


def _keep_chat(prompt: LoggedPrompt) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if prompt.messages:
        found["messages"] = [dict(message) for message in prompt.messages]
    if prompt.tools:
        found["tools"] = list(prompt.tools)
    return found


def _is_earlier_turn(donor: LoggedPrompt, prompt: LoggedPrompt) -> bool:
    count = len(donor.messages)
    return 0 < count < len(prompt.messages) and list(prompt.messages[:count]) == list(donor.messages)


def read_traffic(paths: Sequence[str], log_format: str = "auto", *, skip_bad: bool = False) -> Iterator[LoggedPrompt]:
    """Yield the prompts of logs, file by file, in their order."""
    for path in paths:
        log = PromptLog(path, format=log_format, skip_bad=skip_bad)
        count = 0
        for prompt in log:
            count += 1
            yield prompt
        if log.found_format == "trace":
            raise InputError(f"{path} is a trace without text", hint="play it with sembench run-load --trace")
        if not count:
            raise InputError(f"{path} holds no prompt", hint=log.hint)


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One request of a conversation: its messages, the gap before it in the log (seconds), its answer's length."""

    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    gap_s: float | None = None
    at_s: float | None = None


def group_conversations(prompts: Iterable[LoggedPrompt]) -> list[tuple[ConversationTurn, ...]]:
    """Group prompts into conversations, in the order of their first turns.

    A chat prompt continues the conversation whose last messages it begins with. A prompt of text is one by itself.
    """
    grouped: list[list[ConversationTurn]] = []
    waiting: dict[str, int] = {}
    for prompt in prompts:
        at_s = _read_seconds(prompt.timestamp)
        keys = [repr([dict(message) for message in prompt.messages[:cut]]) for cut in range(len(prompt.messages) + 1)]
        at = next((waiting.pop(key) for key in reversed(keys[1:-1]) if key in waiting), None)
        if at is None:
            grouped.append([])
            at = len(grouped) - 1
        before = grouped[at][-1].at_s if grouped[at] else None
        gap = None if before is None or at_s is None else max(at_s - before, 0.0)
        grouped[at].append(ConversationTurn(prompt.text or "", tuple(prompt.messages), tuple(prompt.tools), gap, at_s))
        if prompt.messages:
            waiting[keys[-1]] = at
    return [tuple(turns) for turns in grouped]


def _read_seconds(stamp: float | str | None) -> float | None:
    """Return a logged time in seconds; numbers above the year 5000 are milliseconds."""
    if isinstance(stamp, str):
        from datetime import datetime

        try:
            return datetime.fromisoformat(stamp).timestamp()
        except ValueError:
            return None
    if stamp is None or isinstance(stamp, bool):
        return None
    return stamp / 1000 if stamp > 1e11 else float(stamp)
