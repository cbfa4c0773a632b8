"""Steps that change prompts before they are sent. Each takes the parts of a prompt and gives them back in another form.

They are cheap to adopt in this order: the first three need a change of a template or a client, `ArrangePassages` needs
callers who say that their passages commute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from semblend.arrange import Arranger, VolatileField
from semblend.arrange.volatile import WINDOW_CHARS, cut_fields
from semblend.prompt import Namespace
from semblend.text.parts import Part, join_parts

REFERENCE = "[The same text stands above.]"
LEAST_REPEAT_CHARS = 200
LEAST_REPEAT_TOKENS = 48
MOST_ARRANGED = 512
"""A longer list stays as it is: arranging takes time that grows with its square."""
Parts = tuple[Part, ...]


class Step(Protocol):
    """One change of a prompt. ``name`` is its key in reports."""

    @property
    def name(self) -> str: ...

    def apply(self, parts: Parts, namespace: Namespace, /) -> Parts:
        """The prompt as it would be sent; the very same object where nothing changes."""


@dataclass(frozen=True, slots=True)
class MoveFields:
    """Volatile fields of the front go to the end of the prompt."""

    fields: tuple[VolatileField, ...]
    name: str = "fields"

    def apply(self, parts: Parts, _: Namespace) -> Parts:
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

    def _find_run(self, parts: Parts, at: int, chars: int) -> list[Part]:
        """Texts from here on, one behind the other, as far as fields are looked for."""
        run: list[Part] = []
        for part in parts[at:]:
            if part.kind != "text" or part.token_ids is not None or chars >= WINDOW_CHARS:
                break
            run.append(part)
            chars += len(part.text)
        return run


@dataclass(frozen=True, slots=True)
class SortTools:
    """Tool definitions stand in the order of their text, whatever order the client had them in."""

    name: str = "tools"

    def apply(self, parts: Parts, _: Namespace) -> Parts:
        places = [at for at, part in enumerate(parts) if part.kind == "tool"]
        tools = [parts[at] for at in places]
        ordered = sorted(tools, key=lambda tool: tool.text)
        return parts if ordered == tools else put_at(parts, places, ordered)


@dataclass(frozen=True, slots=True)
class DropRepeats:
    """A passage or a tool result that already stands in the same prompt becomes a reference to it."""

    name: str = "repeats"

    def apply(self, parts: Parts, _: Namespace) -> Parts:
        seen: set[str] = set()
        found: list[Part] = []
        for part in parts:
            if part.kind in ("passage", "result") and _is_long(part):
                if part.text in seen:
                    found.append(Part(REFERENCE))
                    continue
                seen.add(part.text)
            found.append(part)
        return parts if len(seen) == sum(_can_repeat(part) for part in parts) else tuple(found)


def _can_repeat(part: Part) -> bool:
    return part.kind in ("passage", "result") and _is_long(part)


def _is_long(part: Part) -> bool:
    if part.token_ids is not None:
        return len(part.token_ids) >= LEAST_REPEAT_TOKENS
    return len(part.text) >= LEAST_REPEAT_CHARS


@dataclass(frozen=True, slots=True)
class ArrangePassages:
    """Passages of one group stand in the order in which earlier prompts had them."""

    arranger: Arranger = field(default_factory=Arranger)
    name: str = "arrange"

    def apply(self, parts: Parts, namespace: Namespace) -> Parts:
        groups: dict[str, list[int]] = {}
        for at, part in enumerate(parts):
            if part.kind == "passage":
                groups.setdefault(part.group, []).append(at)
        arranged = parts
        for places in groups.values():
            if 1 < len(places) <= MOST_ARRANGED:
                arranged = self._arrange(arranged, places, namespace)
        return arranged

    def _arrange(self, parts: Parts, places: list[int], namespace: Namespace) -> Parts:
        passages = [parts[at] for at in places]
        found = self.arranger.arrange(
            [part.text for part in passages], namespace=namespace, before=join_parts(parts[: places[0]])
        )
        self.arranger.record(found)
        if found.order == tuple(range(len(passages))):
            return parts
        return put_at(parts, places, [passages[index] for index in found.order])


def put_at(parts: Parts, places: Sequence[int], chosen: Sequence[Part]) -> Parts:
    """The parts with ``chosen`` at ``places``."""
    found = list(parts)
    for at, part in zip(places, chosen, strict=True):
        found[at] = part
    return tuple(found)
