"""The parts of a prompt: running text, tool definitions, passages, tool results. Joined they are the prompt.

An estimate moves parts around and counts; nobody else needs them. Passages come from marks where a request has them
(`semblend.arrange.marks`, as for a server), otherwise from the splitter below, which knows a few common ways to write a
list of passages:

============================================  ==================================================================
written as                                    passage
============================================  ==================================================================
``Document 3: …``, ``[3] …``, ``### Doc 3``   the text behind the number, until the next number; of the last one
                                              until a blank line
``Passage: …``, ``### Source``, ``Title: …``  the same, where such a label or heading comes again
``---`` or ``***`` on lines of their own      the text between two of them
``<document …>…</document>`` and the like     the text between the tags; of other tags where one comes again and again
three or more text parts in one message       all but the last
blocks of a trace                             those of type retrieved_context or legal_evidence
============================================  ==================================================================

Numbers, labels and tags stay at their places when passages move. What speaks (User:, <assistant>) is no passage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from semblend.arrange.arranger import CHARS_PER_TOKEN
from semblend.arrange.marks import LISTED, MAX_MARKED
from semblend.prompt import TokenArray

PartKind = Literal["text", "tool", "passage", "result", "omitted"]
Splitter = Literal["auto", "marked", "paragraphs", "none"]
SPLITTERS: tuple[Splitter, ...] = ("auto", "marked", "paragraphs", "none")
TURN = "turn"
"""Group of the text between two turns of a chat: turns stay parts of their own, because they come again as they are."""
MIN_PASSAGE_CHARS = 40
MIN_PARAGRAPH_CHARS = 200
_WORDS = "document|passage|source|context|doc|chunk|snippet|result|reference|article|example|evidence"
_HEADER = re.compile(
    rf"^[ \t]*(?:#{{1,4}} |\*\*)?(?:(?:{_WORDS})[ \t]*[#(\[]{{0,2}}\d{{1,4}}[)\]]{{0,2}}|\[\d{{1,4}}\])"
    r"[ \t]*(?:[:.)-]|\*\*){0,2}[ \t]*\n?",
    re.MULTILINE | re.IGNORECASE,
)
_LABEL = re.compile(
    r"^[ \t]*(?:\*\*)?([A-Z][A-Za-z]{1,23}(?: [A-Za-z]{1,23}){0,2}):(?:\*\*)?[ \t]*\n?|^#{1,6} ([^\n]{1,80})\n|"
    r"^[ \t]*([-*_=])\3{2,}[ \t]*\n",
    re.MULTILINE,
)
_SPOKEN = re.compile(
    r"\b(?:user|assistant|human|ai|system|bot|agent|customer|client|operator|speaker|question|answer|query|response|"
    r"thought|thinking|action|observation|input|output|step|turn|message|instructions?|tool|function|[qa])\b"
)
"""Labels and tags of turns: what stands behind them has an order of its own."""
_MARKUP = re.compile(r"(?:p|li|[uo]l|div|span|t[dhr]|table|[abi]|em|strong|br|h\d|code|pre|html|body)$")
_TAG = re.compile(r"<(/?)([A-Za-z][\w.-]{0,40})\b[^<>]{0,200}>[ \t]*\n?")
_KNOWN = re.compile(rf"\b(?:{_WORDS})$")
_COMMON = re.compile(
    rf"\b(?:{_WORDS}|title|text|content|excerpt|paragraph|fragment|page|file|entry|record|fact|abstract)$"
)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt. Parts with equal ``text`` are equal.

    ``group``: passages and tools of one group may change places. ``marked``: the caller said so, with the ``score`` of
    its mark; if not, we assume it. ``token_ids`` are set where a log holds tokens or block ids; ``text`` is then only a
    name.
    """

    text: str
    kind: PartKind = "text"
    group: str = ""
    marked: bool = False
    score: float | None = None
    token_ids: TokenArray | None = field(default=None, compare=False, repr=False)

    @property
    def chars(self) -> int:
        """Its length; that of tokens as if they were English."""
        return len(self.text) if self.token_ids is None else len(self.token_ids) * CHARS_PER_TOKEN


def join_parts(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts)


