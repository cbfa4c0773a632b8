"""Prompt hygiene: which volatile fields in front of long shared text break the prefix, and what moving them gains.

Each prompt is compared with a neighbour: the recent prompt that has most pieces of text in common with it. Where both
differ for a short stretch and then go on alike for long, a volatile field stands. A second pass replays the prompts
through an exact prefix cache, as they are and with the fields moved to the end, and counts. Memory is bounded: some
hundred neighbours, some thousand candidate fields, and the keys of the caches.
"""

from __future__ import annotations

import heapq
import re
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from semblend.arrange.arranger import CHARS_PER_TOKEN
from semblend.errors import InputError

WINDOW_CHARS = 8_192
"""Fields are looked for in so many characters at the beginning of a prompt."""
MAX_FIELD_CHARS = 256
LONGEST_LINE_CHARS = 200
"""A line up to this length moves as a whole; of a longer one only the value does."""
_MARK = "(see the end)"
HEAD_CHARS = 2 * WINDOW_CHARS
NEIGHBOURS = 256
ANCHOR_CHARS = 32
MAX_ANCHORS = 64
"""As many pieces as a head of prose has; with a sample of 32, 1.5 % of the samples missed a field of 24 prompts."""
FEW_ANCHORS = 8
MAX_HOLDERS = 8
MIN_BEHIND_CHARS = 512
"""A field counts where at least so much text behind it is the same: about a hundred tokens."""
MAX_CANDIDATES = 4_096
MAX_FIELDS = 8
MIN_PROMPTS = 3
BLOCK_CHARS = 128
"""About two of an engine's blocks of sixteen tokens."""
MAX_BLOCKS = 400_000
NEARLY_ALL = 0.95
_LABEL = re.compile(r"((?:[A-Za-z][\w-]* ){0,2}[A-Za-z][\w.-]*)[\"'*]*(?:\s*[:=]| is\b)[^:=\n]{0,24}\Z")
_BREAKS = " \t\r\n\"'<>()[]{}=,;|"
_KINDS = (
    ("id", re.compile(r"(?i)[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}|[0-9a-f]{12,}")),
    ("date", re.compile(r"(?i)\d{4}-\d\d|\d\d?[./]\d\d?[./]\d{2,4}|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b")),
    ("date", re.compile(r"(?i)\b(?:january|february|march|april|may|june|july|august|september|october|november)\b")),
    ("date", re.compile(r"(?i)\bdecember\b")),
    ("time", re.compile(r"\d\d?:\d\d")),
    ("number", re.compile(r"\A[\d.,-]*\d\Z")),
)


@dataclass(frozen=True, slots=True)
class VolatileField:
    """A place in front of long shared text where prompts differ: a date, an id, a name.

    ``before`` and ``after`` are the texts that stand around the value (digits in them stand for any digits; an empty
    ``before`` is the beginning of the prompt). ``offset_chars`` is where the value usually begins, ``prompts`` how many
    hold it, ``values`` some of its values. ``gain_tokens`` are the tokens of all prompts that an exact prefix cache
    would hit in addition, once this field and those in front of it in the result stood at the end.
    """

    name: str
    before: str
    after: str
    offset_chars: int
    prompts: int
    values: tuple[str, ...]
    gain_tokens: int = 0
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        start = _write_pattern(self.before) if self.before else r"\A"
        end = _write_pattern(self.after) if self.after else r"\Z"
        object.__setattr__(self, "_pattern", re.compile(f"{start}(.{{1,{MAX_FIELD_CHARS}}}?){end}", re.DOTALL))

    def find(self, prompt: str) -> tuple[int, int] | None:
        """Where the value stands in a prompt, half-open; None where it does not.

        >>> found = VolatileField("date", "Today is ", ".", 9, 2, ("Monday", "Friday"))
        >>> found.find("Today is Sunday. Be kind.")
        (9, 15)
        """
        match = self._pattern.search(prompt, 0, WINDOW_CHARS + MAX_FIELD_CHARS)
        return None if match is None else match.span(1)


