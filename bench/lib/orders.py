"""Orders of passages to compare, the caches that serve them, and the best that any order could have had."""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from lib.streams import PromptStream
from semblend.arrange import Arranger

Order = Callable[[tuple[int, ...]], Sequence[int]]
BLOCK = 16
LOOKED_AT = 8
"""Earlier prompts that are compared for the longest part in one order; those that hold most of it."""


class BlockCache:
    """An exact prefix cache of blocks of 16 words; the longest unused block leaves first, behind before in front."""

    def __init__(self, sizes: Sequence[int], capacity: int | None = None) -> None:
        self._sizes, self._capacity = sizes, capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def serve(self, order: Iterable[int]) -> int:
        """Words that were cached; all of them are afterwards, as far as there is room."""
        chain = list(self._name_blocks(order))
        hits = sum(1 for _ in itertools.takewhile(self._blocks.__contains__, chain))
        for name in reversed(chain):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while self._capacity is not None and len(self._blocks) * BLOCK > self._capacity:
            self._blocks.popitem(last=False)
        return hits * BLOCK

    def _name_blocks(self, order: Iterable[int]) -> Iterable[int]:
        name, filled, pieces = 0, 0, []
        for passage in order:
            at, size = 0, self._sizes[passage]
            while at < size:
                taken = min(BLOCK - filled, size - at)
                pieces.append((passage, at))
                at, filled = at + taken, filled + taken
                if filled == BLOCK:
                    name = hash((name, *pieces))
                    yield name
                    filled, pieces = 0, []


class PassageCache:
    """What reuse at any offset could serve: passages that were sent before, whole, the longest unused leaves first."""

    def __init__(self, sizes: Sequence[int], capacity: int | None = None) -> None:
        self._sizes, self._capacity, self._used = sizes, capacity, 0
        self._there: OrderedDict[int, None] = OrderedDict()

    def serve(self, order: Iterable[int]) -> int:
        hits = 0
        for passage in order:
            if passage in self._there:
                hits += self._sizes[passage]
            else:
                self._used += self._sizes[passage]
            self._there[passage] = None
            self._there.move_to_end(passage)
        while self._capacity is not None and self._used > self._capacity:
            gone, _ = self._there.popitem(last=False)
            self._used -= self._sizes[gone]
        return hits


@dataclass
class Outcome:
    """Words of one run: asked, served by an exact prefix, behind it seen before, and those of one prompt in its order.

    ``seconds``: CPU time of each order.
    """

    asked: int = 0
    exact: int = 0
    seen: int = 0
    in_order: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        return self.exact / self.asked


def replay(stream: PromptStream, order: Order, capacity: int | None = None, *, look_behind: bool = False) -> Outcome:
    """Send a stream in the order that ``order`` gives each prompt; ``look_behind`` measures what lies in one order."""
    sizes, outcome = stream.sizes, Outcome()
    cache, history = BlockCache(sizes, capacity), _History(sizes)
    for prompt in stream.prompts:
        started = time.thread_time()
        put = order(prompt)
        outcome.seconds.append(time.thread_time() - started)
        if sorted(put) != sorted(prompt):
            raise ValueError(f"{prompt} became {put}")
        hits = cache.serve(put)
        outcome.asked += sum(sizes[passage] for passage in prompt)
        outcome.exact += hits
        if look_behind:
            seen, in_order = history.measure(put, hits)
            outcome.seen, outcome.in_order = outcome.seen + seen, outcome.in_order + in_order
            history.add(put)
    return outcome


def measure_ceiling(stream: PromptStream, capacity: int | None = None) -> float:
    """The share of words that reuse at any offset could serve."""
    cache = PassageCache(stream.sizes, capacity)
    hits = sum(cache.serve(prompt) for prompt in stream.prompts)
    return hits / sum(stream.sizes[passage] for prompt in stream.prompts for passage in prompt)


def keep_order(stream: PromptStream) -> Order:
    """As the retriever gave them."""
    del stream
    return lambda prompt: prompt


def sort_by_hash(stream: PromptStream) -> Order:
    """Sorted by a digest of the text: what a caller without memory can do."""
    digests = [blake2b(text.encode()).digest() for text in stream.texts]
    return lambda prompt: sorted(prompt, key=lambda passage: digests[passage])


def sort_by_age(stream: PromptStream) -> Order:
    """Sorted by when a passage was first sent."""
    del stream
    first: dict[int, int] = {}

    def order(prompt: tuple[int, ...]) -> Sequence[int]:
        put = sorted(prompt, key=lambda passage: first.get(passage, len(first)))
        for passage in put:
            first.setdefault(passage, len(first))
        return put

    return order


