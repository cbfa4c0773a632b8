"""What the edits of agents' histories cost on a log, and what they would cost if they were made in batches.

A prompt edits its history where it leaves its conversation's last prompt before its end, and goes on with messages of
it: tool results became placeholders, turns are gone, a summary stands in place of both. What a prefix cache would have
hit of them without the edit is its cost. A conversation is found by the messages that it shares, in its namespace.

The counterfactual sends the whole history, as far as the log shows it, edited by `HistoryEditor`'s rule. Its budget is
given, or the longest prompt of the log before the conversation's first edit.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from semblend.arrange.history import ROLES, HistoryEditor, Message, MessageFacts, list_calls
from semblend.estimate.prefix_cache import KeyArray, PrefixCache
from semblend.prompt import Namespace, TokenArray
from semblend.text.logs import LoggedPrompt

MAX_BYTES = 64_000_000
"""Of messages that are remembered; then the conversations that rested longest are forgotten."""
MESSAGE_BYTES = 400
RECENT = 4  # messages of a prompt's end
SYSTEM = ("system", "developer")
Sent = tuple[TokenArray, KeyArray, int]
Encode = Callable[[Sequence[Message], LoggedPrompt, Namespace], Sent]
Keys = tuple[str, ...]
"""A message's digest, and the ids of its calls or of the call that it answers: those outlive an edit."""


@dataclass(slots=True, eq=False)
class _Conversation:
    """All that was said, and the last prompt, as keys. ``indexed`` are the digests by which it can be found."""

    messages: list[Message] = field(default_factory=list)
    keys: list[Keys] = field(default_factory=list)
    last: Sequence[Keys] = ()
    facts: list[MessageFacts] = field(default_factory=list)
    editor: HistoryEditor | None = None
    indexed: set[tuple[Namespace, str]] = field(default_factory=set)
    size: int = 0

    def find_places(self, keys: Sequence[Keys]) -> list[int | None]:
        """Where the messages of a prompt stand in all that was said, in order; None for new ones."""
        known: dict[str, list[int]] = {}
        for at, names in enumerate(self.keys):
            for name in names:
                known.setdefault(name, []).append(at)
        places: list[int | None] = []
        start = 0
        for names in keys:
            places.append(min((at for name in names for at in known.get(name, ()) if at >= start), default=None))
            start = start if places[-1] is None else places[-1] + 1
        return places