def move_to_end(prompt: str, fields: Sequence[VolatileField]) -> str:
    """The prompt with its volatile fields behind everything else; the same prompt where it has none of them.

    A short line moves as it is. From a long line the value moves, and a mark points to the end.

    >>> date = VolatileField("date", "Date: ", "\\nYou", 6, 2, ("Monday", "Friday"))
    >>> move_to_end("Date: Sunday\\nYou are kind.", [date])
    'You are kind.\\nDate: Sunday'
    """
    kept, moved = cut_fields(prompt, fields)
    return "\n".join([kept, *moved])


def cut_fields(prompt: str, fields: Sequence[VolatileField]) -> tuple[str, list[str]]:
    """The prompt without its volatile fields, and what `move_to_end` puts behind it, line by line."""
    cuts: list[tuple[int, int, str]] = []  # start, end, mark
    moved: list[str] = []
    for one in fields:
        found = one.find(prompt)
        if found is None:
            continue
        start, end = found
        line_start = prompt.rfind("\n", 0, start) + 1
        line_end = prompt.find("\n", end)
        if line_end >= 0 and line_end - line_start <= LONGEST_LINE_CHARS:
            cut = (line_start, line_end + 1, "")
        else:
            cut = (start, end, _MARK)
        if any(cut[0] < other[1] and other[0] < cut[1] for other in cuts):
            continue  # it moves with its line, or would cut into what moves already
        cuts.append(cut)
        text = prompt[cut[0] : cut[1]].rstrip("\n")
        moved.append(text if not cut[2] else f"{one.name}: {text}")
    kept, at = [], 0
    for start, end, mark in sorted(cuts):
        kept += [prompt[at:start], mark]
        at = end
    kept.append(prompt[at:])
    return "".join(kept), moved


def _write_pattern(text: str) -> str:
    """Digits as a whole run, never a part of one: a prompt of digits alone must not cost a search its square."""
    return r"(?<!\d)\d++".join(re.escape(part) for part in re.split(r"\d+", text))


@dataclass(slots=True)
class _Candidate:
    before: str
    after: str
    name: str
    prompts: int = 0
    behind_chars: int = 0
    offsets: list[int] = field(default_factory=list)
    values: dict[str, None] = field(default_factory=dict)


def find_volatile_fields(
    prompts: Iterable[str],
    *,
    most_fields: int = MAX_FIELDS,
    least_prompts: int = MIN_PROMPTS,
    chars_per_token: float = CHARS_PER_TOKEN,
) -> tuple[VolatileField, ...]:
    """Volatile fields of a log's prompts, from the front to the back, with the gain of moving each.

    ``prompts`` are read twice, in the order in which they were sent: a list, or an object whose ``iter`` begins anew.
    The gains are replayed one after the other, so they add up. Fields without a gain are left out.
    """
    if isinstance(prompts, (str, bytes)) or iter(prompts) is prompts:
        raise InputError("the prompts are read twice", hint="pass a list, or an object that can be iterated again")
    candidates = _collect(prompts)
    likely = [one for one in candidates if one.prompts >= least_prompts and len(one.values) > 1]
    likely = sorted(likely, key=lambda one: -one.behind_chars)[:most_fields]
    fields = sorted((_describe(one) for one in likely), key=lambda one: (one.offset_chars, one.before))
    measured = _measure_gains(prompts, fields, chars_per_token)
    useful = tuple(one for one in measured if one.gain_tokens > 0)
    if 0 < len(useful) < len(measured):
        # A field without a gain of its own may stand in front of one that has: then both must move.
        again = _measure_gains(prompts, useful, chars_per_token)
        if _sum_gains(again) >= NEARLY_ALL * _sum_gains(measured):
            return again
        return measured
    return useful


