"""Requests with passages that commute: put in an order that earlier ones had, before they are tokenized."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from semblend.arrange import ArrangedGroup, Arrangement, Arranger, arrange_parts
from semblend.prompt import Namespace
from semblend.wire.chat import ChatRequest, join_parts

MAX_FOLLOWED = 200_000
"""Passages of requests whose donors are followed; older ones are forgotten by the arranger's own bound."""


@dataclass(frozen=True, slots=True)
class ArrangedChat:
    """A chat in its new order. ``sent`` goes to `PromptArranger.record` once the engine has the request."""

    asked: ChatRequest
    groups: tuple[ArrangedGroup, ...] = ()
    sent: tuple[Arrangement, ...] = ()


@dataclass(slots=True)
class PromptArranger:
    """The arranger of a server, and which donor came from which order. Safe for threads."""

    arranger: Arranger
    _donors: OrderedDict[str, tuple[Arrangement, ...]] = field(default_factory=OrderedDict)
    _followed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrange(self, asked: ChatRequest, namespace: Namespace) -> ArrangedChat:
        """The chat with its marked passages in place; as it is where it has no marks or wants no reuse."""
        if not asked.groups or not asked.reuse.reuse:
            return ArrangedChat(asked)
        known = dict(asked.parts)
        texts = [
            (message["role"], known.get(number, (message["content"],))) for number, message in enumerate(asked.messages)
        ]
        found = arrange_parts(self.arranger, texts, asked.groups, namespace=namespace, keep=asked.reuse.keep)
        messages = list(asked.messages)
        for number, parts in found.parts.items():
            messages[number] = messages[number] | {"content": join_parts(parts)}
        arranged = replace(asked, messages=tuple(messages), parts=tuple(found.parts.items()))
        return ArrangedChat(arranged, found.groups, found.sent)

    def record(self, request_id: str, sent: Sequence[Arrangement]) -> None:
        """The engine has the request in this order."""
        for arrangement in sent:
            self.arranger.record(arrangement)
        if sent:
            with self._lock:
                self._donors[request_id] = tuple(sent)
                self._followed += _count_passages(sent)
                while self._followed > MAX_FOLLOWED:
                    self._followed -= _count_passages(self._donors.popitem(last=False)[1])

    def forget(self, donor_id: str) -> None:
        """The engine has evicted a donor: the order in which it was sent is no longer worth meeting."""
        with self._lock:
            sent = self._donors.pop(donor_id.removesuffix("-0"), ())  # the first of several answers
            self._followed -= _count_passages(sent)
        for arrangement in sent:
            self.arranger.forget_sent(arrangement)

    def clear(self) -> None:
        """The engine has forgotten everything."""
        with self._lock:
            self._donors.clear()
            self._followed = 0
        self.arranger.clear()


def _count_passages(sent: Sequence[Arrangement]) -> int:
    return sum(len(arrangement.keys) for arrangement in sent)
