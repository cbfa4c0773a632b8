"""Documents into prompts to compute ahead: those that are retrieved together stand together, in their usual order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from semblend.arrange.arranger import Arranger


def group_documents(sizes: Sequence[int], retrievals: Iterable[Sequence[int]], most_size: int) -> list[tuple[int, ...]]:
    """Prompts of at most ``most_size``, by the documents' numbers; each document stands in one of them.

    Retrievals are arranged one after the other, as `Arranger` would have sent them, and the orders that came up most
    often make the first prompts. Documents that no retrieval names follow in their own order.

    >>> group_documents([1, 1, 1, 1], [[2, 0], [0, 2], [3, 2]], 2)
    [(2, 0), (3, 1)]
    """
    arranger = Arranger(count=lambda name: sizes[int(name)])
    often: Counter[tuple[int, ...]] = Counter()
    for retrieved in retrievals:
        found = arranger.arrange([str(number) for number in retrieved])
        arranger.record(found)
        often[tuple(retrieved[index] for index in found.order)] += 1
    placed: set[int] = set()
    line: list[tuple[int, ...]] = []
    for order, _ in often.most_common():
        new = tuple(dict.fromkeys(number for number in order if number not in placed))
        placed.update(new)
        line.append(new)
    line += [(number,) for number in range(len(sizes)) if number not in placed]
    return _fill(line, sizes, most_size)


def _fill(line: Iterable[tuple[int, ...]], sizes: Sequence[int], most_size: int) -> list[tuple[int, ...]]:
    """Put groups one behind the other until a prompt is full; a group is cut only where it does not fit one prompt."""
    prompts: list[tuple[int, ...]] = []
    prompt: list[int] = []
    size = 0
    for group in line:
        if prompt and size + sum(sizes[number] for number in group) > most_size:
            prompts.append(tuple(prompt))
            prompt, size = [], 0
        for number in group:
            if prompt and size + sizes[number] > most_size:
                prompts.append(tuple(prompt))
                prompt, size = [], 0
            prompt.append(number)
            size += sizes[number]
    return [*prompts, tuple(prompt)] if prompt else prompts