def sort_by_frequency(stream: PromptStream) -> Order:
    """The passage that was sent most often first."""
    del stream
    often: Counter[int] = Counter()

    def order(prompt: tuple[int, ...]) -> Sequence[int]:
        put = sorted(prompt, key=lambda passage: (-often[passage], passage))
        often.update(prompt)
        return put

    return order


def walk_greedily(stream: PromptStream) -> Order:
    """At each place the first passage that an earlier prompt had there, behind the same beginning."""
    del stream
    root: dict[int, dict] = {}  # type: ignore[type-arg]

    def order(prompt: tuple[int, ...]) -> Sequence[int]:
        node, put, left = root, [], list(prompt)
        while left:
            chosen = next((passage for passage in left if passage in node), None)
            if chosen is None:
                break
            node = node[chosen]
            put.append(chosen)
            left.remove(chosen)
        for passage in left:
            node[passage] = node = {}
        return put + left

    return order


def arrange(stream: PromptStream, capacity: int | None = None) -> Order:
    """`Arranger`, told the size of the cache; the time includes `record`."""
    sizes = stream.sizes
    size_of = {text: sizes[number] for number, text in enumerate(stream.texts)}
    arranger = Arranger(count=size_of.__getitem__, exact_size=capacity)

    def order(prompt: tuple[int, ...]) -> Sequence[int]:
        found = arranger.arrange([stream.texts[passage] for passage in prompt])
        arranger.record(found)
        return [prompt[index] for index in found.order]

    return order


def follow(given: Sequence[Sequence[int]]) -> Order:
    """Orders that somebody else has computed, one after the other."""
    orders = iter(given)
    return lambda _: next(orders)


SIMPLE: dict[str, Callable[[PromptStream], Order]] = {
    "retrieval order": keep_order,
    "sorted by hash": sort_by_hash,
    "oldest first": sort_by_age,
    "by frequency": sort_by_frequency,
    "greedy, one step": walk_greedily,
}


def find_optimum(prompts: Sequence[tuple[int, ...]]) -> int:
    """The most passages that any orders of these prompts serve from an exact prefix, the future being known.

    Exhaustive, with a bound: what the prompts still to come have in common with earlier ones.
    """
    ceilings = [0] * (len(prompts) + 1)
    for number in range(len(prompts) - 1, -1, -1):
        earlier = set(itertools.chain.from_iterable(prompts[:number]))
        ceilings[number] = ceilings[number + 1] + len(earlier & set(prompts[number]))
    best = 0

    def place(number: int, tree: dict[int, dict], hits: int) -> None:  # type: ignore[type-arg]
        nonlocal best
        best = max(best, hits)
        if number == len(prompts) or hits + ceilings[number] <= best:
            return
        for order in itertools.permutations(prompts[number]):
            node, found = tree, 0
            for passage in order:
                if passage not in node:
                    break
                node, found = node[passage], found + 1
            fresh: dict[int, dict] = {}  # type: ignore[type-arg]
            for passage in reversed(order[found + 1 :]):
                fresh = {passage: fresh}
            if found < len(order):
                node[order[found]] = fresh
            place(number + 1, tree, hits + found)
            if found < len(order):
                del node[order[found]]

    place(0, {}, 0)
    return best


class _History:
    """Prompts that were sent, for how much of another one stands in one of them in the same order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._sent = sizes, list[Sequence[int]]()
        self._holders: dict[int, list[int]] = {}

    def add(self, put: Sequence[int]) -> None:
        for passage in put:
            self._holders.setdefault(passage, []).append(len(self._sent))
        self._sent.append(put)

    def measure(self, put: Sequence[int], hits: int) -> tuple[int, int]:
        """Of the passages behind ``hits`` words: words that were sent before, and those in one prompt's order."""
        behind, at = [], 0
        for passage in put:
            at += self._sizes[passage]
            if at > hits + BLOCK:
                behind.append(passage)
        held: Counter[int] = Counter()
        for passage in behind:
            for number in self._holders.get(passage, [])[-64:]:
                held[number] += self._sizes[passage]
        seen = sum(self._sizes[passage] for passage in behind if passage in self._holders)
        donors = [self._sent[number] for number, _ in held.most_common(LOOKED_AT)]
        return seen, max((self._measure_common(behind, donor) for donor in donors), default=0)

    def _measure_common(self, behind: Sequence[int], donor: Sequence[int]) -> int:
        place = {passage: number for number, passage in enumerate(donor)}
        found = [(place[passage], self._sizes[passage]) for passage in behind if passage in place]
        most: list[int] = []
        for number, (at, size) in enumerate(found):
            before = [most[other] for other in range(number) if found[other][0] < at]
            most.append(size + max(before, default=0))
        return max(most, default=0)