def _collect(prompts: Iterable[str]) -> list[_Candidate]:
    neighbours = _Neighbours()
    candidates: dict[tuple[str, str], _Candidate] = {}
    for prompt in prompts:
        head = prompt[:HEAD_CHARS]
        other = neighbours.exchange(head)
        if other is not None:
            for start, end, behind in _find_differences(head, other):
                _note_candidate(candidates, head, start, end, behind)
        if len(candidates) > MAX_CANDIDATES:
            rare = sorted(candidates, key=lambda key: candidates[key].behind_chars)
            for key in rare[: MAX_CANDIDATES // 2]:
                del candidates[key]
    return list(candidates.values())


class _Neighbours:
    """The latest prompts, found by pieces of text that follow a line's end or a sentence's."""

    def __init__(self) -> None:
        self._heads: OrderedDict[int, tuple[str, tuple[int, ...]]] = OrderedDict()
        self._holders: dict[int, deque[int]] = {}
        self._next = 0

    def exchange(self, head: str) -> str | None:
        """The one that shares most pieces, the latest of equals; then the head is remembered, too."""
        anchors = _find_anchors(head)
        shared: Counter[int] = Counter()
        for anchor in anchors:
            shared.update(self._holders.get(anchor, ()))
        known = [number for number in shared if number in self._heads]
        best = max(known, key=lambda one: (shared[one], one), default=None)
        other = None if best is None else self._heads[best][0]
        self._add(head, anchors)
        return other

    def _add(self, head: str, anchors: tuple[int, ...]) -> None:
        self._heads[self._next] = (head, anchors)
        for anchor in anchors:
            self._holders.setdefault(anchor, deque(maxlen=MAX_HOLDERS)).append(self._next)
        self._next += 1
        if len(self._heads) > NEIGHBOURS:
            number, (_, gone) = self._heads.popitem(last=False)
            for anchor in gone:
                if anchor in self._holders and self._holders[anchor][-1] <= number:
                    del self._holders[anchor]


def _find_anchors(head: str) -> tuple[int, ...]:
    """Hashes of the beginnings of long lines and sentences; of runs of words where there are few of those."""
    pieces = head.replace(". ", "\n").split("\n")
    starts = {_hash_text(piece[:ANCHOR_CHARS]) for piece in pieces if len(piece) >= ANCHOR_CHARS}
    if len(starts) < FEW_ANCHORS:
        words = head.split()
        starts |= {_hash_text(" ".join(words[at : at + 6])) for at in range(len(words) - 5)}
    # The lowest hashes: the same ones in every prompt that has them.
    return tuple(heapq.nsmallest(MAX_ANCHORS, starts))


def _hash_text(text: str) -> int:
    """The same in every process, unlike `hash`: which pieces are the lowest decides what is found."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _find_differences(one: str, other: str) -> Iterator[tuple[int, int, int]]:
    """Short stretches of ``one`` that differ from ``other``, with the shared characters behind each until the next."""
    at = there = _common(one, 0, other, 0)
    while at < min(len(one), WINDOW_CHARS) and there < len(other):
        met = _meet_again(one, at, other, there)
        if met is None:
            return
        end, other_end = met
        behind = _common(one, end, other, other_end)
        if behind >= MIN_BEHIND_CHARS:
            start = _widen_left(one, at)
            for first, last in _split_lines(one, start, end, other[there - (at - start) : other_end]):
                yield first, last, behind
        at, there = end + behind, other_end + behind


def _split_lines(one: str, start: int, end: int, other: str) -> Iterator[tuple[int, int]]:
    """A difference over several lines as one for each line that differs: a date above a name is two fields."""
    mine, theirs = one[start:end].split("\n"), other.split("\n")
    if len(mine) != len(theirs):
        yield start, end
        return
    for line, another in zip(mine, theirs, strict=True):
        if line != another and line and another:
            same = _common(line, 0, another, 0)
            back = _common(line[same:][::-1], 0, another[same:][::-1], 0)
            yield _widen_left(one, start + same), start + _widen_right(line, len(line) - back)
        start += len(line) + 1


def _common(one: str, at: int, other: str, there: int) -> int:
    """How many characters are the same from here on."""
    low, high = 0, min(len(one) - at, len(other) - there)
    step = 64
    while low < high:
        take = min(step, high - low)
        if one[at + low : at + low + take] == other[there + low : there + low + take]:
            low += take
            step *= 2
        elif take == 1:
            return low
        else:
            high = low + take - 1
            step = max(take // 2, 1)
    return low


def _meet_again(one: str, at: int, other: str, there: int) -> tuple[int, int] | None:
    """Where both go on alike, at the end of a word, within the length of a field."""
    window = other[there : there + MAX_FIELD_CHARS + ANCHOR_CHARS]
    for end in range(at, min(at + MAX_FIELD_CHARS, len(one) - ANCHOR_CHARS) + 1):
        if one[end] not in _BREAKS and not (end == at and at and one[at - 1] in _BREAKS):
            continue
        found = window.find(one[end : end + ANCHOR_CHARS])
        if 0 <= found <= MAX_FIELD_CHARS:
            return end, there + found
    return None


def _widen_left(text: str, at: int) -> int:
    """To the beginning of the word, and over words in front of it that hold digits: a date goes with its time."""
    while at and text[at - 1] not in _BREAKS:
        at -= 1
    while at > 1 and text[at - 1] == " ":
        word = max(text.rfind(mark, 0, at - 1) for mark in _BREAKS) + 1
        if not any(char.isdigit() for char in text[word : at - 1]):
            break
        at = word
    return at


def _widen_right(text: str, at: int) -> int:
    while at < len(text) and text[at] not in _BREAKS:
        at += 1
    return at


def _note_candidate(
    candidates: dict[tuple[str, str], _Candidate], head: str, start: int, end: int, behind: int
) -> None:
    """A place where neighbours differ: one prompt more of a field that stands so."""
    while end - 1 > start and head[end - 1] in ".,;:!?":
        end -= 1
    line = head.rfind("\n", 0, max(start - 1, 0)) + 1
    before, after, value = head[max(line, start - 40) : start], head[end : end + 24], head[start:end]
    one = candidates.setdefault((_hide_digits(before), after[:1]), _Candidate(before, after, _name(before, value)))
    one.after = one.after[: _common(one.after, 0, after, 0)]
    one.prompts += 1
    one.behind_chars += behind
    if len(one.offsets) < 64:
        one.offsets.append(start)
    if len(one.values) < 3:
        one.values[value] = None


def _hide_digits(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def _name(before: str, value: str) -> str:
    """What the field is, from the label in front of it, else from its shape."""
    label = _LABEL.search(before)
    if label:
        return label.group(1).lower()
    return next((kind for kind, pattern in _KINDS if pattern.search(value)), "text")


def _describe(one: _Candidate) -> VolatileField:
    offset = sorted(one.offsets)[len(one.offsets) // 2]
    return VolatileField(one.name, one.before, one.after, offset, one.prompts, tuple(one.values))


def _sum_gains(fields: Iterable[VolatileField]) -> int:
    return sum(one.gain_tokens for one in fields)


def _measure_gains(
    prompts: Iterable[str], fields: Sequence[VolatileField], chars_per_token: float
) -> tuple[VolatileField, ...]:
    """The fields with the prompts that hold each, and what each gains behind those in front of it."""
    arms = [_PrefixCache() for _ in range(len(fields) + 1)]
    served, holding = [0] * len(arms), [0] * len(arms)
    for prompt in prompts if fields else ():
        keys = _chain(prompt)
        served[0] += arms[0].serve(keys)
        for number, one in enumerate(fields, start=1):
            if one.find(prompt) is not None:
                holding[number] += 1
                keys = _chain(move_to_end(prompt, fields[:number]))
            served[number] += arms[number].serve(keys)
    gains = [int((served[at + 1] - served[at]) / chars_per_token) for at in range(len(fields))]
    return tuple(
        replace(one, gain_tokens=gain, prompts=held) for one, gain, held in zip(fields, gains, holding[1:], strict=True)
    )


def _chain(prompt: str) -> list[int]:
    """Keys of a prompt's whole blocks; each stands for all text up to its end."""
    key, keys = 0, []
    for start in range(0, len(prompt) - BLOCK_CHARS + 1, BLOCK_CHARS):
        key = hash((key, prompt[start : start + BLOCK_CHARS]))
        keys.append(key)
    return keys


class _PrefixCache:
    """Keys of blocks in two generations: when the young one is full, it becomes the old one."""

    def __init__(self) -> None:
        self._young: dict[int, None] = {}
        self._old: dict[int, None] = {}

    def serve(self, keys: Sequence[int]) -> int:
        """Characters of a prompt that are held; then it is held as a whole."""
        held = next((at for at, key in enumerate(keys) if key not in self._young and key not in self._old), len(keys))
        self._young.update(dict.fromkeys(keys))
        if len(self._young) > MAX_BLOCKS // 2:
            self._old, self._young = self._young, {}
        return held * BLOCK_CHARS
