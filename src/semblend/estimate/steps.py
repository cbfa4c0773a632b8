"""Steps that change prompts before they are sent. Each takes the parts of a prompt and gives them back in another form.

They are cheap to adopt in this order: the first three need a change of a template or a client, `ArrangePassages` needs
callers who say that their passages commute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from semblend.arrange import Arranger, OrderLimits, VolatileField, arrange_parts, replace_repeats
from semblend.arrange.hygiene import WINDOW_CHARS, cut_fields
from semblend.arrange.marks import MAX_MARKED, PassageMark, find_groups
from semblend.arrange.order_limits import FREE
from semblend.arrange.repeats import TEMPLATE_BY_START
from semblend.prompt import NO_NAMESPACE, Namespace
from semblend.text.parts import Part, join_parts

Parts = tuple[Part, ...]


class Step(ABC):
    """One change of a prompt. ``name`` is its key in reports."""

    name = ""

    @abstractmethod
    def apply(self, parts: Parts, namespace: Namespace, keep: OrderLimits = FREE, /) -> Parts:
        """The prompt as it would be sent; the very same object where nothing changes. ``keep`` is the request's."""

    def scale(self, factor: int, /) -> Step:  # noqa: ARG002  (memory is no matter to most steps)
        """The same step, with nothing remembered, beside so many times the memory; itself where memory is no matter."""
        return self


@dataclass(frozen=True)
class MoveFields(Step):
    """Volatile fields of the front go to the end of the prompt."""

    fields: tuple[VolatileField, ...]
    name = "fields"

    def apply(self, parts: Parts, _: Namespace, __: OrderLimits = FREE) -> Parts:
        if not self.fields:
            return parts
        kept: list[Part] = []
        moved: list[str] = []
        at = chars = 0
        while at < len(parts) and chars < WINDOW_CHARS:
            run = self._find_run(parts, at, chars)
            text = join_parts(run)
            # A field without text before it is one at the very beginning of a prompt.
            left, found = cut_fields(text, [one for one in self.fields if one.before or at == 0]) if run else ("", [])
            kept += [Part(left)] if found else run or parts[at : at + 1]
            moved += found
            at, chars = at + max(1, len(run)), chars + len(text or parts[at].text)
        return (*kept, *parts[at:], Part("\n" + "\n".join(moved))) if moved else parts

    def moves(self, parts: Parts) -> bool:
        """Whether a prompt has one of the fields at a place that it can leave."""
        return self.apply(parts, NO_NAMESPACE) is not parts

    def _find_run(self, parts: Parts, at: int, chars: int) -> list[Part]:
        """Texts from here on, one behind the other, as far as fields are looked for."""
        run: list[Part] = []
        for part in parts[at:]:
            if part.kind != "text" or part.token_ids is not None or chars >= WINDOW_CHARS:
                break
            run.append(part)
            chars += len(part.text)
        return run


class SortTools(Step):
    """Tool definitions stand in the order of their text, whatever order the client had them in."""

    name = "tools"

    def apply(self, parts: Parts, _: Namespace, __: OrderLimits = FREE) -> Parts:
        places = [at for at, part in enumerate(parts) if part.kind == "tool"]
        tools = [parts[at] for at in places]
        ordered = sorted(tools, key=lambda tool: tool.text)
        return parts if ordered == tools else put_at(parts, places, ordered)


class DropRepeats(Step):
    """A passage or a tool result that already stands in the same prompt becomes a reference (`replace_repeats`)."""

    name = "repeats"

    def apply(self, parts: Parts, _: Namespace, __: OrderLimits = FREE) -> Parts:
        places = [at for at, part in enumerate(parts) if part.kind in ("passage", "result")]
        chars = {parts[at].text: parts[at].chars for at in places}
        if len(chars) == len(places):
            return parts
        # The next step may move the passage that a reference means, so it is named by its first words.
        found = replace_repeats(
            [[parts[at].text for at in places]], template=TEMPLATE_BY_START, count=chars.__getitem__
        )
        if not found.references:
            return parts
        replaced = [places[one.index] for one in found.references]
        return put_at(parts, replaced, [Part(found.turns[0][one.index]) for one in found.references])


class ArrangePassages(Step):
    """Passages of one group stand in the order in which earlier prompts had them, as `semblend serve` would put them.

    ``cache_tokens`` is the size of the exact prefix cache, which the arranger is told as a server's is.
    """

    name = "arrange"

    def __init__(self, cache_tokens: int) -> None:
        self._cache_tokens = cache_tokens
        self._chars: dict[str, int] = {}
        self._arranger = Arranger.for_cache(cache_tokens, count=self._chars.__getitem__)

    def scale(self, factor: int) -> ArrangePassages:
        return ArrangePassages(self._cache_tokens * factor)

    def apply(self, parts: Parts, namespace: Namespace, keep: OrderLimits = FREE) -> Parts:
        marks = [PassageMark(part.group, part.score) if part.kind == "passage" else None for part in parts]
        groups = [group for group in find_groups(0, marks) if len(group.places) <= MAX_MARKED]
        if not groups:
            return parts
        self._chars.clear()
        self._chars.update((part.text, part.chars) for part in parts if part.kind == "passage")
        if not any(part.marked for part in parts):
            keep = FREE  # a request without marks says nothing about them
        # The whole prompt is one message here: groups are of one message already.
        texts = [("", [part.text for part in parts])]
        found = arrange_parts(self._arranger, texts, groups, namespace=namespace, keep=keep)
        arranged = parts
        for group, one, sent in zip(groups, found.groups, found.sent, strict=True):
            self._arranger.record(sent)
            if any(place != index for place, index in enumerate(one.order)):
                arranged = put_at(arranged, group.places, [parts[group.places[index]] for index in one.order])
        return arranged


def put_at(parts: Parts, places: Sequence[int], chosen: Sequence[Part]) -> Parts:
    """The parts with ``chosen`` at ``places``."""
    found = list(parts)
    for at, part in zip(places, chosen, strict=True):
        found[at] = part
    return tuple(found)
