"""`Arranger`: remembers in which order passages were sent, and finds an order that meets it again."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from semblend.arrange.memory import Sent, SequenceMemory
from semblend.arrange.order_limits import FREE, OrderLimits, PlacementCheck, measure_displaced
from semblend.arrange.repeats import find_repeats
from semblend.arrange.search import find_longest_path, order_rest
from semblend.arrange.sequence_file import SequenceFile
from semblend.errors import InputError
from semblend.prompt import NO_NAMESPACE, Namespace, Prompt

MAX_PASSAGES = 200_000
CHARS_PER_TOKEN = 4
"""Characters of a token of English, about: a cache's size is told in tokens, passages are counted in characters."""
Passage = str | Prompt


@dataclass(frozen=True, slots=True)
class Expected:
    """Sizes of passages, in the arranger's unit: in an exact prefix, in an earlier prompt at any place, in none."""

    exact: int
    elsewhere: int
    unseen: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """``order[i]`` is the index of the passage at place i.

    ``repeats`` are pairs ``(index, earlier index)`` of passages that are there twice. ``keys`` and ``root`` are what
    `Arranger.record` remembers: the passages in their new order, and what stands before them in which namespace.
    """

    order: tuple[int, ...]
    repeats: tuple[tuple[int, int], ...]
    expected: Expected
    owner: bytes
    scope: bytes
    root: bytes
    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]

    def to_sent(self) -> Sent:
        """What is remembered of a prompt in this order."""
        return Sent(self.owner, self.scope, self.root, self.keys, self.sizes)


class Arranger:
    """Orders of passages by namespace. Thread-safe; `arrange` changes nothing.

    ``count`` gives the size of a text passage: what the longest path is long by. Characters do; a tokenizer is exact.
    A passage that is a `Prompt` counts its tokens. ``most_passages``: of all remembered sequences together, 400 bytes
    each where prompts share passages, 1,600 at worst; when they are full, the tenant that holds most gives up what it
    sent longest ago. ``exact_size``: how much the engine's exact prefix cache holds, in the same unit; beginnings that
    were sent longer ago than that are not expected there. None: it holds everything. ``path``: a file in which the
    memory survives a restart.
    """

    def __init__(
        self,
        *,
        count: Callable[[str], int] = len,
        most_passages: int = MAX_PASSAGES,
        exact_size: int | None = None,
        path: str | Path | None = None,
    ) -> None:
        if most_passages < 1:
            raise InputError(f"most_passages={most_passages} remembers nothing", hint="1 or more")
        if exact_size is not None and exact_size < 1:
            raise InputError(f"exact_size={exact_size} holds nothing", hint="1 or more, or None")
        self._count = count
        self._memory = SequenceMemory(most_passages, exact_size)
        self._lock = threading.Lock()
        self._file = SequenceFile(path, most_passages) if path is not None else None
        for sent in self._file.load() if self._file is not None else ():
            self._memory.add(sent)

    @classmethod
    def for_cache(
        cls, cache_tokens: int, *, count: Callable[[str], int] = len, path: str | Path | None = None
    ) -> Arranger:
        """An arranger beside an exact prefix cache of so many tokens, as a server has it; it counts characters."""
        return cls(count=count, exact_size=cache_tokens * CHARS_PER_TOKEN, path=path)

    def arrange(
        self,
        passages: Sequence[Passage],
        *,
        namespace: Namespace | None = None,
        before: str = "",
        keep: OrderLimits = FREE,
        scores: Sequence[float] | None = None,
    ) -> Arrangement:
        """An order of the passages that earlier prompts had, as far as ``keep`` allows.

        ``before`` is what stands in front of them in the prompt: an exact prefix begins there. ``scores`` are the
        passages' relevance, for ``keep.displaced``.
        """
        _check(passages, keep, scores)
        namespace = namespace or NO_NAMESPACE
        scope = namespace.digest.encode()
        keys = tuple(_digest(one, scope) for one in passages)
        sizes = tuple(self._count(one) if isinstance(one, str) else len(one) for one in passages)
        root = _digest(before, scope)
        with self._lock:
            order, exact = self._find_order(keys, sizes, scope, root, keep, scores)
            seen = self._memory.find_holders(scope).keys() & keys
        expected = Expected(
            exact=sum(sizes[index] for index in order[:exact]),
            elsewhere=sum(sizes[index] for index in order[exact:] if keys[index] in seen),
            unseen=sum(size for key, size in zip(keys, sizes, strict=True) if key not in seen),
        )
        return Arrangement(
            order=tuple(order),
            repeats=tuple((one.index, one.first) for one in find_repeats(keys)),
            expected=expected,
            owner=_digest(namespace.tenant),
            scope=scope,
            root=root,
            keys=tuple(keys[index] for index in order),
            sizes=tuple(sizes[index] for index in order),
        )

    def record(self, arrangement: Arrangement) -> None:
        """The prompt was sent in this order."""
        self.take(arrangement.to_sent())

    def take(self, sent: Sent) -> None:
        """The same for a sequence that another arranger has recorded: both of them order passages for one engine."""
        with self._lock:
            self._memory.add(sent)
            if self._file is not None:
                self._file.add(sent)
                self._tidy_file()

    def list_sent(self, most: int) -> list[Sent]:
        """The sequences that were sent last, the oldest of them first: what another arranger may `take`."""
        with self._lock:
            return list(islice(self._memory, max(0, len(self._memory) - most), None))

    def forget(
        self,
        passages: Sequence[Passage],
        namespace: Namespace | None = None,
        *,
        before: str | None = None,
        kept: int | None = None,
    ) -> bool:
        """The engine has evicted prompts that begin with these passages in this order; False where none is remembered.

        ``before`` narrows it to prompts with that text in front; None means any. ``kept`` says that so many passages
        at their beginning are still held.
        """
        scope = (namespace or NO_NAMESPACE).digest.encode()
        keys = tuple(_digest(one, scope) for one in passages)
        with self._lock:
            roots = {_digest(before, scope)} if before is not None else self._memory.find_roots(scope, keys)
            return sum(self._drop(root, keys, kept) for root in roots) > 0

    def forget_sent(self, arrangement: Arrangement, *, kept: int | None = None) -> bool:
        """`forget` for an arrangement that was recorded."""
        with self._lock:
            return self._drop(arrangement.root, arrangement.keys, kept)

    def clear(self) -> int:
        """Forget everything: the engine was started anew, or its caches were reset. How many sequences went."""
        with self._lock:
            gone = len(self._memory)
            self._memory.clear()
            if self._file is not None:
                self._file.write_anew(())
            return gone

    def close(self) -> None:
        """Close the file, where there is one."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Arranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Sequences that are remembered."""
        with self._lock:
            return len(self._memory)

    def _drop(self, root: bytes, keys: tuple[bytes, ...], kept: int | None) -> bool:
        cut, left = self._memory.drop(root, keys if kept is None else keys[: kept + 1], kept or 0)
        if self._file is not None:
            self._file.remove(sent.name for sent in cut)
            if left is not None:
                self._file.add(left)
            self._tidy_file()
        return bool(cut)

    def _tidy_file(self) -> None:
        if self._file is not None and self._file.is_full:
            self._file.write_anew(self._memory)

    def _find_order(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        scope: bytes,
        root: bytes,
        keep: OrderLimits,
        scores: Sequence[float] | None,
    ) -> tuple[list[int], int]:
        """The order, and how many passages of it are an exact prefix; moves less where too much was displaced."""
        reach = keep.within
        while True:
            room = PlacementCheck(len(keys), keep, reach)
            path = find_longest_path(self._memory.find_root(root), keys, sizes, room, self._memory.oldest)
            order = order_rest(path, keys, sizes, self._memory, scope, room)
            if scores is None or keep.displaced is None or measure_displaced(order, scores) <= keep.displaced:
                return order, len(path)
            reach = (len(keys) if reach is None else min(reach, len(keys))) // 2