def merge_texts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The same parts, with neighbouring texts in one; a text of the group `TURN` begins a new one.

    >>> [part.text for part in merge_texts([Part("a"), Part("b"), Part("c", "tool"), Part("")])]
    ['ab', 'c']
    """
    merged: list[Part] = []
    texts: list[str] = []

    def close() -> None:
        if any(texts):
            merged.append(Part("".join(texts)))
        texts.clear()

    for part in parts:
        if part.kind == "text" and part.token_ids is None:
            if part.group == TURN:
                close()
            texts.append(part.text)
        else:
            close()
            merged.append(part)
    close()
    return tuple(merged)


def split_parts(parts: Sequence[Part], splitter: Splitter) -> tuple[Part, ...]:
    """The parts with the passages of their texts apart. Where one is marked, nothing else is taken for a passage."""
    marked = any(part.marked for part in parts)
    if splitter == "none" or ((splitter == "marked" or marked) and not marked):
        return merge_texts(_unmark(part) for part in parts)
    if marked:
        return merge_texts(part if part.marked else _unmark(part) for part in parts)
    split: list[Part] = []
    for number, part in enumerate(parts):
        if part.kind == "text" and part.token_ids is None and part.group != TURN:
            find = _find_paragraphs if splitter == "paragraphs" else _find_passages
            split.extend(_cut(part.text, find(part.text), f"text {number}"))
        else:
            split.append(part)
    return merge_texts(split)


def _unmark(part: Part) -> Part:
    if part.kind != "passage" or part.token_ids is not None:
        return part
    return replace(part, kind="text", group="", score=None)


def mark_texts(parts: Sequence[Part], passages: Sequence[str]) -> tuple[Part, ...]:
    """The parts of a plain prompt with each of ``passages`` apart and marked, where it stands; of many the first.

    A server takes a list of passages with chats only, so this is for people who annotate a log of plain prompts.
    """
    passages = passages[:MAX_MARKED]
    found: list[Part] = []
    for part in parts:
        if part.kind != "text" or part.token_ids is not None:
            found.append(part)
            continue
        spans, at = [], 0
        for start, end in sorted(_find_literals(part.text, passages)):
            if start >= at:
                spans.append((start, end, 0))
                at = end
        found.extend(replace(one, marked=one.kind == "passage") for one in _cut(part.text, spans, LISTED))
    return tuple(found)


def _find_literals(text: str, passages: Sequence[str]) -> Iterator[tuple[int, int]]:
    for passage in passages:
        start = text.find(passage) if passage else -1
        if start >= 0:
            yield start, start + len(passage)


def _cut(text: str, passages: Iterable[tuple[int, int, int]], group: str) -> Iterator[Part]:
    """Text and passages in turn; each passage is (start, end, number of its run). A run of one cannot change places."""
    found = list(passages)
    lengths: dict[int, int] = {}
    for _, _, run in found:
        lengths[run] = lengths.get(run, 0) + 1
    at = 0
    for start, end, run in found:
        if lengths[run] < 2:
            continue
        yield Part(text[at:start])
        yield Part(text[start:end], "passage", f"{group}, list {run}")
        at = end
    yield Part(text[at:])


def _find_passages(text: str) -> Iterator[tuple[int, int, int]]:
    for find in (_find_tagged, _find_numbered, _find_labelled):
        found = list(find(text))
        if len(found) > 1:
            break
    return iter(found)


def _find_numbered(text: str) -> Iterator[tuple[int, int, int]]:
    return _find_behind([match.span() for match in _HEADER.finditer(text)], text)


def _find_labelled(text: str) -> Iterator[tuple[int, int, int]]:
    """Texts behind one label or heading that comes twice (three times, where many things are called so), or a rule."""
    places: dict[str, list[tuple[int, int]]] = {}
    for match in _LABEL.finditer(text):
        places.setdefault((match[1] or match[2] or match[3]).strip().lower(), []).append(match.span())
    often = {
        name: found
        for name, found in places.items()
        if len(found) >= (2 if _KNOWN.search(name) else 3) and (len(name) == 1 or _COMMON.search(name))
    }
    if not often:
        return iter(())
    name = max(often, key=lambda one: (bool(_KNOWN.search(one)), len(often[one])))
    headers = often[name]
    if len(name) > 1:
        return _find_behind(headers, text)
    between = [one for one in _find_behind(headers, text) if one[0] < headers[-1][0]]  # the last one ends the list
    # Rules between sections that have headings of their own divide one text, as models like to write.
    return (
        iter(())
        if any(text[start : start + 80].lstrip()[:1] in ("#", "*") for start, _, _ in between)
        else iter(between)
    )


def _find_behind(headers: Sequence[tuple[int, int]], text: str) -> Iterator[tuple[int, int, int]]:
    """The texts behind headers, each until the next one; of the last one until a blank line."""
    for number, (_, start) in enumerate(headers):
        if number + 1 < len(headers):
            end = headers[number + 1][0]
        else:
            blank = _BLANK_LINE.search(text, start)
            end = blank.start() if blank else len(text)
        end = start + len(text[start:end].rstrip())
        if end - start >= MIN_PASSAGE_CHARS:
            yield start, end, 0


def _find_tagged(text: str) -> Iterator[tuple[int, int, int]]:
    """Texts between a tag and its end, of tags that come again; text between two of them begins a new run."""
    counts = Counter(match[2].lower() for match in _TAG.finditer(text) if not match[1])
    opened: tuple[str, int, int] | None = None  # tag, its start, start of the body
    last, run = None, 0
    for match in _TAG.finditer(text):
        closing, name = match.group(1), match.group(2).lower()
        if counts[name] < 2 or _MARKUP.match(name) or _SPOKEN.search(name.replace("_", " ")):
            continue
        if not closing and opened is None:
            opened = (name, match.start(), match.end())
        elif closing and opened is not None and opened[0] == name:
            start, end = opened[2], opened[2] + len(text[opened[2] : match.start()].rstrip())
            if last is not None and text[last : opened[1]].strip():
                run += 1
            if end - start >= MIN_PASSAGE_CHARS:
                yield start, end, run
            last, opened = match.end(), None


def _find_paragraphs(text: str) -> Iterator[tuple[int, int, int]]:
    """Long paragraphs; a short one ends the run."""
    run, at = 0, 0
    for end in [*(match.start() for match in _BLANK_LINE.finditer(text)), len(text)]:
        start = at + len(text[at:end]) - len(text[at:end].lstrip())
        if end - start >= MIN_PARAGRAPH_CHARS:
            yield start, start + len(text[start:end].rstrip()), run
        elif text[start:end].strip():
            run += 1
        at = end
