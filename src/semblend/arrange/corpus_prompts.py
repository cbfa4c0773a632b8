"""Documents into prompts to compute ahead: those that are retrieved together stand together, in their usual order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from semblend.arrange.arranger import Arranger


def group_documents(sizes: Sequence[int], retrievals: Iterable[Sequence[int]], most_size: int) -> list[tuple[int, ...]]:
    """Prompts of at most ``most_size``, by the documents' numbers; each document stands in one of them.

    Retrievals are arranged one after the other, as `Arranger` would have sent them, and the orders that came up most
    often make the first prompts. Documents that no retrieval names stand alone: KV behind a stranger's document has
    seen what the question does not hold, and answers from it are further from cold (docs/research/arrange.md).

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