def _check(passages: Sequence[Passage], keep: OrderLimits, scores: Sequence[float] | None) -> None:
    if isinstance(passages, (str, Prompt)) or not all(isinstance(passage, (str, Prompt)) for passage in passages):
        raise InputError("passages is a list of texts or prompts", hint='arrange(["...", "..."])')
    if scores is not None:
        if len(scores) != len(passages):
            raise InputError(f"{len(scores)} scores for {len(passages)} passages", hint="one number for each")
        if not all(math.isfinite(score) and score >= 0 for score in scores):
            raise InputError("a score is below 0, or no number", hint="scores are 0 or more")
    if keep.displaced is not None and scores is None:
        raise InputError("keep.displaced needs scores", hint="arrange(passages, scores=[...])")


def _digest(passage: Passage, scope: bytes = b"") -> bytes:
    """Sixteen bytes that stand for a text or for tokens; never the same for both, nor in two namespaces."""
    if isinstance(passage, str):
        raw, kind = passage.encode("utf-8", "surrogatepass"), b"text"
    else:
        raw, kind = passage.token_ids.tobytes(), b"tokens"
    return hashlib.blake2b(raw, digest_size=16, key=scope[:64], person=kind).digest()


def group_documents(sizes: Sequence[int], retrievals: Iterable[Sequence[int]], most_size: int) -> list[tuple[int, ...]]:
    """Documents into prompts to compute ahead, of at most ``most_size``, by the documents' numbers; each stands in one.

    Those that are retrieved together stand together, in their usual order: retrievals are arranged one after the other,
    as `Arranger` would have sent them, and the orders that came up most often make the first prompts. Documents that no
    retrieval names stand alone: KV behind a stranger's document has seen what the question does not hold, and answers
    from it are further from cold (docs/research/arrange.md).

    >>> group_documents([1, 1, 1, 1], [[2, 0], [0, 2], [3, 2]], 2)
    [(2, 0), (3,), (1,)]
    """
    arranger = Arranger(count=lambda name: sizes[int(name)])
    often: Counter[tuple[int, ...]] = Counter()
    for retrieved in retrievals:
        found = arranger.arrange([str(number) for number in retrieved])
        arranger.record(found)
        often[tuple(retrieved[index] for index in found.order)] += 1
    placed: set[int] = set()
    prompts: list[tuple[int, ...]] = []
    for order, _ in often.most_common():
        new = tuple(dict.fromkeys(number for number in order if number not in placed))
        placed.update(new)
        prompts += _cut(new, sizes, most_size)
    return [*prompts, *((number,) for number in range(len(sizes)) if number not in placed)]


def _cut(group: Sequence[int], sizes: Sequence[int], most_size: int) -> Iterator[tuple[int, ...]]:
    """A group in parts that fit a prompt; a document larger than that is a part of its own."""
    part: list[int] = []
    size = 0
    for number in group:
        if part and size + sizes[number] > most_size:
            yield tuple(part)
            part, size = [], 0
        part.append(number)
        size += sizes[number]
    if part:
        yield tuple(part)
