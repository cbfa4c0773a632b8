"""Passages that a request marks as commuting, put in the order that the chosen replica has seen.

The marks are those of `semblend serve`: ``"semblend": {"commutes": "docs"}`` on a part of a message, or a list under
``semblend.passages``. A request without a mark is not touched. With one, the passages are recognised wherever they
stand, the replica that has most of them is chosen, and its order makes them a prefix there: so they count for engines
that reuse beginnings only as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semantickv.routing.prompt_view import LONG_TEXT, PromptPart, PromptView
from semblend.arrange import ArrangedGroup, Arrangement, Arranger, OrderLimits, arrange_messages
from semblend.arrange.marks import MARK, find_listed_place, read_request
from semblend.prompt import Namespace

_CONSUMED = ("passages", "scores", "keep")
"""What the router does itself; the rest under ``semblend`` is the engine's."""


@dataclass(frozen=True, slots=True)
class ArrangedRequest:
    """A request for one replica: its fields without marks, the order of every group, and what the arranger records."""

    fields: dict[str, Any]
    groups: tuple[ArrangedGroup, ...]
    sent: tuple[Arrangement, ...]

    def list_parts(self) -> tuple[PromptPart, ...]:
        """The parts of the prompt in the order in which they are sent, one for each passage."""
        return tuple(list_passage_parts(self.fields["messages"]))


@dataclass(frozen=True, slots=True)
class MarkedRequest:
    """A chat with marked passages. ``moves`` is false where the caller wants no reuse: then the order stays."""

    fields: Mapping[str, Any]
    messages: tuple[dict[str, Any], ...]
    keep: OrderLimits
    moves: bool

    def list_parts(self) -> tuple[PromptPart, ...]:
        """The parts of the prompt as the client sent it, one for each passage."""
        return tuple(list_passage_parts(self.messages))

    def arrange(self, arranger: Arranger, namespace: Namespace) -> ArrangedRequest:
        """Put the passages in the order that ``arranger`` has seen, as far as the caller allows."""
        # A new arranger knows no order, so it changes none.
        found = arrange_messages(
            arranger if self.moves else Arranger(), self.messages, namespace=namespace, keep=self.keep
        )
        own = {name: value for name, value in (self.fields.get(MARK) or {}).items() if name not in _CONSUMED}
        fields = {name: value for name, value in self.fields.items() if name != MARK} | {"messages": found.messages}
        return ArrangedRequest(fields | ({MARK: own} if own else {}), found.groups, found.sent if self.moves else ())


def read_marked(view: PromptView) -> MarkedRequest | None:
    """Read the marks of a request; None where it has none. `InputError` for marks that cannot be read.

    >>> read_marked(PromptView({"messages": [{"role": "user", "content": "Hi"}]})) is None
    True
    """
    messages = view.fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return None
    own = view.fields.get(MARK)
    is_listed = isinstance(own, Mapping) and own.get("passages") is not None
    if not is_listed and not any(map(_has_mark, messages)):
        return None
    marks = read_request(own)
    if marks.passages:
        place = find_listed_place([message.get("role") for message in messages])
        listed = [
            {"type": "text", "text": text, MARK: _write_mark(mark.group, mark.score)}
            for text, mark in zip(marks.passages, marks.listed, strict=True)
        ]
        content = messages[place].get("content")
        rest = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        messages = [*messages]
        messages[place] = messages[place] | {"content": [*listed, *rest]}
    arrange_messages(Arranger(), messages, keep=marks.keep)  # refuses what cannot be read, before a place is chosen
    return MarkedRequest(view.fields, tuple(messages), marks.keep, marks.reuse)


def write_order(groups: Sequence[ArrangedGroup], most_bytes: int = 4096) -> bytes:
    """The order of every group for a header; empty where it would be too long for one."""
    text = json.dumps([group.to_dict() for group in groups], separators=(",", ":")).encode()
    return text if len(text) <= most_bytes else b""


def list_passage_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[PromptPart]:
    """Every part of every message by itself: a passage is cut alike wherever it stands."""
    for message in messages:
        role, content = str(message.get("role", "")), message.get("content")
        texts = [one.get("text") for one in content] if isinstance(content, list) else [content]
        kind = {"system": "system", "developer": "system", "assistant": "assistant", "tool": "tool_output"}.get(role)
        yield PromptPart(kind or "user", f"{role}\n".encode("utf-8", "surrogatepass"))
        for text in texts:
            if isinstance(text, str):
                data = (text + "\n").encode("utf-8", "surrogatepass")
                yield PromptPart(kind or ("retrieved_context" if len(text) >= LONG_TEXT else "user"), data)


def _has_mark(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(one, Mapping) and MARK in one for one in content)


def _write_mark(group: str, score: float | None) -> dict[str, Any]:
    return {"commutes": group} if score is None else {"commutes": group, "score": score}
