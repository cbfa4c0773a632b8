"""What a day's work in plain Python gives: hashed blocks, and a dictionary of n-grams."""

from __future__ import annotations

from typing import Any

from _protocol import Cases, RawSpan, System, runs, serve

BLOCK = 16
SHORTEST = 32


class PrefixBlocks:
    """An exact-prefix cache: a block counts only if everything before it is equal too."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str, int]] = {}

    def register(self, donor_id: str, ids: list[int]) -> None:
        for end, key in self._keys(ids):
            self.blocks.setdefault(key, (donor_id, end))

    def lookup(self, ids: list[int]) -> Any:
        held: tuple[str, int] | None = None
        for _, key in self._keys(ids):
            block = self.blocks.get(key)
            if block is None:
                break
            held = block
        return held

    def spans(self, answer: Any) -> list[RawSpan]:
        return [(answer[0], 0, 0, answer[1])] if answer else []

    @staticmethod
    def _keys(ids: list[int]) -> Any:
        key = 0
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = hash((key, *ids[start : start + BLOCK]))
            yield start + BLOCK, key


class ContentBlocks:
    """Blocks by content alone, on the same grid in donor and query: the same text, moved by whole blocks only."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, ...], tuple[str, int]] = {}

    def register(self, donor_id: str, ids: list[int]) -> None:
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            self.blocks.setdefault(tuple(ids[start : start + BLOCK]), (donor_id, start))

    def lookup(self, ids: list[int]) -> Any:
        starts = range(0, len(ids) - BLOCK + 1, BLOCK)
        return [(start, held) for start in starts if (held := self.blocks.get(tuple(ids[start : start + BLOCK])))]

    def spans(self, answer: Any) -> list[RawSpan]:
        return runs([(at + i, donor_id, start + i) for at, (donor_id, start) in answer for i in range(BLOCK)])


class NgramDict:
    """Every 16th 16-gram of a donor in a dictionary; a query asks at every token and extends what it hits.

    Any run of 31 tokens holds one of them, so it misses only where the same 16 tokens stand in several places.
    """

    def __init__(self) -> None:
        self.grams: dict[tuple[int, ...], tuple[str, int]] = {}
        self.donors: dict[str, list[int]] = {}

    def register(self, donor_id: str, ids: list[int]) -> None:
        self.donors[donor_id] = ids
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            self.grams.setdefault(tuple(ids[start : start + BLOCK]), (donor_id, start))

    def lookup(self, ids: list[int]) -> Any:
        found: list[RawSpan] = []
        at = done = 0
        while at <= len(ids) - BLOCK:
            held = self.grams.get(tuple(ids[at : at + BLOCK]))
            if held is None:
                at += 1
                continue
            donor_id, start = held
            donor = self.donors[donor_id]
            left, right = 0, BLOCK
            while at - left > done and start - left > 0 and donor[start - left - 1] == ids[at - left - 1]:
                left += 1
            while at + right < len(ids) and start + right < len(donor) and donor[start + right] == ids[at + right]:
                right += 1
            if left + right >= SHORTEST:
                found.append((donor_id, start - left, at - left, left + right))
                at = done = at + right
            else:
                at += 1
        return found

    def spans(self, answer: Any) -> list[RawSpan]:
        return list(answer)


def make(cases: Cases) -> System:
    return {"prefix": PrefixBlocks, "content": ContentBlocks, "ngrams": NgramDict}[cases.args.system]()


if __name__ == "__main__":
    serve(make, system="prefix")
