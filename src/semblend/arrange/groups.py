"""Groups of passages in the messages of a chat: which parts commute, and the messages in their new order.

A group belongs to one message: nothing moves from a system message to a user's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from semblend.arrange.arranger import Arrangement, Arranger
from semblend.arrange.marks import MARK, PassageGroup, PassageMark, find_groups, read_mark
from semblend.arrange.order_limits import FREE, OrderLimits
from semblend.errors import InputError
from semblend.prompt import Namespace


@dataclass(frozen=True, slots=True)
class ArrangedGroup:
    """The order that was used: ``order[i]`` is the number, as given, of the passage at place i of its group."""

    message: int
    name: str
    order: tuple[int, ...]

    def to_dict(self) -> dict[str, object]:
        """As an answer shows it."""
        return {"message": self.message, "group": self.name, "order": list(self.order)}


@dataclass(frozen=True, slots=True)
class ArrangedParts:
    """The parts of messages in their new order; ``sent`` goes to `Arranger.record` once they were sent."""

    parts: dict[int, tuple[str, ...]]
    groups: tuple[ArrangedGroup, ...]
    sent: tuple[Arrangement, ...]


@dataclass(frozen=True, slots=True)
class ArrangedMessages:
    """OpenAI messages in their new order and without marks, to be sent as usual."""

    messages: list[dict[str, object]]
    groups: tuple[ArrangedGroup, ...]
    sent: tuple[Arrangement, ...]


def arrange_messages(
    arranger: Arranger,
    messages: Sequence[Mapping[str, object]],
    *,
    namespace: Namespace | None = None,
    keep: OrderLimits = FREE,
) -> ArrangedMessages:
    """Arrange the marked parts of OpenAI messages on the client, for any server with a prefix cache.

    A part is marked as for a server: ``"semblend": {"commutes": "a group's name"}``, with a ``score`` if you like.
    Record each of ``sent`` when they were sent.

    >>> parts = [{"type": "text", "text": text, "semblend": {"commutes": "docs"}} for text in ("a", "b")]
    >>> found = arrange_messages(Arranger(), [{"role": "user", "content": parts}])
    >>> found.messages[0]["content"][0], found.groups[0].order
    ({'type': 'text', 'text': 'a'}, (0, 1))
    """
    texts: list[tuple[str, Sequence[str]]] = []
    groups: list[PassageGroup] = []
    for number, message in enumerate(messages):
        parts = _list_parts(number, message)
        texts.append((str(message.get("role", "")), [str(part.get("text", part)) for part in parts]))
        groups += find_groups(number, [_read_mark(number, place, part) for place, part in enumerate(parts)], keep)
    found = arrange_parts(arranger, texts, groups, namespace=namespace, keep=keep)
    changed = [_write(message, found.parts.get(number)) for number, message in enumerate(messages)]
    return ArrangedMessages(changed, found.groups, found.sent)


def arrange_parts(
    arranger: Arranger,
    texts: Sequence[tuple[str, Sequence[str]]],
    groups: Sequence[PassageGroup],
    *,
    namespace: Namespace | None = None,
    keep: OrderLimits = FREE,
) -> ArrangedParts:
    """Arrange groups, front to back; ``texts`` are the role and the parts of each message."""
    parts = {group.message: tuple(texts[group.message][1]) for group in groups}
    told: list[ArrangedGroup] = []
    sent: list[Arrangement] = []
    front = _Front(texts)
    for group in groups:
        here = parts[group.message]
        passages = [here[place] for place in group.places]
        before = front.digest(group, parts)
        found = arranger.arrange(passages, namespace=namespace, before=before, keep=keep, scores=group.scores)
        placed = list(here)
        for place, index in zip(group.places, found.order, strict=True):
            placed[place] = passages[index]
        parts[group.message] = tuple(placed)
        told.append(ArrangedGroup(group.message, group.name, found.order))
        sent.append(found)
    return ArrangedParts(parts, tuple(told), tuple(sent))


class _Front:
    """A digest of all that stands in front of a group, group after group: each message is read once."""

    def __init__(self, texts: Sequence[tuple[str, Sequence[str]]]) -> None:
        self._texts = texts
        self._state = hashlib.blake2b(digest_size=16)
        self._next = 0

    def digest(self, group: PassageGroup, parts: Mapping[int, tuple[str, ...]]) -> str:
        while self._next < group.message:
            role, texts = self._texts[self._next]
            _add(self._state, role, *parts.get(self._next, texts))
            self._next += 1
        state = self._state.copy()
        _add(state, self._texts[group.message][0], *parts[group.message][: group.places[0]])
        return state.hexdigest()


def _add(state: hashlib.blake2b, *texts: str) -> None:
    state.update(len(texts).to_bytes(8, "little"))
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        state.update(len(raw).to_bytes(8, "little") + raw)


def _list_parts(number: int, message: Mapping[str, object]) -> list[Mapping[str, object]]:
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return [{"text": content if isinstance(content, str) else repr(content)}]
    if not all(isinstance(part, Mapping) for part in content):
        raise InputError(f"messages[{number}].content holds something that is no part", hint='{"text": "..."}')
    return list(content)


def _read_mark(number: int, place: int, part: Mapping[str, object]) -> PassageMark | None:
    where = f"messages[{number}].content[{place}]"
    try:
        mark = read_mark(part.get(MARK))
    except InputError as error:
        raise InputError(f"{where}: {error.message}", hint=error.hint) from None
    if mark is not None and not isinstance(part.get("text"), str):
        raise InputError(f"{where} has a mark and no text", hint="mark parts of type text")
    return mark


def _write(message: Mapping[str, object], texts: Sequence[str] | None) -> dict[str, object]:
    content = message.get("content")
    if texts is None or not isinstance(content, (list, tuple)):
        return dict(message)
    parts = [
        {name: value for name, value in part.items() if name != MARK} | ({"text": text} if "text" in part else {})
        for part, text in zip(content, texts, strict=True)
    ]
    return dict(message) | {"content": parts}
