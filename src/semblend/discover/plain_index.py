"""The fingerprint index as a dictionary: the readable twin, used where numba is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from semblend.errors import CapacityError
from semblend.fingerprint.hashes import HashArray, PositionArray, mix64

MAX_REPEATS = 8  # postings of one k-gram within one donor: repeated text must not flood a chain


class PlainIndex:
    """Same interface and same answers as `FlatIndex`, at some hundred bytes a posting."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chains: dict[int, list[int]] = {}  # key -> postings, newest last
        self._postings: dict[int, tuple[int, int, int]] = {}  # posting -> (key, slot, offset)
        self._of_slot: dict[int, list[int]] = {}
        self._next = 1

    @property
    def used(self) -> int:
        return len(self._postings)

    def add(self, slot: int, positions: PositionArray, hashes: HashArray, namespace_key: np.uint64) -> int:
        if self.used + len(positions) > self.capacity:
            raise CapacityError("the fingerprint index is full", hint="evict a donor first, or raise max_bytes")
        mine = self._of_slot[slot] = []
        repeats: dict[int, int] = {}
        for offset, key in zip(positions.tolist(), mix64(hashes ^ namespace_key).tolist(), strict=True):
            repeats[key] = repeats.get(key, 0) + 1
            if repeats[key] > MAX_REPEATS:
                continue
            self._postings[self._next] = (key, slot, offset)
            self._chains.setdefault(key, []).append(self._next)
            mine.append(self._next)
            self._next += 1
        return len(mine)

    def remove(self, slot: int) -> None:
        for posting in self._of_slot.pop(slot, ()):
            key, _, _ = self._postings.pop(posting)
            chain = self._chains[key]
            chain.remove(posting)
            if not chain:
                del self._chains[key]

    def probe(self, hashes: HashArray, namespace_key: np.uint64) -> npt.NDArray[np.uint32]:
        keys = mix64(hashes ^ namespace_key).tolist()
        return np.array([self._chains.get(key, (0,))[-1] for key in keys], np.uint32)

    def walk(self, posting: int) -> Iterator[tuple[int, int]]:
        for other in reversed(self._chains[self._postings[posting][0]]):
            yield self._postings[other][1:]