class HistoryEdits:
    """Counts edits, prompt by prompt. ``encode`` makes tokens and block keys of a chat, ``count`` counts a message."""

    def __init__(
        self, encode: Encode, count: Callable[[Message], int], cache_tokens: int, block_tokens: int, budget_tokens: int
    ) -> None:
        self._encode, self._count, self._block_tokens, self._budget = encode, count, block_tokens, budget_tokens
        self._cache = PrefixCache([max(1, cache_tokens // block_tokens)])
        self._held: OrderedDict[_Conversation, None] = OrderedDict()
        self._index: dict[tuple[Namespace, str], _Conversation] = {}
        self._size = self._longest = self._edits = self._conversations = self._batched = 0
        self._tokens: Counter[str] = Counter()
        self._dearest: dict[str, Any] = {}

    def add(self, logged: LoggedPrompt, namespace: Namespace, sent: Sent, hit: int, saved: Mapping[str, int]) -> int:
        """Count a prompt of which ``hit`` tokens were cached; returns the tokens that its edit cost, 0 for none.

        ``saved`` are the tokens of it that reuse at any offset does not compute, by mode.
        """
        cost, sent_so = 0, sent
        if logged.messages and all(one.get("role") in ROLES for one in logged.messages):
            talk, cost = self._follow(logged, namespace, sent, hit)
            if cost:
                self._tokens.update(cost=cost, **{name: max(0, min(cost, tokens)) for name, tokens in saved.items()})
            if talk.editor is not None:
                talk.facts += [talk.editor.read(one) for one in talk.messages[len(talk.facts) :]]
                marks, edit, _, _ = talk.editor.decide(talk.facts)
                self._batched += bool(edit.removals)
                sent_so = self._encode(talk.editor.apply(marks, talk.messages), logged, namespace)
        self._longest = max(self._longest, len(sent[0]))
        again = len(sent_so[0]) - self._cache.replay(sent_so[1], sent_so[2])[0] * self._block_tokens
        self._tokens["batches"] += len(sent[0]) - hit - again
        return cost

    def to_dict(self) -> dict[str, Any]:
        """How many edits in how many conversations, what they cost, and what would save how many tokens."""
        tokens = {name: count for name, count in self._tokens.items() if count} if self._edits else {}
        told = {"edits": self._edits, "conversations": self._conversations, "edits_in_batches": self._batched}
        return told | {"tokens": tokens, "dearest": self._dearest}

    def _follow(self, logged: LoggedPrompt, namespace: Namespace, sent: Sent, hit: int) -> tuple[_Conversation, int]:
        """The conversation that a prompt goes on with, grown by what is new in it, and what the prompt's edit cost."""
        messages = logged.messages
        keys, sizes = zip(*map(_read_keys, messages), strict=True)
        talk = self._find(namespace, keys, sizes)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(keys, talk.last, strict=False)))
        start, cost = shared, 0
        if shared < len(talk.last):
            places = talk.find_places(keys)
            earlier = set(talk.last)
            kept = [at for at in range(shared, len(keys)) if places[at] is not None and keys[at] in earlier]
            still = {name for at in range(shared, len(keys)) if places[at] is not None for name in keys[at]}
            recent = [not still.isdisjoint(names) for names in talk.last[shared:][-RECENT:]]
            if 2 * sum(recent) < len(recent):
                kept = []  # an edit keeps most of what was said last; another run of the same task does not
            rules = next((at for at, one in enumerate(messages) if one.get("role") not in SYSTEM), 0)
            if kept and shared >= rules:
                cost = self._measure(messages, shared, kept, sent, hit)
            elif 2 * sum(sizes[rules:shared]) >= sum(sizes[rules:]):
                places = places[:shared]  # it was answered anew from there
            else:
                talk, places = _Conversation(), []
            known = [(place, at) for at, place in enumerate(places) if place is not None]
            last, start = (known[-1][0] + 1, known[-1][1] + 1) if known else (0, 0)
            del talk.messages[last:], talk.keys[last:], talk.facts[last:]
        if cost:
            self._edits += 1
            if cost > self._dearest.get("tokens", 0):
                changed = len(talk.last) - shared - len(kept)
                self._dearest = {"line": logged.line, "tokens": cost, "messages": changed}
            if talk.editor is None:
                self._conversations += 1
                talk.editor = HistoryEditor(max(2, self._budget or self._longest), drop_turns=True, count=self._count)
        talk.messages += messages[start:]
        talk.keys += keys[start:]
        talk.last = keys
        said = zip(messages[start:], keys[start:], strict=True)
        names = [(namespace, name) for message, (name, *_) in said if message.get("role") not in SYSTEM]
        self._hold(talk, names, sum(sizes[start:]))
        return talk, cost

    def _find(self, namespace: Namespace, keys: Sequence[Keys], sizes: Sequence[int]) -> _Conversation:
        """The conversation that holds most of a prompt, beside its instructions; a new one where there is none."""
        votes: Counter[_Conversation] = Counter()
        for (name, *_), size in zip(keys, sizes, strict=True):
            if (talk := self._index.get((namespace, name))) is not None:
                votes[talk] += size
        return votes.most_common(1)[0][0] if votes else _Conversation()

    def _measure(self, messages: Sequence[Message], shared: int, kept: Sequence[int], sent: Sent, hit: int) -> int:
        """Of the tokens of kept messages behind an edit, those that were computed; none where a cache had evicted."""
        sizes = {at: self._count(messages[at]) for at in range(shared, len(messages))}
        held = sum(sizes[at] for at in kept)
        before = len(sent[0]) - sum(sizes.values())
        if hit + 2 * self._block_tokens < before:
            return 0
        return max(0, min(held, before + held - hit))

    def _hold(self, talk: _Conversation, names: Sequence[tuple[Namespace, str]], size: int) -> None:
        """Remember a conversation by names, and forget those that rested longest where there is too much of them."""
        self._index.update(dict.fromkeys(names, talk))
        talk.indexed.update(names)
        talk.size += size
        self._size += size
        self._held[talk] = None
        self._held.move_to_end(talk)
        while self._size > MAX_BYTES:
            old, _ = self._held.popitem(last=False)
            self._size -= old.size
            for place in old.indexed:
                if self._index.get(place) is old:
                    del self._index[place]


def _read_keys(message: Message) -> tuple[Keys, int]:
    """A message's keys, and about how many bytes it takes."""
    raw = json.dumps(message, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    ids = [str(call.get("id")) for call in list_calls(message)]
    if message.get("tool_call_id") is not None:
        ids = [f"result {message['tool_call_id']}"]
    return (hashlib.blake2b(raw, digest_size=16).hexdigest(), *ids), len(raw) + MESSAGE_BYTES
